"""Our side of a comparison: play rounds, time them, say what was done. Also counts the arithmetic of a round."""

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
        template(arch, training=False)(torch.zeros(1, *shape))
    return 3 * counter.get_total_flops()


def main() -> None:
    """Do the job on the command line: a configuration, `warm` rounds that do not count, `rounds` that do."""
    job = json.loads(sys.argv[1])
    with Session.of(job["config"]) as session:
        first, count = session.server, session.counted()
        for _ in range(job["warm"] - 1):
            session.play()
        seconds = []
        for _ in range(job["rounds"]):
            session.server = first if job["afresh"] else session.server
            began = time.perf_counter()
            session.play()
            seconds.append(time.perf_counter() - began)
        paths, accuracy = session.batched.explain(), session.accuracy()
    work = flop(session.task.shared, session.task.schema.shape) * count.samples
    protocol.answer("fedme", job["work"], seconds, count.steps, count.samples, accuracy, flop=work, paths=paths)


if __name__ == "__main__":
    main()
