"""Our side of a comparison: play rounds, time them, say what was done. Also counts the arithmetic of a round."""

import contextlib
import json
import sys
import time

import protocol
import torch
from session import Session
from torch.utils.flop_counter import FlopCounterMode

from fedme.core.model import Arch, template


def flop(arch: Arch, shape: tuple[int, ...]) -> int:
    """Floating-point operations of one training sample: the forward pass, counted by PyTorch, three times.

    The backward pass computes two products (gradients of inputs and of weights) for each one of the forward pass.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network = template(arch, training=False)
        network(torch.zeros(1, *shape, dtype=next(network.parameters()).dtype))
    return 3 * counter.get_total_flops()


def main() -> None:
    """Do the job on the command line: a configuration, `warm` rounds that do not count, `rounds` that do.

    With another configuration `beside` it, both play in turns, so that a machine that changes its speed favours neither.
    """
    job = json.loads(sys.argv[1])
    with contextlib.ExitStack() as stack:
        configs = [job["config"], *([job["beside"]] if job.get("beside") else [])]
        sessions = [stack.enter_context(Session.of(each)) for each in configs]
        firsts, counts = [each.server for each in sessions], [each.counted() for each in sessions]
        for _ in range(job["warm"] - 1):
            for session in sessions:
                session.play()
        seconds: list[list[float]] = [[] for _ in sessions]
        for _ in range(job["rounds"]):
            for session, first, spent in zip(sessions, firsts, seconds, strict=True):
                session.server = first if job["afresh"] else session.server
                began = time.perf_counter()
                session.play()
                spent.append(time.perf_counter() - began)
        sides = [
            protocol.side(spent, count.steps, count.samples, session.accuracy())
            for session, spent, count in zip(sessions, seconds, counts, strict=True)
        ]
        paths = sessions[0].dispatcher.explain()
    task = sessions[0].task
    work = flop(task.shared, task.schema.shape) * counts[0].samples
    protocol.tell("fedme", job["work"], sides[0], flop=work, paths=paths, beside=sides[1] if sides[1:] else None)


if __name__ == "__main__":
    main()
