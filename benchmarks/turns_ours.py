"""Our side of a comparison in turns: rounds of an experiment, through the engine."""

import json
import re
import sys
from typing import Any

import torch
import turns
from session import Count, Session
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from fedme.core.model import Arch, build_template


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    """Each gradient takes as much arithmetic as the forward pass. PyTorch's own formula is wrong for grouped convolutions."""
    output_mask = rest[-1]
    return sum(output_mask[:2]) * conv_flop_count(x, weight, grad)


def flop(arch: Arch, x: torch.Tensor, backward: bool) -> int:
    """Floating-point operations of one forward pass in training, with or without the backward pass, counted by PyTorch.

    Attention is taken apart into products of matrices, and so are LSTM layers, by counting in float64: their own kernels are
    not counted.
    """
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    counter, network = FlopCounterMode(display=False, custom_mapping=formulas), build_template(arch, training=True).double()
    with counter, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(backward):
        out = network(x.double() if x.is_floating_point() else x)
        if backward:
            out.sum().backward()
    return int(counter.get_total_flops())


def arithmetic(session: Session, samples: int) -> float:
    """Floating-point operations of one round: training, and what clients evaluate on their validation part."""
    first = next(iter(session.federation.clients.values())).train
    x = first.inputs(torch.arange(2))
    train, forward = (flop(session.task.shared, x, backward) / len(x) for backward in (True, False))
    if session.experiment.method_name != "fedme":
        return train * samples
    validated = sum(len(data.val) for data in session.federation.clients.values())
    return 2 * (train * samples + forward * validated)  # own and guest


def paths(explanation: list[str]) -> list[str]:
    """How models were trained, from the engine's explanation: the paths without their reasons."""
    found = (re.match(r"train: \d+ operations ([^(]*)", line) for line in explanation)
    return list(dict.fromkeys(match[1].strip() for match in found if match))


def main() -> None:
    """Serve the job on the command line: a configuration."""
    job = json.loads(sys.argv[1])
    with Session.of(job["config"]) as session:
        count = Count()

        def play() -> None:
            nonlocal count
            if count.steps:
                session.play()
            else:
                count = session.counted()

        def answer() -> dict[str, Any]:
            explanation = session.dispatcher.explain()
            said = {"steps": count.steps, "samples": count.samples, "flop": arithmetic(session, count.samples)}
            return said | {"paths": paths(explanation), "explanation": explanation} | session.tested()

        turns.serve(play, answer)


if __name__ == "__main__":
    main()
