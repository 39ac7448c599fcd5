"""A model is a value: built, called, copied and averaged without side effects, whatever its module does."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedme.core import tree
from fedme.core.dropout import KeyedDropout
from fedme.core.key import Key
from fedme.core.model import Arch, Model, average, dropout_layers, has_batchnorm, not_finite, surely_finite, template


def dense(inputs: int = 4, hidden: int = 5, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, classes))


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result


class HalfFrozen(nn.Module):
    """A part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.body(x)))
        return result


class Normed(nn.Module):
    """Running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result


class Custom(nn.Module):
    """Two inputs, a bare parameter, a table of positions and a forward pass with a decision in it."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("positions", torch.arange(3))
        self.out = nn.Linear(3, classes)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        x = left if right is None else left * right
        result: Tensor = self.out(x + self.positions) / self.temperature  # type: ignore[operator]
        return result


class SharedDropout(nn.Module):
    """One dropout layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(0.5)
        self.one, self.two = nn.Sequential(nn.Linear(4, 30), drop), nn.Sequential(nn.Linear(30, 3), drop)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x))
        return result


def same(a: Model, b: Model) -> bool:
    return all(torch.equal({**a.params, **a.buffers}[n], {**b.params, **b.buffers}[n]) for n in {*a.params, *a.buffers})


def test_init_is_decided_by_the_key_and_leaves_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Model.init(Arch(dense), Key(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert same(first, Model.init(Arch(dense), Key(3)))
    assert not same(first, Model.init(Arch(dense), Key(4)))


def test_init_in_double_precision_starts_from_the_same_weights() -> None:
    single, double = (Model.init(Arch(Normed), Key(3), dtype) for dtype in (torch.float32, torch.float64))
    assert double.dtype == torch.float64
    assert all(torch.equal(double.params[n], single.params[n].double()) for n in single.params)
    assert double.buffers["norm.running_var"].dtype == torch.float64
    assert double.buffers["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("factory", [dense, Tied, HalfFrozen, Normed, Custom], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_module_of_a_model_computes_the_same(factory: type[nn.Module], dtype: torch.dtype) -> None:
    model = Model.init(Arch(factory), Key(1), dtype)
    model = model.with_params({n: p + 0.25 for n, p in model.params.items()})
    x = torch.rand(6, 3 if factory in (Tied, Custom) else 4, dtype=dtype)
    module = model.module()
    assert not module.training
    assert torch.equal(module(x), model(x))
    assert same(Model.of(model.arch, module, dtype), model)


def test_a_module_is_a_copy() -> None:
    model = Model.init(Arch(dense), Key(1))
    weight = model.params["0.weight"].clone()
    with torch.no_grad():
        next(model.module().parameters()).zero_()
    assert torch.equal(model.params["0.weight"], weight)
    module = dense()
    taken = Model.of(Arch(dense), module)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert taken.params["0.weight"].any()


def test_tied_weights_are_one_weight() -> None:
    model = Model.init(Arch(Tied), Key(2))
    assert list(model.params) == ["first.weight"]
    assert model.parameters == 9
    x = torch.rand(5, 3)
    doubled = model.with_params({"first.weight": 2 * model.params["first.weight"]})
    assert torch.allclose(doubled(x), 4 * model(x))
    module = doubled.module()
    assert module.get_submodule("first").weight is module.get_submodule("second").weight


def test_frozen_weights_are_buffers() -> None:
    model = Model.init(Arch(HalfFrozen), Key(2))
    assert set(model.params) == {"head.weight", "head.bias"}
    assert set(model.buffers) == {"body.weight", "body.bias"}
    assert model.parameters == 16 + 4 + 8 + 2
    x = torch.rand(2, 4)
    assert not torch.equal(model.with_buffers({n: -b for n, b in model.buffers.items()})(x), model(x))


def test_statistics_are_averaged_and_counters_kept() -> None:
    first, second = (Model.init(Arch(Normed), Key(i)) for i in (1, 2))
    x = torch.rand(8, 4)
    moved = second.with_buffers({n: b.clone() for n, b in second.buffers.items()})
    moved(x, training=True)
    assert int(moved.buffers["norm.num_batches_tracked"]) == 1
    assert torch.allclose(moved.buffers["norm.running_mean"], 0.1 * x.mean(0))
    assert not second.buffers["norm.running_mean"].any()

    mean = average([first, moved], [1, 3])
    assert torch.allclose(mean.buffers["norm.running_mean"], 0.75 * moved.buffers["norm.running_mean"])
    assert torch.allclose(mean.params["head.weight"], (first.params["head.weight"] + 3 * moved.params["head.weight"]) / 4)
    assert int(mean.buffers["norm.num_batches_tracked"]) == 0
    assert has_batchnorm(Arch(Normed))
    assert not has_batchnorm(Arch(dense))


def test_evaluation_changes_no_buffer() -> None:
    model = Model.init(Arch(Normed), Key(1))
    before = {n: b.clone() for n, b in model.buffers.items()}
    model(torch.rand(8, 4))
    assert all(torch.equal(model.buffers[n], b) for n, b in before.items())


def test_average_of_models_with_integer_buffers_only() -> None:
    models = [Model.init(Arch(Custom), Key(i)) for i in (1, 2)]
    mean = average(models)
    assert mean.buffers["positions"].tolist() == [0, 1, 2]
    assert torch.allclose(mean.params["out.weight"], (models[0].params["out.weight"] + models[1].params["out.weight"]) / 2)


def test_average_of_equal_models_and_of_one() -> None:
    model = Model.init(Arch(dense), Key(1))
    assert same(average([model]), model)
    assert same(average([model, model, model, model], [2, 2, 2, 2]), model)


def test_average_refuses_different_architectures() -> None:
    small, large = Arch.named("small", dense, hidden=5), Arch.named("large", dense, hidden=6)
    with pytest.raises(ValueError, match="cannot average large, small: different architectures"):
        average([Model.init(small, Key(0)), Model.init(large, Key(0))])


def test_weights_of_another_network_are_refused_by_name() -> None:
    model = Model.init(Arch(dense), Key(0))
    with pytest.raises(ValueError, match=r"do not fit the network: 3\.bias"):
        model.with_params({n: p for n, p in model.params.items() if n != "3.bias"}).module()


def test_inputs_may_be_a_dictionary() -> None:
    model = Model.init(Arch(Custom), Key(1))
    left, right = torch.rand(4, 3), torch.rand(4, 3)
    assert torch.equal(model({"left": left, "right": right}), model.module()(left, right=right))
    assert torch.equal(model({"left": left}), model(left))
    assert torch.allclose(model.with_params({**model.params, "temperature": torch.tensor(2.0)})(left), model(left) / 2)


def test_equal_recipes_are_equal() -> None:
    assert Arch(dense, hidden=6, classes=2) == Arch(dense, classes=2, hidden=6)
    assert hash(Arch(dense, hidden=6, classes=2)) == hash(Arch(dense, classes=2, hidden=6))
    assert Arch(dense, hidden=6) != Arch(dense, hidden=7)
    assert Arch(dense) != Arch(Normed)
    assert Arch.named("a", dense) != Arch.named("b", dense)
    assert pickle.loads(pickle.dumps(Arch(Normed))) == Arch(Normed)


def test_a_recipe_names_what_it_builds() -> None:
    assert Arch(Normed).name.endswith(":Normed")
    assert Arch(dense, hidden=6).name.endswith(":dense(hidden=6)")
    assert Arch(dense, hidden=6).parameters == 4 * 6 + 6 + 6 * 3 + 3


def test_dropout_layers_are_given_keyed_masks() -> None:
    recipe = Arch(dense, hidden=200)
    assert dropout_layers(recipe) == ("2",)
    model, x = Model.init(recipe, Key(1)), torch.rand(5, 4)
    first, second = (model(x, training=True, masks={"2": torch.tensor(seed)}) for seed in (11, 12))
    assert torch.equal(first, model(x, training=True, masks={"2": torch.tensor(11)}))
    assert not torch.equal(first, second)
    assert not torch.equal(first, model(x))
    assert torch.equal(model(x), model(x, masks={"2": torch.tensor(11)}))


def test_a_stack_of_models_sees_the_masks_each_sees_alone() -> None:
    recipe, x = Arch(dense, hidden=50), torch.rand(3, 5, 4, dtype=torch.float64)
    models = [Model.init(recipe, Key(i), torch.float64) for i in range(3)]
    seeds = torch.tensor([Key(i).integer() for i in range(3)])
    stack = {n: torch.stack([m.params[n] for m in models]) for n in models[0].params}
    run = torch.vmap(lambda params, seed, part: Model(recipe, params, {})(part, training=True, masks={"2": seed}))
    alone = [m(part, training=True, masks={"2": s}) for m, part, s in zip(models, x, seeds, strict=True)]
    assert torch.allclose(run(stack, seeds, x), torch.stack(alone), rtol=1e-12)


def test_a_dropout_layer_under_two_names_is_keyed_under_both() -> None:
    recipe = Arch(SharedDropout)
    assert not any(type(m) is nn.Dropout for m in template(recipe, True).modules())
    before = torch.get_rng_state()
    Model.init(recipe, Key(0))(torch.ones(2, 4), training=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_running_a_model_does_not_touch_the_template() -> None:
    recipe = Arch(dense)
    weights = [p.clone() for p in template(recipe, True).parameters()]
    model = Model.init(recipe, Key(5))
    model(torch.rand(2, 4), training=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, template(recipe, True).parameters(), strict=True))
    assert any(isinstance(m, KeyedDropout) for m in template(recipe, False).modules())
    assert not any(isinstance(m, KeyedDropout) for m in model.module().modules())


def test_gradients_reach_the_weights() -> None:
    model = Model.init(Arch(dense), Key(5))
    params = {n: p.requires_grad_() for n, p in model.params.items()}
    loss = model.with_params(params)(torch.rand(3, 4)).square().sum()
    assert all(bool(g.any()) for g in torch.autograd.grad(loss, list(params.values())))


@dataclass(frozen=True)
class Sent:
    value: object


def test_places_that_are_not_finite_are_named_in_models_too(monkeypatch):
    good = Model.init(Arch(dense), Key(1))
    name = next(iter(good.params))
    bad = good.with_params({**good.params, name: torch.full_like(good.params[name], float("nan"))})
    assert good.finite
    assert not bad.finite
    message = {"a": [good, bad], "b": float("inf"), "c": torch.zeros(2)}
    assert list(not_finite(message)) == [f"a[1].params.{name}", "b"]
    assert list(not_finite(bad)) == [f"params.{name}"]
    for value, sure in ((good, True), (bad, False), (1, True), ("x", True), (None, True), (1.0, False), (torch.ones(1), False)):
        assert surely_finite(Sent(value)) is sure  # of others it is found out by looking at every leaf
        assert list(not_finite(Sent(value))) == ([f"value.params.{name}"] if value is bad else [])
    assert not surely_finite(float("nan"))
    monkeypatch.setattr(tree, "not_finite", None)  # a model that has looked at itself is not looked at again
    assert list(not_finite(good)) == []


def test_frozen_weights_are_averaged_without_rounding() -> None:
    arch = Arch.named("frozen", lambda: nn.Linear(3, 2))
    frozen = torch.rand(2, 3, generator=Key(0).torch())
    models = [Model(arch, {"bias": torch.zeros(2)}, {"weight": frozen.clone()}) for _ in range(3)]
    assert torch.equal(average(models, [1.0, 3.0, 7.0]).buffers["weight"], frozen)
