"""Keyed masks depend on the seed alone: the same in a stack of clients as alone, otherwise ordinary dropout."""

import pytest
import torch
from torch import Tensor, nn

from fedme.core.dropout import KeyedDropout, at_draw, kept, mixed, uniform
from fedme.core.key import Key
from fedme.core.model import Arch, Model


def layer(p: float) -> KeyedDropout:
    return KeyedDropout(p).train()


def dropped(p: float, seed: Tensor, x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(layer(p), {"seed": seed}, (x,))
    return result


def seeds(count: int) -> Tensor:
    return torch.tensor([Key(1).at(i).integer() for i in range(count)])


def test_the_hash_is_the_finaliser_of_splitmix64() -> None:
    # The first outputs of the reference generator started at 0 and at 1234567.
    golden = -7046029254386353131
    assert int(mixed(torch.tensor(golden))) % 2**64 == 0xE220A8397B1DCDAF
    state = torch.tensor(1234567) + torch.tensor(golden) * torch.arange(1, 4)
    assert [int(x) % 2**64 for x in mixed(state)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_stack_of_clients_gets_the_masks_each_gets_alone() -> None:
    x = torch.rand(6, 5, 7) + 0.5
    stacked = torch.vmap(lambda seed, part: dropped(0.4, seed, part))(seeds(6), x)
    alone = torch.stack([dropped(0.4, seed, part) for seed, part in zip(seeds(6), x, strict=True)])
    assert torch.equal(stacked, alone)
    assert torch.equal(uniform(seeds(6), 9), torch.stack([uniform(seed, 9) for seed in seeds(6)]))
    draws = torch.stack([at_draw(seed, 3) for seed in seeds(6)])
    assert torch.equal(at_draw(seeds(6), 3), draws)
    assert torch.equal(torch.vmap(lambda seed: at_draw(seed, 3))(seeds(6)), draws)


def test_masks_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    dropped(0.5, torch.tensor(3), torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_the_share_of_zeros_is_p_and_the_mean_is_kept(p: float) -> None:
    y = dropped(p, torch.tensor(Key(5).integer()), torch.ones(300, 400))
    error = 4 * (p * (1 - p) / y.numel()) ** 0.5
    assert float((y == 0).double().mean()) == pytest.approx(p, abs=error)
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
    columns = (y == 0).double().mean(0)
    assert float((columns - p).abs().max()) < 5 * (p * (1 - p) / 300) ** 0.5  # no unit is left out or kept for ever


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniform(torch.tensor(Key(9).integer()), 200_000)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 60  # chi-squared with 19 degrees of freedom


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.3, 0.5, 1 / 3, 0.999999999, 1.0])
def test_what_is_kept_are_the_uniform_numbers_that_are_at_least_p(p: float) -> None:
    assert torch.equal(kept(seeds(4), 5000, p, 7), uniform(seeds(4), 5000, 7) >= p)
    several = at_draw(seeds(1)[0], torch.arange(5))
    assert torch.equal(several, torch.stack([at_draw(seeds(1)[0], draw) for draw in range(5)]))


def test_seeds_and_draws_give_unrelated_masks() -> None:
    seed = torch.tensor(Key(2).integer())
    masks = [uniform(s, 4000) >= 0.5 for s in (*(at_draw(seed, draw) for draw in range(4)), seed, seed + 1)]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert float((first == second).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_the_same_seed_repeats_its_mask() -> None:
    x = torch.rand(20)
    assert torch.equal(dropped(0.5, torch.tensor(8), x), dropped(0.5, torch.tensor(8), x))


def test_nothing_and_everything_dropped() -> None:
    x = torch.rand(3, 4)
    assert torch.equal(dropped(0.0, torch.tensor(1), x), x)
    assert torch.equal(dropped(1.0, torch.tensor(1), x), torch.zeros(3, 4))
    assert torch.equal(KeyedDropout(0.5).eval()(x), x)


def test_gradients_are_those_of_the_mask() -> None:
    x = torch.ones(50, dtype=torch.float64, requires_grad=True)
    y = dropped(0.5, torch.tensor(4), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == torch.float64
    assert torch.equal(gradient, y.detach())


def test_the_seed_is_not_part_of_the_saved_weights() -> None:
    assert nn.Sequential(KeyedDropout(0.5)).state_dict() == {}


def test_a_layer_used_twice_in_one_forward_draws_two_masks_and_the_same_ones_again():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.drop(x), self.drop(x)]) * self.scale

    model = Model.init(Arch.named("twice", Twice), Key(0))
    masks = {"drop": torch.tensor(7)}
    first = model(torch.ones(200), training=True, masks=masks)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, model(torch.ones(200), training=True, masks=masks))
