"""Weights in one tensor are the same weights."""

import pickle

import torch
from hypothesis import given, strategies as st

from fedme.core import tree
from fedme.core.flat_params import ALIGNMENT, FlatParams, flat_copy, layout_of
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.tree import nbytes
from fedme_test_support import DENSE

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4)


def weights(shapes, seed=0, dtype=torch.float32):
    draw = Key(seed).torch()
    return {f"w{i}": torch.randn(shape, generator=draw, dtype=dtype) for i, shape in enumerate(shapes)}


@given(shapes=SHAPES, double=st.booleans())
def test_single_weights_are_aligned_views(shapes, double):
    params = weights(shapes, dtype=torch.float64 if double else torch.float32)
    flat = flat_copy(params)
    assert list(flat) == list(params)
    assert len(flat) == len(params)
    assert "w0" in flat
    assert "other" not in flat
    for name, value in params.items():
        assert torch.equal(flat[name], value)
        assert flat[name] is flat[name]
        assert not value.numel() or flat[name].data_ptr() % ALIGNMENT == 0
    assert nbytes(flat) == nbytes(params)


@given(shapes=SHAPES, shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_the_mean_has_the_same_bits(shapes, shares):
    trees = [weights(shapes, seed) for seed in range(len(shares))]
    want = tree.average(trees, shares)
    got = tree.average([flat_copy(each) for each in trees], shares)
    assert isinstance(got, FlatParams)
    for name, value in want.items():
        assert torch.equal(got[name], value)


def test_a_copy_is_independent_and_zeros_have_the_layout():
    flat = flat_copy(weights([(3, 2), (5,)]))
    other, zeros = flat.copy(), flat.zeros()
    other["w0"].fill_(1.0)
    assert not torch.equal(flat["w0"], other["w0"])
    assert zeros.layout is flat.layout
    assert not zeros.flat.any()


def test_equal_layouts_are_one_object():
    assert flat_copy(weights([(3, 2)])).layout is flat_copy(weights([(3, 2)], 1)).layout
    assert layout_of((("a", (2,)),), torch.float32) is not layout_of((("a", (2,)),), torch.float64)


def test_weights_of_several_types_stay_as_they_are():
    assert flat_copy({"w": torch.zeros(2), "count": torch.zeros((), dtype=torch.int64)}) is None
    assert flat_copy({"count": torch.zeros(2, dtype=torch.int64)}) is None
    assert flat_copy({}) is None


def test_what_is_not_finite_is_found():
    model = Model.init(DENSE, Key(0))
    flat = flat_copy(model.params)
    assert Model(model.arch, flat, {}).finite
    next(iter(flat.values())).view(-1)[-1] = float("inf")
    assert not Model(model.arch, flat, {}).finite


def test_another_process_gets_single_tensors():
    flat = flat_copy(weights([(3, 2), (5,)]))
    got = pickle.loads(pickle.dumps(flat))
    assert type(got) is dict
    assert all(torch.equal(got[name], value) for name, value in flat.items())
