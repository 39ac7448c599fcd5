"""The part of a model that is shared, by prefix."""

import re

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model
from fedme.learning.partial_model import Part, cut, fork, merge, require_same_part, require_some, rest
from fedme_test_support import DENSE, LINEAR, NORMALISED, dense


def model(arch=NORMALISED, seed=0):
    return Model.init(arch, Key(seed), torch.float64)


def test_cut_takes_weights_and_buffers_by_prefix():
    part = cut(model(), "1.")
    assert list(part.params) == ["1.weight", "1.bias"]
    assert list(part.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    everything = cut(model(), "")
    assert everything.params.keys() == model().params.keys()
    assert everything.buffers.keys() == model().buffers.keys()
    assert cut(model(), "0.").buffers == {}


def test_an_unknown_prefix_is_refused_and_says_what_there_is():
    expected = "method.shared: no weight of normalised has a name that 'features.' matches; it has 0.bias, "
    with pytest.raises(TaskError, match=re.escape(expected)):
        require_some(NORMALISED, ("1.", "features."), "method.shared")


def test_fork_puts_together_what_was_kept_and_what_was_received():
    mine, theirs = model(seed=1), model(seed=2)
    theirs = theirs.with_buffers({name: value + 1 for name, value in theirs.buffers.items()})
    both = fork(mine.arch, rest(mine, "1."), cut(theirs, "1."))
    assert both.arch == mine.arch
    assert both.params.keys() == mine.params.keys()
    for name in mine.params:
        assert both.params[name] is (theirs if name.startswith("1.") else mine).params[name]
    assert all(both.buffers[name] is theirs.buffers[name] for name in mine.buffers)


def test_two_patterns_share_the_first_and_the_last_layer():
    patterns = ("0.", "3.")
    part, kept = cut(model(), patterns), rest(model(), patterns)
    assert list(part.params) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert list(kept.params) == ["1.weight", "1.bias"]
    mine, theirs = model(seed=1), model(seed=2)
    both = fork(mine.arch, rest(mine, patterns), cut(theirs, patterns))
    for name in mine.params:
        assert both.params[name] is (mine if name.startswith("1.") else theirs).params[name]


@pytest.mark.parametrize("prefix", ["", "0.", "1.", "3"])
def test_the_shared_part_and_the_rest_are_the_whole(prefix):
    mine = model()
    shared, kept = cut(mine, prefix), rest(mine, prefix)
    assert not shared.params.keys() & kept.params.keys()
    assert not shared.buffers.keys() & kept.buffers.keys()
    again = fork(mine.arch, kept, shared)
    assert {n: id(v) for n, v in again.params.items()} == {n: id(v) for n, v in mine.params.items()}
    assert {n: id(v) for n, v in again.buffers.items()} == {n: id(v) for n, v in mine.buffers.items()}


def test_clients_must_agree_on_the_shape_of_what_they_share():
    small = Arch.named("dense", dense, classes=2)
    require_same_part({"a": DENSE, "b": small}, DENSE, "0.")  # the first layer does not see the classes
    with pytest.raises(
        TaskError, match=re.escape("client b cannot share '' of dense: 2.weight depends on its number of classes")
    ):
        require_same_part({"a": DENSE, "b": small}, DENSE, "")
    with pytest.raises(TaskError, match="client b cannot share '2'"):
        require_same_part({"a": DENSE, "b": small}, DENSE, "2")


def test_merge_is_the_weighted_mean_and_keeps_counters():
    parts = [
        Part({"w": torch.tensor([1.0, 2.0])}, {"mean": torch.tensor(2.0), "count": torch.tensor(5)}),
        Part({"w": torch.tensor([5.0, -2.0])}, {"mean": torch.tensor(6.0), "count": torch.tensor(9)}),
    ]
    merged = merge(parts, [3.0, 1.0])
    assert merged.params["w"].tolist() == [2.0, 1.0]
    assert merged.buffers["mean"].item() == 3.0
    assert merged.buffers["count"].item() == 5
    assert merge(parts, [300, 100]).params["w"].tolist() == [2.0, 1.0]  # only proportions count
    assert merge(parts, [0.0, 2.0]).params["w"].tolist() == [5.0, -2.0]


def test_merge_without_buffers_and_of_one():
    part = cut(model(LINEAR), "")
    merged = merge([part], [7.0])
    assert merged.buffers == {}
    assert all(torch.allclose(merged.params[name], part.params[name], rtol=1e-15) for name in part.params)


def test_parts_of_different_networks_can_be_merged_where_they_agree():
    a, b = cut(model(DENSE, 1), "0."), cut(model(DENSE, 2), "0.")
    merged = merge([a, b], [1.0, 1.0])
    assert torch.allclose(merged.params["0.weight"], (a.params["0.weight"] + b.params["0.weight"]) / 2)
