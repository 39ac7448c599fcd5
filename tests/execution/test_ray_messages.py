"""What travels between a driver and the actors of a Ray cluster, without a cluster."""

import gc

import pytest
import torch
from hypothesis import given, strategies as st

from fedme.core.data import Split
from fedme.core.flat_params import FlatParams, flat_copy
from fedme.core.held_params import Form, HeldParams, held_params
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, Predict, Train
from fedme.execution import compiled, ray as fedme_ray
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_support import DENSE, NORMALISED, clients

fedme_ray.keep_ray_private()

from fedme.execution.ray.messages import (  # noqa: E402
    Message,
    OperationPacker,
    ResultPacker,
    Results,
    Splits,
    unpack_operations,
    unpack_results,
    weights_of,
)
from fedme.execution.ray.packed_weights import PackedWeights, nbytes  # noqa: E402
from fedme.execution.ray.weight_numbers import WeightNumbers  # noqa: E402

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SETS = st.lists(
    st.dictionaries(st.text(max_size=3), st.tuples(st.sampled_from(TYPES), SHAPES), max_size=4).map(
        lambda named: {
            name: torch.randn(shape, generator=Key(len(name)).torch()).mul(9).to(dtype)
            for name, (dtype, shape) in named.items()
        }
    ),
    max_size=4,
)


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@given(SETS)
def test_weights_arrive_as_they_were(sets):
    packed = PackedWeights.of(sets)
    assert all(map(equal, packed.unpack(), sets))
    assert packed.bytes.nbytes == sum(map(nbytes, packed.forms))


def test_weights_in_one_tensor_stay_in_one_tensor():
    model = Model.init(DENSE, Key(1))
    flat = flat_copy(model.params)
    packed = PackedWeights.of([flat, flat, model.params])
    first, second, third = packed.unpack()
    assert isinstance(first, FlatParams)
    assert first.layout is flat.layout  # what is computed from both at once is computed in the same way
    assert equal(first, flat)
    assert equal(second, flat)
    assert not isinstance(third, FlatParams)
    assert packed.forms[0] is packed.forms[1]
    assert first.flat.data_ptr() % 64 == 0


def operations():
    data = clients()
    one, normed = Model.init(DENSE, Key(1)), Model.init(NORMALISED, Key(2))
    client = data["1"]
    opt = {"own": {name: torch.ones_like(p) for name, p in one.params.items()}}
    optimizer = SGD(CrossEntropy(), 0.1, momentum=0.9, prox=0.1)
    other = client.train.labelled(client.train.y.flip(0))
    return client, [
        Train({"own": one}, optimizer, client.train, BatchSchedule(1, 4), Key(2).at("a", 3), opt, {"own": one}),
        Train({"own": normed}, SGD(CrossEntropy(), 0.1), other, BatchSchedule(1, 4), Key(5)),
        Train({"own": one}, optimizer, client.train, BatchSchedule(1, 4), Key(2), {}, {"own": one}, keep_opt=False),
        Evaluate(one, client.val),
        Predict(one, client.test),
        EstimateStatistics(normed, client.train),
        Predict(one, Split(client.train.source, torch.arange(3))),
    ]


def test_operations_and_results_arrive_as_they_were():
    client, ops = operations()
    splits = Splits({"train": client.train, "val": client.val, "test": client.test})
    numbers = WeightNumbers()
    held = {numbers.of(params): params for op in ops for params in weights_of(op)}
    packer = OperationPacker(splits, {id(params): number for number, params in held.items()})
    packed = [packer.pack(op) for op in ops]
    assert (
        len(packer.common) == 8
    )  # two architectures, two optimizers, one schedule, no mechanism, state kept or not: each once
    got = unpack_operations(Message(packed, [range(len(ops))], packer.common, 0), splits, held)
    assert got[0].data is client.train
    assert got[1].data.source is client.train.source
    assert torch.equal(got[1].data.y, client.train.y.flip(0))
    assert got[3].model is got[4].model
    wanted, results = Dispatcher()(ops), Dispatcher()(got)
    assert [result.opt.keys() for result, _ in wanted[:3]] == [{"own"}, set(), set()]
    answer = ResultPacker()
    values = [answer.pack(value) for value, _ in results]
    packages = [PackedWeights.of(sets) for sets in answer.packages.values()]
    sent = Results(values, [], list(answer.archs), PackedWeights.of(answer.outputs), [], [p.forms for p in packages], {})

    def fetched(number, package, place):
        return HeldParams(packages[package].forms[place], lambda: packages[package].unpack()[place])

    back = unpack_results(sent, {arch.name: arch for arch in (DENSE, NORMALISED)}, fetched)
    for (before, _), after in zip(wanted, back, strict=True):
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after)
        elif hasattr(before, "losses"):
            assert before.losses == after.losses
            assert equal(before.models["own"].params, after.models["own"].params)
            assert equal(before.models["own"].buffers, after.models["own"].buffers)
            assert before.opt.keys() == after.opt.keys()
            assert all(equal(before.opt[role], after.opt[role]) for role in before.opt)
        elif isinstance(before, Model):
            assert equal(before.buffers, after.buffers)
        else:
            assert before == after


def test_numbers_end_with_their_weights():
    numbers = WeightNumbers()
    flat = flat_copy(Model.init(DENSE, Key(1)).params)
    number = numbers.of(flat)
    assert numbers.of(flat) == number
    plain = dict(flat)
    for_now = numbers.of(plain)
    assert numbers.of(plain) == for_now != number
    assert numbers.gone() == [for_now]
    assert numbers.of(plain) != for_now
    numbers.gone()
    del flat
    gc.collect()
    assert numbers.gone() == [number]


def test_weights_elsewhere_are_fetched_when_they_are_read():
    model = Model.init(DENSE, Key(1))
    flat, times = flat_copy(model.params), []

    def fetch():
        times.append(1)
        return flat

    held = HeldParams(Form.of(flat), fetch)
    there = Model(DENSE, held, {})
    assert (there.dtype, there.device, len(held), list(held)) == (torch.float32, torch.device("cpu"), 4, list(flat))
    assert "nothing" not in held
    assert not held.here
    assert not times
    assert held_params(held) is held
    assert torch.equal(held["net.1.weight"] if "net.1.weight" in held else next(iter(held.values())), next(iter(flat.values())))
    assert held.flat_params is flat
    assert len(times) == 1


@pytest.mark.parametrize("path", ["stacked", "auto", "reference"])
def test_operations_of_one_program_stay_together(path):
    _, ops = operations()
    units = Dispatcher(path=path).units(ops)
    assert sorted(index for unit in units for index in unit.operations) == list(range(len(ops)))
    assert all(unit.effort > 0 for unit in units)
    together = [unit for unit in units if unit.own_program]
    compiles = path == "auto" and not isinstance(compiled.library(), str)
    assert bool(together) == (path != "reference" and not compiles)
