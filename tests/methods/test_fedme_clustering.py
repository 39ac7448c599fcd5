"""Models with similar outputs are found, whatever odd outputs there are beside them."""

import warnings

import pytest
import torch

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.execution.lockstep import run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.methods.fedme.clustering import clustered, similar
from fedme_test_support import LINEAR, split


def outputs(*centres, samples=5, classes=3, spread=0.01, dtype=torch.float32):
    draw = Key(0).torch()
    return [(c + spread * torch.randn(samples, classes, generator=draw)).to(dtype) for c in centres]


def groups(labels):
    """The partition, whatever the clusters are called."""
    return {frozenset(i for i, label in enumerate(labels) if label == each) for each in set(labels)}


@pytest.mark.parametrize("seed", range(10))
def test_models_far_apart_are_separated_whatever_the_key(seed):
    labels = similar(outputs(0.0, 9.0, 0.0, 9.0, 9.0), 2, Key(seed))
    assert groups(labels) == {frozenset({0, 2}), frozenset({1, 3, 4})}
    assert all(type(label) is int for label in labels)


def test_it_is_the_outputs_on_every_sample_that_count_not_their_mean():
    a = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    b = a.flip(0)
    assert groups(similar([a, b, a + 0.01, b + 0.01], 2, Key(0))) == {frozenset({0, 2}), frozenset({1, 3})}


def test_the_key_decides_and_nothing_else():
    many = outputs(*torch.rand(30, generator=Key(3).torch()).tolist(), spread=0.3)
    first = similar(many, 4, Key(1))
    torch.rand(5)
    assert similar(many, 4, Key(1)) == first
    assert any(groups(similar(many, 4, Key(seed))) != groups(first) for seed in range(2, 8))
    assert set(first) <= set(range(4))


def test_one_cluster_takes_everybody_and_a_model_for_each_cluster_is_alone():
    many = outputs(0.0, 1.0, 2.0)
    assert similar(many, 1, Key(0)) == [0, 0, 0]
    assert sorted(similar(many, 3, Key(0))) == [0, 1, 2]
    assert sorted(similar(many, 9, Key(0))) == [0, 1, 2]  # more clusters than models
    assert similar(many[:1], 9, Key(0)) == [0]


@pytest.mark.parametrize("clusters", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_equal_models_are_fine_and_together(clusters, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = torch.ones(4, 3)
        assert len(set(similar([same] * 5, clusters, Key(seed)))) == 1
        labels = similar([same, same, same + 5, same, same + 5], clusters, Key(seed))
        assert labels[0] == labels[1] == labels[3]
        assert labels[2] == labels[4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("seed", range(5))
def test_diverged_models_do_not_disturb_the_others(bad, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels = similar([*outputs(9.0, -9.0, 9.0, -9.0), torch.full((5, 3), bad), torch.full((5, 3), bad)], 3, Key(seed))
        assert labels[4] == labels[5]
        assert not {labels[0], labels[2]} & {labels[1], labels[3]}
        assert len(similar([torch.full((5, 3), bad)] * 3, 2, Key(seed))) == 3
    half = outputs(9.0)[0]
    half[0, 0] = bad
    assert len(similar([half, *outputs(9.0, -9.0)], 2, Key(seed))) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_any_precision(dtype):
    assert groups(similar(outputs(0.0, 9.0, 0.0, dtype=dtype), 2, Key(0))) == {frozenset({0, 2}), frozenset({1})}


def test_enormous_outputs_are_still_told_apart():
    labels = similar(outputs(1e30, -1e30, 1e30, -1e30, spread=0.0), 2, Key(0))
    assert groups(labels) == {frozenset({0, 2}), frozenset({1, 3})}


# Models, by what they answer


def moved(seed, scale, shift=0.0):
    m = Model.init(LINEAR, Key(seed), torch.float64)
    return m.with_params({"0.weight": m.params["0.weight"] * scale, "0.bias": m.params["0.bias"] * scale + shift})


def clusters_of(models, unlabeled, count, on="logits"):
    asked = []

    def execute(operations):
        asked.extend(operations)
        return one_by_one(operations)

    result = run_in_lockstep({"s": clustered(models, unlabeled, count, on, Key(0))}, execute)["s"].value
    return result, asked


def test_models_are_grouped_by_their_answers_to_the_unlabeled_data():
    models = {"c": moved(1, 1.0), "a": moved(2, 1.0, 9.0), "b": moved(1, 1.01)}
    unlabeled = split(6, Key(3))
    found, asked = clusters_of(models, unlabeled, 2)
    assert list(found) == ["c", "a", "b"]
    assert found["c"] == found["b"] != found["a"]
    assert [(op.model, op.data) for op in asked] == [(m, unlabeled) for m in models.values()]


def test_probabilities_do_not_see_a_shift_of_all_logits():
    models = {"a": moved(1, 1.0), "b": moved(1, 1.0, 900.0), "c": moved(2, 9.0), "d": moved(2, 9.0, 900.0)}
    by_logits, _ = clusters_of(models, split(6, Key(3)), 2)
    by_softmax, _ = clusters_of(models, split(6, Key(3)), 2, "softmax")
    assert by_softmax["a"] == by_softmax["b"] != by_softmax["c"] == by_softmax["d"]
    assert by_logits != by_softmax


@pytest.mark.parametrize(("count", "unlabeled"), [(1, split(6, Key(3))), (3, None)])
def test_without_a_choice_nothing_is_predicted(count, unlabeled):
    found, asked = clusters_of({"a": moved(1, 1.0), "b": moved(2, 1.0)}, unlabeled, count)
    assert found == {"a": 0, "b": 0}
    assert asked == []
