"""Operations on a device. There is only a processor here: what can be checked without another device is."""

import pytest
import torch

from fedme.config.experiment import ConfigError
from fedme.config.settings import EngineOptions
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Predict, Train
from fedme.execution import reference
from fedme.execution.device import from_device, missing, to_device
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.running.assembly import executor
from fedme_test_support import DENSE, NORMALISED, clients

CPU, META = torch.device("cpu"), torch.device("meta")


def train(arch):
    model = Model.init(arch, Key(1), torch.float64)
    opt = {"own": {name: torch.ones_like(p) for name, p in model.params.items()}}
    optimizer = SGD(CrossEntropy(), 0.1, momentum=0.9, prox=0.1)
    return Train({"own": model}, optimizer, clients()["1"].train, BatchSchedule(1, 4), Key(2), opt, {"own": model})


def test_all_weights_of_an_operation_move_and_the_data_stays():
    op = train(NORMALISED)
    there = to_device(op, META)
    for model in (there.models["own"], there.frozen["own"]):
        assert {t.device for t in (*model.params.values(), *model.buffers.values())} == {META}
        assert model.device == META
    assert {t.device for t in there.opt["own"].values()} == {META}
    assert there.data is op.data
    assert to_device(Predict(op.models["own"], op.data), META).model.device == META
    assert to_device(EstimateStatistics(op.models["own"], op.data), META).model.device == META


def test_results_come_home():
    trained = reference.run(train(NORMALISED))
    back = from_device(trained)
    assert back.losses == trained.losses
    assert all(torch.equal(back.models["own"].params[n], p) for n, p in trained.models["own"].params.items())
    estimated = to_device(EstimateStatistics(trained.models["own"], clients()["1"].train), META).model
    with pytest.raises(NotImplementedError, match="meta tensor"):  # it tries to: the tensors of this device have no data
        from_device(estimated)


@pytest.mark.parametrize("arch", [DENSE, NORMALISED])
def test_the_way_to_a_device_and_back_changes_nothing(arch):
    op = train(arch)
    expected = reference.run(op)
    ((trained, _),) = Dispatcher()([to_device(op, CPU)])
    got = from_device(trained)
    assert all(torch.allclose(got.models["own"].params[n], p, atol=1e-12) for n, p in expected.models["own"].params.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_refused_by_name():
    assert "'cuda' is not available on this machine; available: cpu" in missing("cuda")
    with pytest.raises(ConfigError, match="engine.device: 'cuda' is not available"):
        executor(EngineOptions(device="cuda"))
    with pytest.raises(ValueError, match="must be float32 on mps"):
        EngineOptions(device="mps", dtype="float64")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arch", [DENSE, NORMALISED])
def test_another_device_agrees(arch):
    op = train(arch)
    expected = reference.run(op)
    ((got, _),) = Dispatcher(device="cuda")([op])
    assert got.models["own"].device == CPU
    assert all(torch.allclose(got.models["own"].params[n], p, atol=1e-9) for n, p in expected.models["own"].params.items())
