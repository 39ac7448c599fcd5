"""Arithmetic over named tensors treats every client of a stack by itself."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from fedme.core import tree
from fedme.core.flat_params import flat_copy
from fedme.core.key import Key
from fedme.core.model import Arch, Model


def some(seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(*lead, 3, 4, generator=generator, dtype=torch.float64),
        "bias": torch.randn(*lead, 4, generator=generator, dtype=torch.float64),
    }


def flat(a: tree.Params) -> Tensor:
    return torch.cat([value.flatten() for value in a.values()])


def test_arithmetic_is_elementwise() -> None:
    a, b = some(1), some(2)
    assert torch.allclose(flat(tree.add(a, b, 0.5)), flat(a) + 0.5 * flat(b))
    assert torch.allclose(flat(tree.sub(a, b)), flat(a) - flat(b))
    assert torch.allclose(flat(tree.scale(a, -2.0)), -2 * flat(a))
    assert torch.allclose(flat(tree.mix(a, b, 0.3)), 0.3 * flat(a) + 0.7 * flat(b))
    assert not flat(tree.zeros(a)).any()
    assert torch.equal(flat(a), flat(some(1)))  # nothing is changed in place


def test_names_decide_what_is_added_not_their_order() -> None:
    a, b = some(1), some(2)
    turned = {name: b[name] for name in reversed(b)} | {"other": torch.ones(2)}
    assert torch.equal(flat(tree.add(a, turned)), flat(tree.add(a, b)))


def test_norm_counts_every_client_by_itself() -> None:
    stack = some(3, 5)
    assert torch.allclose(tree.norm(stack), flat(stack).norm())
    alone = torch.stack([flat({name: value[i] for name, value in stack.items()}).norm() for i in range(5)])
    assert torch.allclose(tree.norm(stack, lead=1), alone)


def test_norm_of_a_single_number_per_client() -> None:
    assert tree.norm({"temperature": torch.tensor([3.0, -4.0])}, lead=1).tolist() == [3.0, 4.0]
    assert tree.clip({"temperature": torch.tensor([3.0, -0.5])}, 1.0, lead=1)["temperature"].tolist() == pytest.approx(
        [1.0, -0.5], abs=1e-5
    )


@given(st.floats(0.01, 100.0), st.floats(1e-3, 1e6), st.integers(0, 3))
def test_clipping_one_client_never_moves_another(limit: float, blow: float, which: int) -> None:
    stack = some(4, 4)
    blown = {name: value.clone() for name, value in stack.items()}
    for value in blown.values():
        value[which] *= blow
    before, after = tree.clip(stack, limit, lead=1), tree.clip(blown, limit, lead=1)
    others = [i for i in range(4) if i != which]
    assert all(torch.equal(before[name][others], after[name][others]) for name in stack)
    assert bool((tree.norm(after, lead=1) <= limit).all())
    alone = tree.clip({name: value[which] for name, value in blown.items()}, limit)
    assert all(torch.allclose(after[name][which], alone[name], rtol=1e-12, atol=0) for name in stack)


def test_clipping_shrinks_without_turning_and_leaves_small_ones() -> None:
    a = some(5)
    length = float(tree.norm(a))
    shrunk = tree.clip(a, length / 2)
    assert float(tree.norm(shrunk)) == pytest.approx(length / 2, rel=1e-6)
    assert torch.allclose(flat(shrunk) / flat(a), torch.tensor(0.5, dtype=torch.float64), rtol=1e-6)
    assert torch.equal(flat(tree.clip(a, 2 * length)), flat(a))
    assert not flat(tree.clip(tree.zeros(a), 1.0)).any()


def test_average_is_weighted_and_keeps_integer_tensors() -> None:
    trees = [
        {"w": torch.tensor([0.0, 4.0]), "steps": torch.tensor(7)},
        {"w": torch.tensor([8.0, 0.0]), "steps": torch.tensor(100)},
    ]
    mean = tree.average(trees, [0.75, 0.25])
    assert mean["w"].tolist() == [2.0, 3.0]
    assert mean["steps"].dtype == torch.int64
    assert int(mean["steps"]) == 7
    assert list(mean) == ["w", "steps"]
    assert trees[0]["w"].tolist() == [0.0, 4.0]


def test_average_and_distance_have_the_bits_of_all_tensors_together() -> None:
    draw = torch.Generator().manual_seed(0)
    trees = [{name: torch.randn(37, 41, generator=draw) for name in "abc"} | {"n": torch.tensor(t)} for t in range(3)]
    floats = [{name: t[name] for name in "abc"} for t in trees]
    expected = tree.add(tree.add(tree.scale(floats[0], 0.2), floats[1], 0.3), floats[2], 0.5)
    before = [t["a"].clone() for t in trees]
    mean = tree.average(trees, [0.2, 0.3, 0.5])
    assert all(torch.equal(mean[name], expected[name]) for name in "abc")
    assert all(torch.equal(t["a"], was) for t, was in zip(trees, before, strict=True))
    assert tree.distance(trees[0], trees[1]) == float(tree.norm(tree.sub(*floats[:2])))
    assert tree.distance({"n": torch.tensor(1)}, {"n": torch.tensor(2)}) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_of_many_models_have_the_bits_of_single_ones(dtype: torch.dtype) -> None:
    def weights(seed: int, size: int, flat: bool = True) -> tree.Params:
        drawn = torch.randn(size, generator=Key(seed).torch(), dtype=dtype)
        values = {"a": drawn[: size // 3], "b": drawn[size // 3 :]}
        return flat_copy(values) or values if flat else values

    sizes = [3, 40, 1472, 4000, tree.SMALL + 64]  # the last is measured alone
    pairs = [(weights(n, size), weights(n + 1000, size)) for n in range(400) for size in (sizes if n < 5 else sizes[:1])]
    pairs += [(weights(1, 40, flat=False), weights(2, 40)), ({"n": torch.tensor(1)}, {"n": torch.tensor(2)})]
    pairs.append((weights(1, 40), tree.scale(weights(1, 40), float("nan"))))
    pairs.append((weights(1, 40), flat_copy(tree.scale(weights(1, 40), float("inf"))) or {}))
    alone = [tree.distance(a, b) for a, b in pairs]
    assert str(tree.distances(pairs)) == str(alone)  # NaN is not equal to itself
    assert tree.distances([]) == []
    assert [tree.distances([pair])[0] for pair in pairs[:30]] == alone[:30]  # in any company


def test_the_average_of_one_is_itself() -> None:
    one = flat_copy({"a": torch.tensor([0.1, -0.0, float("nan")])})
    assert one is not None
    average = tree.average([one], [1.0])["a"]
    assert torch.equal(average.view(torch.int32), (one["a"] * 1.0).view(torch.int32))


def test_average_of_integers_only_is_the_first() -> None:
    assert int(tree.average([{"n": torch.tensor(3)}, {"n": torch.tensor(5)}], [0.5, 0.5])["n"]) == 3


def test_average_needs_a_share_for_everyone() -> None:
    with pytest.raises(ValueError, match="zip"):
        tree.average([some(1), some(2), some(3)], [0.5, 0.5])


def test_no_tensors_at_all_are_fine() -> None:
    assert tree.zeros({}) == tree.scale({}, 2.0) == tree.add({}, {}) == tree.clip({}, 1.0) == {}
    assert float(tree.norm({})) == 0.0


@dataclass(frozen=True)
class Message:
    weights: dict[str, Tensor]
    lender: str
    loss: float
    adopts: bool
    rounds: tuple[int, ...]
    nothing: None = None


def test_nbytes_counts_what_travels() -> None:
    assert tree.nbytes(torch.zeros(3, 4)) == 48
    assert tree.nbytes(torch.zeros(3, dtype=torch.float64)) == 24
    assert tree.nbytes(torch.zeros(1000, dtype=torch.uint8)[::10]) == 100  # of a view, what is seen
    assert tree.nbytes("né") == 3
    assert tree.nbytes({"a": 1.5, "bc": 2}) == 1 + 8 + 2 + 8
    message = Message({"w": torch.zeros(5)}, "c7", 0.5, True, (1, 2, 3))
    assert tree.nbytes(message) == (1 + 20) + 2 + 8 + 1 + 24 + 1
    assert tree.nbytes(frozenset({"ab", "c"})) == 3


def test_a_byte_is_a_byte() -> None:
    assert tree.nbytes(b"abcde") == 5


def test_an_architecture_travels_as_its_name() -> None:
    recipe = Arch.named("layer", nn.Linear, in_features=2, out_features=3)
    model = Model.init(recipe, Key(0))
    assert tree.nbytes(recipe) == len("layer")
    assert tree.nbytes(model) == len("layer") + len("weight") + 24 + len("bias") + 12


def test_nbytes_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="cannot hold a object"):
        tree.nbytes([object()])


def test_the_norm_of_a_stack_without_clients() -> None:
    empty = {"w": torch.zeros(0, 3, 2), "b": torch.zeros(0)}
    assert tree.norm(empty, lead=1).shape == (0,)
    assert {name: value.shape for name, value in tree.clip(empty, 1.0, lead=1).items()} == {"w": (0, 3, 2), "b": (0,)}


def test_what_is_not_finite_is_found_and_large_numbers_are_not() -> None:
    large = torch.full((9,), 3e38)
    assert large.sum().isinf()
    assert list(tree.not_finite({"a": large, "b": [1.0, torch.tensor(7)], "c": torch.zeros(0)})) == []
    for wrong in (float("inf"), float("-inf"), float("nan")):
        both = torch.tensor([1.0, wrong, -wrong])
        assert list(tree.not_finite({"a": large, "b": [torch.zeros(3), both], "c": wrong})) == ["b[1]", "c"]
