"""Routes say which backend runs an operation and why; seconds of a group are divided by effort."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, GaussianMechanism, Predict, Train
from fedme.execution import routing
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.routing import effort, run_timed
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Moreau
from fedme_test_support import DENSE, LINEAR, WIDE, clients, needs_compiled_code


class Normed(nn.Module):
    """A network that vmap can stack."""

    def __init__(self, width=6):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x):
        return self.b(torch.atan(self.norm(self.a(x))))  # the arctangent is not compiled


class Buffered(Normed):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


MOREAU = Moreau(0.1, 0.1, 1.0, 2)


def training(arch, optimizer=None, client="1", **more):
    data = clients((7, 12, 4))[client].train
    model = Model.init(arch, Key(0), torch.float64)
    return Train({"own": model}, optimizer or SGD(CrossEntropy(), 0.1), data, BatchSchedule(1, 5), Key(0), **more)


def estimation(arch):
    return EstimateStatistics(Model.init(arch, Key(0), torch.float64), clients()["1"].train)


@needs_compiled_code
@pytest.mark.parametrize(
    ("op", "path", "backend", "reasons"),
    [
        (training(DENSE), "auto", "compiled", []),
        (training(DENSE, SGD(CrossEntropy(), 0.1, alternating=True)), "auto", "stacked", ["not compiled: alternating steps"]),
        (
            training(Arch(Normed)),
            "auto",
            "stacked by vmap",
            ["not compiled or stacked: unsupported operation atan"],
        ),
        (
            training(Arch(Buffered)),
            "auto",
            "eager",
            ["not compiled or stacked: unsupported operation atan", "Buffered has buffers"],
        ),
        (training(Arch(Normed, width=1_000)), "auto", "eager", ["has more than 5,000 parameters"]),
        (training(Arch(Normed, width=1_000), MOREAU), "auto", "stacked by vmap", ["not compiled"]),
        (training(Arch(Normed, width=20_000), MOREAU), "auto", "reference", ["than 100,000 parameters", "Moreau is not SGD"]),
        (training(Arch(Normed, width=1_000), mechanism=GaussianMechanism(1.0, 1.0)), "auto", "stacked by vmap", []),
        (estimation(Arch(Buffered)), "auto", "reference", ["only the reference backend estimates running statistics"]),
        (estimation(DENSE), "stacked", "reference", ["only the reference backend estimates running statistics"]),
        (training(Arch(Normed, width=20_000)), "stacked", "stacked by vmap", []),
        (training(DENSE), "stacked", "stacked", []),
        (training(DENSE), "reference", "reference", ['engine.path = "reference"']),
        (training(DENSE), "workers", "eager", ['engine.path = "workers"']),
        (training(DENSE, MOREAU), "workers", "reference", ['engine.path = "workers"', "not eager: the optimizer Moreau"]),
        (training(Arch(Normed)), "compiled", "reference", ["not compiled: unsupported operation atan"]),
    ],
)
def test_a_route_is_the_first_backend_that_supports_an_operation_and_the_reasons_against_others(op, path, backend, reasons):
    route = Dispatcher(path=path).route(op)
    assert route.backend.name == backend
    assert all(reason in route.reason for reason in reasons)
    assert bool(reasons) or backend != "compiled" or route.reason == ""


def test_the_time_of_inference_is_measured_on_the_reference_backend():
    op = training(DENSE)
    route = Dispatcher().route(Evaluate(op.models["own"], op.data, timed=True))
    assert (route.backend.name, route.group, route.reason) == ("reference", None, "the time of inference is measured")


def test_a_route_is_asked_for_once_per_operation(monkeypatch):
    asked = []
    dispatcher = Dispatcher(path="stacked")
    route = dispatcher.route
    monkeypatch.setattr(dispatcher, "route", lambda op: asked.append(op) or route(op))
    supports = []
    for backend in dispatcher.backends:
        original = backend.supports
        monkeypatch.setattr(backend, "supports", lambda op, original=original: supports.append(op) or original(op))
    ops = [training(DENSE, client=client) for client in "012"]
    dispatcher(ops)
    dispatcher.explain()
    assert len(asked) == len(supports) == 3


class Fixed:
    """A backend that does nothing."""

    name = "fixed"

    def supports(self, op):
        return ""

    def group(self, op):
        return 0

    def run(self, ops, tick):
        return [None for _ in ops]


def test_the_seconds_of_a_group_are_divided_by_effort_not_by_samples(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(routing.time, "perf_counter", lambda: next(clock))
    small, large = training(LINEAR), training(WIDE)
    assert len(small.data) == len(large.data)
    (_, first), (_, second) = run_timed(Fixed(), [small, large])
    assert first + second == pytest.approx(10.0)
    assert second / first == pytest.approx(WIDE.parameters / LINEAR.parameters) == pytest.approx(effort(large) / effort(small))


def test_operations_without_effort_share_the_seconds_equally(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(routing.time, "perf_counter", lambda: next(clock))
    op = training(LINEAR)
    empty = Predict(op.models["own"], op.data.take(torch.arange(0)))
    assert [seconds for _, seconds in run_timed(Fixed(), [empty, empty])] == [5.0, 5.0]


def test_the_effort_of_a_training_counts_the_samples_it_visits():
    op = training(DENSE)
    parameters = op.models["own"].parameters
    for samples, last, steps, visits in (
        (12, "keep", None, 24),
        (12, "scale", None, 24),
        (12, "drop", None, 20),
        (4, "drop", None, 8),
        (12, "drop", 7, 35),
    ):
        schedule = BatchSchedule(2, 5, steps, last_batch=last)
        data = op.data.take(torch.arange(samples))
        assert effort(replace(op, data=data, batch_schedule=schedule)) == 3.0 * visits * parameters
