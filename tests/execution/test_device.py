"""Operations on a device. There is only a processor here: "cpu:0" is the processor in the part of a device, in every branch."""

import gc

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from fedme.config.experiment import ConfigError, load
from fedme.config.settings import EngineOptions
from fedme.core.held_params import HeldParams
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, Predict, Train
from fedme.execution import device as devices, dispatcher, reference
from fedme.execution.device import DeviceWeights, chosen, gpus, missing, needed_memory
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.results import records
from fedme.running import run
from fedme.running.assembly import executor
from fedme.running.progress import Display
from fedme_test_support import DENSE, NORMALISED, clients

CPU, META, DEVICE = torch.device("cpu"), torch.device("meta"), "cpu:0"


DATA = clients()


def train(arch, dtype=torch.float64, seed=1, client="1"):
    model = Model.init(arch, Key(seed), dtype)
    opt = {"own": {name: torch.ones_like(p) for name, p in model.params.items()}}
    optimizer = SGD(CrossEntropy(), 0.1, momentum=0.9, prox=0.1)
    return Train({"own": model}, optimizer, DATA[client].train, BatchSchedule(1, 4), Key(2), opt, {"own": model})


def close(a, b, tolerance=1e-9):
    return all(torch.allclose(a[name], value, atol=tolerance) for name, value in b.items())


def test_all_weights_of_an_operation_move_and_the_data_stays():
    op = train(NORMALISED)
    weights = DeviceWeights(META, 1 << 20)
    there = weights.put(op)
    for model in (there.models["own"], there.frozen["own"]):
        assert {t.device for t in (*model.params.values(), *model.buffers.values())} == {META}
        assert model.device == META
    assert {t.device for t in there.opt["own"].values()} == {META}
    assert there.data is op.data
    assert weights.put(Predict(op.models["own"], op.data)).model.device == META
    assert weights.put(EstimateStatistics(op.models["own"], op.data)).model.device == META


@pytest.mark.parametrize("arch", [DENSE, NORMALISED])
def test_a_device_agrees_with_the_reference(arch):
    op = train(arch)
    execute = Dispatcher(device=DEVICE)
    ((got, _),) = execute([op])
    expected = reference.run(op)
    assert isinstance(got.models["own"].params, HeldParams)
    assert not got.models["own"].params.here
    assert got.models["own"].finite
    assert not got.models["own"].params.here  # to know that, nothing had to come here
    assert close(got.models["own"].params, expected.models["own"].params)
    assert close(got.models["own"].buffers, expected.models["own"].buffers)
    assert close(got.opt["own"], expected.opt["own"])
    assert got.losses == pytest.approx(expected.losses)
    assert not {"compiled", "eager"} & {path for _, path, _ in execute.paths}  # they are for the processor


def test_weights_stay_on_the_device_between_operations():
    execute = Dispatcher(device=DEVICE)
    op = train(DENSE)
    ((trained, _),) = execute([op])
    model, moved = trained.models["own"], execute.device_weights.moved
    data = DATA["1"]
    (score, _), (logits, _) = execute([Evaluate(model, data.val), Predict(model, data.test)])
    ((again, _),) = execute(
        [Train({"own": model}, op.optimizer, data.train, op.batch_schedule, Key(3), trained.opt, {"own": model})]
    )
    assert execute.device_weights.moved == moved
    assert not model.params.here
    here = reference.run(op).models["own"]
    assert torch.allclose(logits, reference.run(Predict(here, data.test)))
    assert score.loss == pytest.approx(reference.run(Evaluate(here, data.val)).loss)
    before = execute.device_weights.bytes
    assert before > 0
    del trained, model, again
    gc.collect()
    assert execute.device_weights.bytes < before  # weights leave the device with the last who could read them


def test_a_full_device_gives_back_what_was_used_longest_ago():
    execute = Dispatcher(device=DEVICE, device_memory=4000)  # less than one model
    results = [execute([train(DENSE, seed=seed)])[0][0] for seed in range(3)]
    assert execute.device_weights.bytes <= 2000
    for seed, result in enumerate(results):
        assert close(result.models["own"].params, reference.run(train(DENSE, seed=seed)).models["own"].params)


