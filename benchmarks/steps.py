"""Processor time of a training step of a dense network in compiled code, in one thread, also on a busy machine."""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Train
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Mixing

SAMPLES, LR = 1000, 0.01


def dense(sizes: str) -> nn.Module:
    """A chain of dense layers with ReLU between them."""
    widths = [int(size) for size in sizes.split("-")]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def operation(sizes: str, batch: int, momentum: float, mixture: bool, epochs: int) -> Train:
    """A training on random samples: of one model, or of APFL's two."""
    inputs, classes = int(sizes.split("-")[0]), int(sizes.split("-")[-1])
    draw, arch, rule = Key(0).torch(), Arch(dense, sizes=sizes), SGD(CrossEntropy(), LR, momentum)
    samples = Arrays(torch.randn(SAMPLES, inputs, generator=draw), torch.randint(classes, (SAMPLES,), generator=draw))
    data, schedule = Split(samples, torch.arange(SAMPLES)), BatchSchedule(epochs, batch)
    if not mixture:
        return Train({"own": Model.init(arch, Key(1))}, rule, data, schedule, Key(2))
    models = {role: Model.init(arch, Key(1).at(role)) for role in ("own", "global")}
    mixing = Mixing(CrossEntropy(), rule, "step")
    return Train(models, mixing, data, schedule, Key(2), mixing.started(models, 0.5))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", help="as in 784-100-10")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--apfl", action="store_true", help="APFL's step of two models and their mixture")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    epochs = max(1, 5 * asked.batch // 10)
    op, execute, spent = (
        operation(asked.sizes, asked.batch, asked.momentum, asked.apfl, epochs),
        Dispatcher(path="compiled"),
        [],
    )
    for _ in range(10):
        began = time.process_time()
        execute([op])
        spent.append((time.process_time() - began) / op.batch_schedule.count(SAMPLES))
    steps = [1e6 * seconds for seconds in sorted(spent[1:])]
    print(f"{asked.sizes}: {statistics.median(steps):.1f} microseconds per step ({steps[0]:.1f} to {steps[-1]:.1f})")
    print(*execute.explain(), sep="\n")


if __name__ == "__main__":
    main()
