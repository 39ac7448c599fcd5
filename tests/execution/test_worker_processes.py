"""Worker processes give what one process gives, and a worker that dies costs nothing but time."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, Predict, Train
from fedme.execution import compiled, dispatcher, reference, worker_processes
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import Reference
from fedme.execution.routing import effort
from fedme.execution.worker_processes import WorkerError, Workers
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Adam
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import BODIES, DENSE, DROPPING, LINEAR, NORMALISED, WIDE, clients, federate, personal, same, split, task

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


REFERENCE = Reference()


@pytest.fixture
def workers():
    pool = Workers(2, [REFERENCE])
    yield pool
    pool.close()


def operations(count=5):
    data = clients((7, 23, 1, 12, 2)[:count])
    optimizers = SGD(CrossEntropy(), 0.1, momentum=0.9), Adam(CrossEntropy(), 0.1)
    schedules = [BatchSchedule(2, 4, last_batch=last) for last in ("keep", "drop", "scale")]
    ops = [
        Train(
            {"own": Model.init(NORMALISED, Key(i), torch.float64)}, optimizers[i % 2], d.train, schedules[i % 3], Key(1).at(i)
        )
        for i, d in enumerate(data.values())
    ]
    models = [Model.init(DROPPING, Key(i), torch.float64) for i in range(count)]
    ops += [Predict(m, d.test) for m, d in zip(models, data.values(), strict=True)]
    ops += [EstimateStatistics(Model.init(NORMALISED, Key(i), torch.float64), d.train) for i, d in enumerate(data.values())]
    return ops + [Evaluate(m, d.test) for m, d in zip(models, data.values(), strict=True)]


def single(workers, ops):
    return [done[0] for done in workers([(REFERENCE, [op]) for op in ops])]


def test_results_are_those_of_one_process_bit_for_bit(workers):
    ops = operations()
    for _ in range(2):
        for op, (got, seconds) in zip(ops, single(workers, ops), strict=True):
            want = reference.run(op)
            if isinstance(op, Train):
                assert same(want.models["own"], got.models["own"])
                assert want.losses == got.losses
                assert all(torch.equal(want.opt["own"][n], got.opt["own"][n]) for n in want.opt["own"])
            elif isinstance(op, Predict):
                assert torch.equal(want, got)
            elif isinstance(op, EstimateStatistics):
                assert same(want, got)
            else:
                assert want == got
            assert seconds >= 0


def test_results_that_do_not_fit_the_shared_memory(monkeypatch):
    """They go through the pipe, which has no room for them, while the next work is on its way."""
    monkeypatch.setattr(worker_processes, "LEAST_MEMORY", 1 << 10)
    pool, data = Workers(2, [REFERENCE]), split(20_000, Key(0))
    ops = [Predict(Model.init(LINEAR, Key(i), torch.float64), data) for i in range(8)]
    try:
        found = single(pool, ops)
    finally:
        pool.close()
    assert found[0][0].nbytes > pool.memory
    assert all(torch.equal(got, reference.run(op)) for op, (got, _) in zip(ops, found, strict=True))


@pytest.mark.parametrize("name", ["fedme", "fml", "fedavg", "pfml"])
def test_methods_in_workers(name, monkeypatch):
    monkeypatch.setattr(dispatcher, "WORTHWHILE", 0)
    method = METHODS[name](train=Training(epochs=2, batch=5, lr=0.1))
    archs = (DENSE, NORMALISED, LINEAR) if name != "fedavg" else (LINEAR,) * 3
    setting = task(archs, shared=NORMALISED if name != "pfml" else LINEAR)
    data = clients()
    executor = Dispatcher(workers=2, path="workers")
    a = personal(method, *federate(method, setting, data, rounds=3))
    b = personal(method, *federate(method, setting, data, rounds=3, execute=executor))
    executor.close()
    assert all(same(a[c], b[c], 1e-9) for c in data)
    assert any("in workers" in line for line in executor.explain())


def slow_net():
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 4)

        def forward(self, x):
            time.sleep(0.02)
            return self.net(x)

    return Slow()


def test_a_worker_that_is_killed_is_replaced_and_its_work_done_again(workers):
    arch = Arch(slow_net)
    data = clients((20, 20, 20, 20))
    optimizer = SGD(CrossEntropy(), 0.1)
    ops = [
        Train({"own": Model.init(arch, Key(i), torch.float64)}, optimizer, d.train, BatchSchedule(1, 1), Key(i))
        for i, d in enumerate(data.values())
    ]
    expected = [reference.run(op) for op in ops]
    killed = []

    def kill():
        while not workers.workers:
            time.sleep(0.01)
        time.sleep(0.15)
        killed.append(workers.workers[0].process.pid)
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    results = single(workers, ops)
    thread.join()
    assert killed[0] not in [worker.process.pid for worker in workers.workers]
    assert all(same(want.models["own"], got.models["own"]) for want, (got, _) in zip(expected, results, strict=True))


def fatal_net():
    class Fatal(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 4)

        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)

    return Fatal()


def failing_net():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 4)

        def forward(self, x):
            raise ValueError("no such luck")

    return Failing()


@pytest.mark.parametrize(
    ("factory", "said"), [(fatal_net, "3 worker processes died"), (failing_net, "ValueError: no such luck")]
)
def test_an_operation_that_cannot_be_done_is_given_up_and_said(workers, factory, said):
    data = clients((5, 5))
    ops = [Predict(Model.init(Arch(factory), Key(0), torch.float64), d.test) for d in data.values()]
    with pytest.raises(WorkerError, match=said):
        single(workers, ops)
    assert workers.workers == []


def test_new_data_reaches_the_workers(workers):
    first, second = operations(2), operations(3)
    assert first[0].data.source is not second[0].data.source
    single(workers, first)
    assert torch.equal(single(workers, second)[3][0], reference.run(second[3]))


def test_weights_travel_through_shared_memory_that_grows_when_it_must(workers):
    workers.memory = 4096
    arch = Arch.named("broad", lambda: nn.Sequential(nn.Linear(3, 3000), nn.Tanh(), nn.Linear(3000, 4)))
    optimizer = SGD(CrossEntropy(), 0.1, momentum=0.9)
    for dtype in (torch.float32, torch.float64):  # the second needs twice as much
        ops = [
            Train({"own": Model.init(arch, Key(i), dtype)}, optimizer, d.train, BatchSchedule(1, 4), Key(i))
            for i, d in enumerate(clients((7, 9, 8)).values())
        ]
        results = single(workers, ops)
        processes = [worker.process.pid for worker in workers.workers]
        sent = sum(p.numel() * p.element_size() for p in ops[0].models["own"].params.values())
        assert workers.memory > 2 * sent  # the weights and the momentum
        for op, (got, _) in zip(ops, results, strict=True):
            want = reference.run(op)
            assert same(want.models["own"], got.models["own"])
            assert all(torch.equal(want.opt["own"][n], got.opt["own"][n]) for n in want.opt["own"])
        assert all(worker.theres[0].used > 0.9 * sent for worker in workers.workers)
        single(workers, ops)
        assert [worker.process.pid for worker in workers.workers] == processes


def test_results_that_do_not_fit_travel_all_the_same(workers):
    workers.memory = 4096
    data = clients((7, 300))["1"].train
    arch = Arch.named("many outputs", lambda: nn.Linear(3, 40))
    ops = [Predict(Model.init(arch, Key(i), torch.float64), data) for i in range(3)]
    for op, (got, _) in zip(ops, single(workers, ops), strict=True):
        assert torch.equal(got, reference.run(op))
    assert workers.memory < got.numel() * 8


def test_results_are_not_overwritten_by_later_messages(workers):
    arch = Arch.named("broad", lambda: nn.Linear(3, 3000))
    data = clients((7, 9))["0"].test
    ops = [Predict(Model.init(arch, Key(i), torch.float64), data) for i in range(6)]
    results = single(workers, ops)
    single(workers, ops[::-1])
    assert all(torch.equal(got, reference.run(op)) for op, (got, _) in zip(ops, results, strict=True))


def small_trainings(count, samples=20):
    data = clients((samples,) * count)
    optimizer = SGD(CrossEntropy(), 0.1)
    return [
        Train({"own": Model.init(NORMALISED, Key(i), torch.float64)}, optimizer, d.train, BatchSchedule(1, 5), Key(i))
        for i, d in enumerate(data.values())
    ]


def test_small_operations_stay_in_the_process():
    executor = Dispatcher(workers=2, path="workers")
    executor(small_trainings(3))
    assert executor.workers.workers == []
    assert {path for _, path, _ in executor.paths} == {"eager"}


def test_many_small_operations_share_messages(monkeypatch):
    executor, messages = Dispatcher(workers=2, path="workers"), []
    ops = small_trainings(40)
    run = executor.workers.__call__
    monkeypatch.setattr(executor, "workers", Counting(executor.workers, messages, run))
    results = executor(ops)
    executor.close()
    assert 8 <= len(messages) <= 16
    assert sum(messages) == 40
    assert all(same(got.models["own"], reference.run(op).models["own"]) for op, (got, _) in zip(ops, results, strict=True))
    assert all(seconds > 0 for _, seconds in results)


class Counting:
    """Workers that note the number of operations of every message."""

    def __init__(self, workers, messages, run):
        self.count, self.close, self.messages, self.run = workers.count, workers.close, messages, run

    def __call__(self, work):
        self.messages.extend(len(ops) for _, ops in work)
        return self.run(work)


def test_the_longest_work_is_known():
    ops = operations(3)
    assert effort(ops[1]) > effort(ops[0]) > effort(ops[2]) > effort(ops[3])


@pytest.mark.parametrize("name", METHODS)
def test_a_large_stack_is_dealt_out_with_the_same_bits(name, monkeypatch):
    method = METHODS[name](train=Training(epochs=2, batch=5, lr=0.1, momentum=0.9))
    third = LINEAR if name in ("local", "fedme") else DROPPING  # a group of five is dealt out, one of three is not
    archs = (
        (DENSE, WIDE, third, LINEAR, DENSE)
        if name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
        else (BODIES.get(name, LINEAR),) * 5
    )
    setting = task(archs, shared=DROPPING if name != "pfml" else LINEAR, public=8, unlabeled=split(10, Key(9)))
    data = clients((7, 23, 1, 12, 2), public=8)
    monkeypatch.setattr(compiled, "library", lambda: "left out")  # compiled code has threads instead
    whole, dealt = Dispatcher(), Dispatcher(workers=2)
    a = personal(method, *federate(method, setting, data, rounds=2, execute=whole))
    monkeypatch.setattr(dispatcher, "LARGE", 0)
    b = personal(method, *federate(method, setting, data, rounds=2, execute=dealt))
    dealt.close()
    assert all(same(a[c], b[c]) for c in data)
    there = sum(count for (what, path, _), count in dealt.paths.items() if what == "train" and path.endswith(" in workers"))
    assert there > 0 or name in ("centralized", "fd", "fedproto", "heterofl")  # one client, or losses of clients of their own


def test_networks_and_data_of_any_kind_reach_the_workers_by_number(workers):
    arch = Arch.named("nobody can name this", lambda: nn.Linear(3, 4))
    ops = [Predict(Model.init(arch, Key(i), torch.float64), d.test) for i, d in enumerate(clients((5, 5)).values())]
    for op, (got, _) in zip(ops, single(workers, ops), strict=True):
        assert torch.equal(got, reference.run(op))