def test_a_cohort_is_cut_to_the_memory_of_the_device(monkeypatch):
    ops = [train(DENSE, client=client) for client in DATA]
    sizes = []
    run_timed = dispatcher.run_timed

    def noted(backend, ops, tick):
        sizes.append(len(ops))
        return run_timed(backend, ops, tick)

    monkeypatch.setattr(dispatcher, "run_timed", noted)
    whole = Dispatcher(device=DEVICE)(ops)
    assert sizes == [len(ops)]
    sizes.clear()
    cut = Dispatcher(device=DEVICE, device_memory=2 * needed_memory(ops[0]))(ops)
    assert sizes == [1] * len(ops)
    for (a, _), (b, _) in zip(whole, cut, strict=True):
        assert close(a.models["own"].params, b.models["own"].params)


class Noisy(nn.Module):
    """Draws from the global generator of its device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn(x.shape, dtype=x.dtype, generator=GENERATOR))


GENERATOR = torch.Generator()


def test_the_generator_of_a_device_is_seeded_and_restored(monkeypatch):
    monkeypatch.setattr(reference, "device_generators", lambda device: [GENERATOR])
    before = GENERATOR.get_state()
    op = Predict(Model.init(Arch(Noisy), Key(1)), DATA["1"].test)
    first, second = (reference.run(op) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(GENERATOR.get_state(), before)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_lower_precision_is_close_and_leaves_the_type_of_the_weights(precision):
    op = train(DENSE, torch.float32)
    ((got, _),) = Dispatcher(device=DEVICE, precision=precision)([op])
    expected = reference.run(op).models["own"].params
    params = got.models["own"].params
    assert {value.dtype for value in params.values()} == {torch.float32}
    assert close(params, expected, 0.05)
    assert (precision == "tf32") == close(params, expected, 1e-6)  # the processor has no tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.is_autocast_enabled("cpu")


def test_processes_get_different_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen("cuda") == "cuda:0"
    found = []
    for number in range(3):
        monkeypatch.setenv(devices.JOB, str(number))
        found.append(chosen("cuda"))
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert chosen("cuda:0") == "cuda:0"
    assert (gpus("cuda:1"), gpus("cuda"), gpus("cpu"), gpus("mps")) == (1, 1, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_refused_by_name():
    assert "'cuda:1' is not available on this machine; available: cpu" in missing("cuda:1")
    with pytest.raises(ConfigError, match="engine.device: 'cuda' is not available"):
        executor(EngineOptions(device="cuda"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "mps", "dtype": "float64"}, "must be float32 on mps"),
        ({"device": "gpu"}, "must be cpu, mps, cuda or cuda:N, got 'gpu'"),
        ({"precision": "tf32"}, "'tf32' is for devices, not for the processor"),
        ({"device": "cuda", "dtype": "float64", "precision": "bfloat16"}, "'bfloat16' is for dtype = 'float32'"),
        ({"device": "cuda", "device_memory": 0.0}, "must be > 0, got 0.0"),
    ],
)
def test_settings_of_devices(settings, reason):
    with pytest.raises(ValueError, match=reason):
        EngineOptions(**settings)


def test_a_whole_run_on_a_device(tmp_path):
    words = ["rounds=2", "partition.clients=3", "data.limit=150", "train.epochs=1", "finetune.epochs=1", "engine.dtype=float64"]
    losses = {}
    for name in ("cpu", DEVICE):
        experiment, _ = load("digits-fedme", [*words, f"engine.device={name}", f"output={tmp_path / name}"])
        run.start(experiment, Display(Console(quiet=True), quiet=True))
        losses[name] = [row["loss"] for row in records.read(tmp_path / name)]
    assert len(losses["cpu"]) > 20
    assert losses[DEVICE] == pytest.approx(losses["cpu"], abs=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arch", [DENSE, NORMALISED])
def test_another_device_agrees(arch):
    op = train(arch)
    expected = reference.run(op)
    ((got, _),) = Dispatcher(device="cuda")([op])
    assert close(got.models["own"].params, expected.models["own"].params)
