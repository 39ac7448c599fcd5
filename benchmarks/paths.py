"""Compare the paths of the engine on synthetic federations, in turns: seconds of one round of local training.

Run it with ``python benchmarks/paths.py``. It uses one thread and no workers.
"""

import statistics
import time

import torch
from torch import Tensor, nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, GaussianMechanism, LocalOptimizer, Train
from fedme.execution.dispatcher import Dispatcher, EnginePath
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Moreau

PATHS: tuple[EnginePath, ...] = ("compiled", "stacked", "reference")
SAMPLES, TURNS = 60, 5
OPTIMIZERS: dict[str, LocalOptimizer] = {
    "SGD": SGD(CrossEntropy(), 0.01),
    "SGD with momentum": SGD(CrossEntropy(), 0.01, momentum=0.9, weight_decay=1e-3),
    "pFedMe": Moreau(0.05, 0.01, 15.0, 5),
    "private SGD": SGD(CrossEntropy(), 0.01),
}


def mlr() -> nn.Module:
    """MLR 784-10."""
    return nn.Sequential(nn.Linear(784, 10))


def dnn() -> nn.Module:
    """DNN 784-100-10."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


class LayerNormNet(nn.Module):
    """DNN 784-100-10 with LayerNorm, which is stacked by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(784, 100), nn.LayerNorm(100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def trainings(arch: Arch, name: str, clients: int, source: Arrays) -> list[Train]:
    """One training of two epochs per client, in batches of 20."""
    mechanism = GaussianMechanism(1.0, 1.0) if name.startswith("private") else None
    schedule = BatchSchedule(2, 20, poisson=mechanism is not None)
    operations = []
    for i in range(clients):
        model = Model.init(arch, Key(i))
        models = {"theta": model, "w": model} if name == "pFedMe" else {"own": model}
        data = Split(source, torch.arange(i * SAMPLES, (i + 1) * SAMPLES))
        operations.append(Train(models, OPTIMIZERS[name], data, schedule, Key(7).at(i), mechanism=mechanism))
    return operations


def main() -> None:
    """Print one row per network, optimizer and number of clients."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    source = Arrays(torch.randn(6000, 784, generator=draw), torch.randint(0, 10, (6000,), generator=draw))
    dispatchers = {path: Dispatcher(path=path) for path in PATHS}
    print(f"| network | optimizer | clients | {' | '.join(PATHS)} |")
    for arch in (Arch(mlr), Arch(dnn), Arch(LayerNormNet)):
        for name in OPTIMIZERS:
            for clients in (20,) if name.startswith("private") else (20, 100):
                operations = trainings(arch, name, clients, source)
                seconds: dict[str, list[float]] = {path: [] for path in PATHS}
                for _ in range(TURNS):
                    for path, dispatcher in dispatchers.items():
                        start = time.perf_counter()
                        dispatcher(operations)
                        seconds[path].append(time.perf_counter() - start)
                medians = " | ".join(f"{statistics.median(times[1:]) * 1e3:.0f}" for times in seconds.values())
                print(f"| {arch.name.rpartition(':')[2]} | {name} | {clients} | {medians} |", flush=True)


if __name__ == "__main__":
    main()
