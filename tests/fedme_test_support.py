"""Small federations for tests: real methods, real engine, tiny data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fedme.core.data import Arrays, ClientData, ClientId, Schema, Split
from fedme.core.key import Key
from fedme.core.method import Member, Round, Task
from fedme.core.model import Arch, Model
from fedme.execution import compiled
from fedme.execution.lockstep import Executor
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import Reply, run_round

FEATURES, CLASSES = 3, 4

needs_compiled_code = pytest.mark.skipif(
    isinstance(compiled.library(), str), reason="needs compiled code (apt-get install g++ && make clean install)"
)


def linear(features: int = FEATURES, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(features, classes))


def dense(features: int = FEATURES, classes: int = CLASSES, hidden: int = 5, dropout: float = 0.0) -> nn.Module:
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), *middle, nn.Linear(hidden, classes))


def normalised(features: int = FEATURES, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))


LINEAR = Arch.named("linear", linear)
DENSE = Arch.named("dense", dense)
WIDE = Arch.named("wide", dense, hidden=9)
DROPPING = Arch.named("dropping", dense, dropout=0.5)
NORMALISED = Arch.named("normalised", normalised)
ARCHS = {arch.name: arch for arch in (LINEAR, DENSE, WIDE, DROPPING, NORMALISED)}


BODIES = {"fedproto": DENSE}  # methods that need a network with more than one layer


def split(samples: int, key: Key, dtype: torch.dtype = torch.float64) -> Split:
    draw = key.torch()
    y = torch.randint(0, CLASSES, (samples,), generator=draw)
    x = torch.randn(samples, FEATURES, generator=draw, dtype=dtype) + y[:, None] * torch.tensor([1.0, -1.0, 0.5])
    return Split(Arrays(x, y), torch.arange(samples))


def clients(sizes: Sequence[int] = (7, 12, 4), public: int = 0, seed: int = 1) -> dict[ClientId, ClientData]:
    """Clients of these training sizes over one source, with six validation and five test samples each."""
    whole = split(sum(sizes) + 11 * len(sizes) + public, Key(seed))
    parts = iter(whole.rows.split([public, *(size for n in sizes for size in (n, 6, 5))]))
    common = Split(whole.source, next(parts))
    return {
        str(i): ClientData(str(i), *(Split(whole.source, next(parts)) for _ in range(3)), common if public else None)
        for i in range(len(sizes))
    }


def task(
    archs: Sequence[Arch] = (LINEAR,) * 3,
    shared: Arch = LINEAR,
    public: int = 0,
    unlabeled: Split | None = None,
    room: Mapping[ClientId, int] | None = None,
    labels: Mapping[ClientId, str] | None = None,
    resolve: Callable[[str, int], Arch] = lambda name, classes: ARCHS[name],
) -> Task:
    members = {
        str(i): Member(str(i), arch, tuple((labels or {}).get(str(i), "abcd")), (room or {}).get(str(i)))
        for i, arch in enumerate(archs)
    }
    schema = Schema((FEATURES,), tuple("abcd"))
    return Task(schema, members, shared, resolve, unlabeled, public, torch.float64)


class Losing(InProcessEngine):
    """An engine that loses the replies of some clients (their state too: they never heard of the round)."""

    lost: Callable[[int, ClientId], bool] = staticmethod(lambda t, client: False)

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply]:
        return super().exchange({client: down for client, down in downs.items() if not self.lost(when.t, client)}, when)


def federate(
    method: Any,
    task: Task,
    data: Mapping[ClientId, ClientData],
    rounds: int = 3,
    seed: int = 0,
    lost: Callable[[int, ClientId], bool] = lambda t, client: False,
    execute: Executor | None = None,
) -> tuple[Any, Losing]:
    """Play some rounds; the server's state and the engine, which holds the clients' states."""
    root = Key(seed)
    engine = Losing(method, task, data, root, execute)
    engine.lost = lost
    method.check(task)
    server = method.init_server(task, root.at("init"))
    for t in range(rounds):
        server = run_round(method, task, engine, server, t, rounds, root).server
    return server, engine


def personal(method: Any, server: Any, engine: InProcessEngine, rounds: int = 3) -> dict[ClientId, Model]:
    """Every client's personal model."""
    deliveries = {client: method.deliver(engine.task, server, client) for client in engine.task.members}
    done = engine.evaluate_models(deliveries, Round(rounds - 1, rounds))
    return {client: each.value.models["personal"] for client, each in done.items()}


def same(a: Model, b: Model, tolerance: float = 0.0) -> bool:
    if a.arch != b.arch:
        return False
    pairs = [(a.params[name], b.params[name]) for name in a.params] + [(a.buffers[n], b.buffers[n]) for n in a.buffers]
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in pairs)


# An experiment of sites: what overrides a preset for it.
SITES = [
    "data.name=sites",
    "data.classes=['a','b']",
    "data.shape=[4]",
    "models.pool=['mlr']",
    "models.assign=mlr",
    "data.unlabeled=0",
]
