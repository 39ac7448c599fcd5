"""One operation alone, against PyTorch by hand and on modules of every awkward kind."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedme.core.data import Arrays, CropFlip, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, Predict, Train
from fedme.execution import reference
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau
from fedme_test_support import CLASSES, DENSE, DROPPING, FEATURES, LINEAR, NORMALISED, split

RULE = SGD(CrossEntropy(), 0.1, momentum=0.9)


def model(arch, seed=0, dtype=torch.float64):
    return Model.init(arch if isinstance(arch, Arch) else Arch(arch), Key(seed), dtype)


def trained(start, data, batch_schedule=BatchSchedule(2, 4), optimizer=RULE, key=Key(5), **more):
    return reference.run(Train({"own": start}, optimizer, data, batch_schedule, key, **more))


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(a.params[n], b.params[n]) for n in a.params) and all(
        torch.equal(a.buffers[n], b.buffers[n]) for n in a.buffers
    )


# Evaluation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_many_samples_depend_on_neither_threads_nor_other_models(dtype):
    count, draw, threads = 100_001, Key(3).torch(), torch.get_num_threads()
    data = Split(Arrays(torch.zeros(count, 1), torch.randint(3, (count,), generator=draw)), torch.arange(count))
    logits = [torch.randn(count, 3, generator=draw, dtype=dtype) for _ in range(2)]
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found += [reference.scores(logits, [data] * 2), [reference.scores([z], [data])[0] for z in logits]]
            found += [[reference.score(z, data.y) for z in logits]]
    finally:
        torch.set_num_threads(threads)
    assert all(scores == found[0] for scores in found)
    for score, z in zip(found[0], logits, strict=True):
        assert score.loss == pytest.approx(F.cross_entropy(z.double(), data.y).item(), rel=1e-6)


@pytest.mark.parametrize("arch", [LINEAR, DENSE, DROPPING, NORMALISED], ids=lambda a: a.name)
@pytest.mark.parametrize("samples", [1, 7, 1030])  # more than two evaluation batches
def test_evaluation_is_torchs_by_hand(arch, samples):
    m, data = model(arch), split(samples, Key(1))
    module = m.module()
    z = module(data.inputs()).detach()
    score = reference.run(Evaluate(m, data))
    assert score.samples == samples
    assert score.loss == pytest.approx(F.cross_entropy(z, data.y).item(), abs=1e-12)
    assert score.accuracy == (z.argmax(1) == data.y).double().mean().item()
    assert score.seconds == 0.0
    logits = reference.run(Predict(m, data))
    assert torch.allclose(logits, z, rtol=0, atol=1e-12)
    assert not logits.requires_grad
    assert not logits.is_inference()  # may be trained on later, as a target


def test_evaluation_uses_the_rows_and_targets_of_its_split():
    data = split(20, Key(1)).take(torch.tensor([9, 3, 17]))
    m = model(LINEAR)
    expected = F.cross_entropy(m(data.inputs()), data.y).item()
    assert reference.run(Evaluate(m, data)).loss == pytest.approx(expected)
    other = data.labelled((data.y + 1) % CLASSES)
    assert reference.run(Evaluate(m, other)).loss == pytest.approx(F.cross_entropy(m(data.inputs()), other.y).item())


def test_speed_is_measured_when_asked_for_and_changes_nothing_else():
    m, data = model(NORMALISED), split(7, Key(1))
    plain, timed = reference.run(Evaluate(m, data)), reference.run(Evaluate(m, data, timed=True))
    assert 0 < timed.seconds < 0.1
    assert (timed.samples, timed.loss, timed.accuracy) == (plain.samples, plain.loss, plain.accuracy)
    nothing = data.take(torch.tensor([], dtype=torch.int64))
    assert reference.run(Evaluate(m, nothing, timed=True)).samples == 0


def test_a_diverged_model_has_no_loss_and_nothing_right():
    m = model(LINEAR)
    lost = m.with_params({name: p * math.nan for name, p in m.params.items()})
    data = split(9, Key(1)).labelled(torch.zeros(9, dtype=torch.int64))
    score = reference.run(Evaluate(lost, data))
    assert math.isnan(score.loss)
    assert score.accuracy == 0.0


def test_no_data_has_no_score():
    nothing = split(5, Key(1)).take(torch.tensor([], dtype=torch.int64))
    score = reference.run(Evaluate(model(LINEAR), nothing))
    assert score.samples == 0
    assert math.isnan(score.loss)
    assert math.isnan(score.accuracy)
    assert len(reference.run(Predict(model(LINEAR), nothing))) == 0


def test_evaluation_changes_nothing():
    m, data = model(NORMALISED), split(40, Key(1))
    before = {name: value.clone() for name, value in m.buffers.items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    reference.run(Evaluate(m, data))
    reference.run(Predict(m, data))
    assert all(torch.equal(before[name], value) for name, value in m.buffers.items())
    assert torch.equal(state, torch.get_rng_state())


# Estimating statistics


def test_statistics_are_those_of_all_samples_of_a_split():
    start, whole = model(NORMALISED), split(500, Key(1))
    data = whole.take(torch.arange(100, 400))
    after = reference.run(EstimateStatistics(start, data))
    hidden = data.inputs() @ start.params["0.weight"].T + start.params["0.bias"]
    assert torch.allclose(after.buffers["1.running_mean"], hidden.mean(0), rtol=0, atol=1e-12)
    assert torch.allclose(after.buffers["1.running_var"], hidden.var(0), rtol=0, atol=1e-12)
    assert after.buffers["1.num_batches_tracked"] == 0
    assert after.params is start.params
    assert not start.buffers["1.running_mean"].any()
    trained(after, data)  # the new buffers can take part in a training


def test_statistics_of_many_samples_do_not_depend_on_their_order():
    start, data = model(NORMALISED), split(1025, Key(1))  # three batches, none of a single sample
    by_class = data.take(data.y.argsort(stable=True))
    hidden = data.inputs() @ start.params["0.weight"].T + start.params["0.bias"]
    for ordered in (data, by_class):
        after = reference.run(EstimateStatistics(start, ordered))
        assert torch.allclose(after.buffers["1.running_mean"], hidden.mean(0), rtol=0, atol=1e-3 * hidden.std())
        assert torch.allclose(after.buffers["1.running_var"], hidden.var(0), rtol=1e-2)
    assert same(after, reference.run(EstimateStatistics(start, by_class)))


@pytest.mark.parametrize("samples", [0, 1])
def test_a_model_keeps_its_statistics_where_there_is_no_variance(samples):
    start = model(NORMALISED)
    assert reference.run(EstimateStatistics(start, split(5, Key(1)).take(torch.arange(samples)))) is start


def test_a_network_without_statistics_stays_as_it_is():
    start = model(DENSE)
    assert reference.run(EstimateStatistics(start, split(5, Key(1)))) is start


def test_statistics_of_images():
    arch = Arch.named("images", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)))
    x = torch.randn(7, 2, 6, 6, generator=Key(1).torch(), dtype=torch.float64)
    start = model(arch)
    after = reference.run(EstimateStatistics(start, Split(Arrays(x, torch.zeros(7, dtype=torch.int64)), torch.arange(7))))
    hidden = F.conv2d(x, start.params["0.weight"], start.params["0.bias"]).transpose(0, 1).flatten(1)
    assert torch.allclose(after.buffers["1.running_mean"], hidden.mean(1), rtol=0, atol=1e-12)
    assert torch.allclose(after.buffers["1.running_var"], hidden.var(1), rtol=0, atol=1e-12)


# Training


@pytest.mark.parametrize("arch", [LINEAR, DENSE, NORMALISED], ids=lambda a: a.name)
def test_training_is_torchs_by_hand_statistics_included(arch):
    start, data, key, local = model(arch), split(14, Key(1)), Key(5), BatchSchedule(3, 4)
    result = trained(start, data, local, key=key)
    module = start.module().train()
    optimiser = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    total = 0.0
    batches = local.batches(14, key.at("batches"))
    for rows in batches:
        loss = F.cross_entropy(module(data.inputs(rows)), data.y[rows])
        total += loss.item() * len(rows)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = result.models["own"]
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        got = {**after.params, **after.buffers}[name]
        assert got.dtype == value.dtype
        assert torch.allclose(got, value, rtol=0, atol=1e-12)
    assert result.losses == {"own": pytest.approx(total / sum(map(len, batches)), abs=1e-12)}
    assert not any(p.requires_grad for p in after.params.values())


def test_training_leaves_the_model_it_was_given():
    start = model(NORMALISED)
    before = {name: value.clone() for name, value in (start.params | start.buffers).items()}
    trained(start, split(9, Key(1)))
    assert all(torch.equal(before[name], value) for name, value in (start.params | start.buffers).items())


def test_a_batch_of_one_uses_the_statistics_there_are():
    start, data = model(NORMALISED), split(1, Key(1))
    result = trained(start, data, BatchSchedule(1, 4), SGD(CrossEntropy(), 0.1))
    module = start.module()  # in evaluation mode
    F.cross_entropy(module(data.inputs()), data.y).backward()
    for name, p in module.named_parameters():
        expected = p if p.grad is None else p - 0.1 * p.grad
        assert torch.allclose(result.models["own"].params[name], expected, rtol=0, atol=1e-12)
    assert all(torch.equal(result.models["own"].buffers[n], start.buffers[n]) for n in start.buffers)
    last = trained(start, split(5, Key(1)), BatchSchedule(1, 4)).models["own"]  # batches of four and of one
    assert last.buffers["1.num_batches_tracked"].item() == 1
    assert all(torch.isfinite(p).all() for p in last.params.values())


def normalised_and_dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 30), nn.BatchNorm1d(30), nn.Dropout(0.5), nn.Linear(30, CLASSES))


def test_a_batch_of_one_still_drops():
    start, data = model(normalised_and_dropping), split(1, Key(1))
    after = trained(start, data, BatchSchedule(1, 4), SGD(CrossEntropy(), 0.1)).models["own"]
    still = (after.params["3.weight"] == start.params["3.weight"]).all(0)  # inputs that were dropped have no gradient
    assert 5 < int(still.sum()) < 25


@pytest.mark.parametrize("arch", [LINEAR, DENSE, DROPPING, NORMALISED], ids=lambda a: a.name)
def test_no_samples_no_steps(arch):
    start, nothing = model(arch), split(5, Key(1)).take(torch.tensor([], dtype=torch.int64))
    result = trained(start, nothing)
    assert same(result.models["own"], start)
    assert result.losses == {}


def test_momentum_goes_on_where_it_is_handed_in():
    start, data = model(DENSE), split(8, Key(1))
    local = BatchSchedule(1, 4, shuffle=False)
    two = trained(start, data, BatchSchedule(2, 4, shuffle=False))
    once = trained(start, data, local)
    again = trained(once.models["own"], data, local, opt=once.opt)
    assert same(again.models["own"], two.models["own"])
    assert not same(trained(once.models["own"], data, local).models["own"], two.models["own"])


def test_double_precision_models_train_on_single_precision_data_and_the_other_way_round():
    single, double = split(9, Key(1), torch.float32), split(9, Key(1), torch.float64)
    for start, data in ((model(DENSE), single), (model(DENSE, dtype=torch.float32), double)):
        after = trained(start, data).models["own"]
        assert all(p.dtype == start.dtype for p in after.params.values())
        assert reference.run(Predict(after, data)).dtype == start.dtype
    both = [trained(model(DENSE, dtype=t), split(9, Key(1))).models["own"] for t in (torch.float32, torch.float64)]
    assert torch.allclose(both[0].params["0.weight"].double(), both[1].params["0.weight"], atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_tied_weights_stay_tied_and_learn_from_both_uses():
    start, data, local = model(Tied), split(8, Key(1)), BatchSchedule(3, 8, shuffle=False)
    after = trained(start, data, local, SGD(CrossEntropy(), 0.1)).models["own"]
    module = start.module()
    optimiser = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(module(data.inputs()), data.y).backward()
        optimiser.step()
    assert torch.allclose(after(data.inputs()), module(data.inputs()), rtol=0, atol=1e-12)
    assert after.module().second.weight is after.module().first.weight or torch.equal(
        after.module().second.weight, after.module().first.weight
    )


class FunctionalDropout(nn.Module):
    """Draws from the global generator, as much published code does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("arch", [Arch(FunctionalDropout), DROPPING], ids=lambda a: a.name)
def test_dropout_is_decided_by_the_key_and_leaves_the_global_generator(arch):
    start, data = model(arch), split(12, Key(1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trained(start, data).models["own"]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(trained(start, data).models["own"], first)
    whole = BatchSchedule(1, 12, shuffle=False)  # one step on everything: only the masks can differ
    a, b = (trained(start, data, whole, key=Key(seed)).models["own"] for seed in (1, 2))
    assert not same(a, b)


def test_the_global_generator_is_restored_after_an_error():
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"after {torch.rand(1)}")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="after"):
        trained(model(Failing), split(4, Key(1)))
    assert torch.equal(before, torch.get_rng_state())


def test_masks_differ_by_step_by_role_and_by_call_within_a_step():
    start, data = model(DROPPING), split(6, Key(1))
    seen = []

    class Spy:
        def __call__(self, logits, y):
            seen.extend(z.detach().clone() for z in logits.values())
            return CrossEntropy()(logits, y)

    still = SGD(Spy(), 1e-300)  # a step that changes nothing: only masks can make outputs differ
    reference.run(Train({"a": start, "b": start}, still, data, BatchSchedule(2, 6, shuffle=False), Key(5)))
    reference.run(
        Train({"theta": start, "w": start}, Moreau(1e-300, 1e-300, 0.0, 2, objective=Spy()), data, BatchSchedule(1, 6), Key(5))
    )
    assert len(seen) == 6
    sums = [round(z.abs().sum().item(), 9) for z in seen]
    assert len(set(sums)) == 6


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        self.body.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


@pytest.mark.parametrize(
    "optimizer", [SGD(CrossEntropy(), 0.1, 0.9, 0.1, clip=1.0), Moreau(0.1, 0.1, 1.0, 2, 0.1)], ids=["sgd", "moreau"]
)
def test_frozen_parameters_never_move(optimizer):
    start = model(HalfFrozen)
    roles = {"theta": start, "w": start} if isinstance(optimizer, Moreau) else {"own": start}
    after = reference.run(Train(roles, optimizer, split(9, Key(1)), BatchSchedule(2, 4), Key(5))).models
    for m in after.values():
        assert torch.equal(m.buffers["body.weight"], start.buffers["body.weight"])
        assert torch.equal(m.buffers["body.bias"], start.buffers["body.bias"])
        assert not torch.equal(m.params["head.weight"], start.params["head.weight"])
        assert not torch.equal(m.buffers["norm.running_mean"], start.buffers["norm.running_mean"])


def test_a_parameter_that_is_not_used_has_no_gradient():
    start = model(HalfFrozen)
    after = trained(start, split(9, Key(1)), optimizer=SGD(CrossEntropy(), 0.1)).models["own"]
    assert torch.equal(after.params["unused"], start.params["unused"])


class Reassigning(nn.Module):
    """Updates a buffer by assigning a new tensor, not in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.mean(0).detach()
        return self.out(x - self.centre)


def test_buffers_that_a_module_assigns_are_kept():
    start, data = model(Reassigning), split(8, Key(1))
    after = trained(start, data, BatchSchedule(1, 8)).models["own"]
    assert torch.allclose(after.buffers["centre"], 0.5 * data.inputs().mean(0))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 2), nn.Linear(4, CLASSES)

    def forward(self, symbols: Tensor, numbers: Tensor) -> Tensor:
        return self.out(torch.cat([self.table(symbols), numbers], 1))


def test_inputs_may_be_a_dictionary_of_symbols_and_numbers():
    draw = Key(2).torch()
    x = {"symbols": torch.randint(0, 5, (30,), generator=draw), "numbers": torch.randn(30, 2, generator=draw)}
    data = Split(Arrays(x, torch.randint(0, CLASSES, (30,), generator=draw)), torch.arange(30))
    start = model(TwoInputs)
    after = trained(start, data, BatchSchedule(5, 10)).models["own"]
    assert reference.run(Evaluate(after, data)).loss < reference.run(Evaluate(start, data)).loss
    expected = start.module()(x["symbols"], x["numbers"].double())
    assert torch.allclose(reference.run(Predict(start, data)), expected)


def image_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


def test_images_are_augmented_in_training_only_and_differently_at_each_step():
    asked = []

    class Watched(Arrays):
        def inputs(self, rows, augment=None):
            asked.append(augment)
            return super().inputs(rows, augment)

    x = torch.rand(10, 1, 4, 4, generator=Key(0).torch())
    labels = torch.arange(10) % CLASSES
    data = Split(Watched(x, labels, augmentation=CropFlip(1)), torch.arange(10))
    start = model(image_net)
    after = trained(start, data, BatchSchedule(2, 5)).models["own"]
    assert len(asked) == len(set(asked)) == 4
    assert None not in asked
    asked.clear()
    score = reference.run(Evaluate(after, data))
    reference.run(Predict(after, data))
    assert asked == [None, None]
    asked.clear()
    unchanged = trained(start, data, BatchSchedule(2, 5, augment=False)).models["own"]
    assert asked == [None] * 4
    plain = Split(Arrays(x, labels), torch.arange(10))
    assert score.loss == reference.run(Evaluate(after, plain)).loss
    assert same(unchanged, trained(start, plain, BatchSchedule(2, 5)).models["own"])
    assert not same(unchanged, after)


def test_reported_losses_are_means_over_samples_of_every_role():
    own, guest, data = model(DENSE), model(LINEAR), split(7, Key(1))
    objective, still = Mutual("own", "guest"), 1e-300
    result = reference.run(Train({"own": own, "guest": guest}, SGD(objective, still), data, BatchSchedule(1, 4), Key(5)))
    logits = {"own": own(data.inputs()), "guest": guest(data.inputs())}
    expected = {role: loss.mean().item() for role, loss in objective(logits, data.y).items()}
    assert result.losses == pytest.approx(expected, abs=1e-12)  # batches of four and three: samples count, not batches
    alternating = reference.run(
        Train({"own": own, "guest": guest}, SGD(objective, still, alternating=True), data, BatchSchedule(1, 4), Key(5))
    )
    assert alternating.losses == pytest.approx(expected, abs=1e-12)
    pfml = MutualMoreau(still, still, 0.0, 2, objective=Mutual("aux", "local"))
    models = {"aux": own, "local": guest, "theta": own}
    three = reference.run(Train(models, pfml, data, BatchSchedule(1, 4), Key(5), frozen={"aux": own, "local": guest}))
    assert three.losses == pytest.approx({"aux": expected["own"], "local": expected["guest"]}, abs=1e-12)


def test_a_reported_loss_is_that_before_the_step():
    start, data = model(DENSE), split(7, Key(1))
    expected = F.cross_entropy(start(data.inputs()), data.y).item()
    moreau = Moreau(0.1, 0.5, 1.0, 3)  # three inner steps on the one batch: the first look counts
    result = reference.run(Train({"theta": start, "w": start}, moreau, data, BatchSchedule(1, 7), Key(5)))
    assert result.losses == {"theta": pytest.approx(expected, abs=1e-12)}
    both = {"own": start, "guest": model(LINEAR)}
    turns = SGD(CrossEntropy(), 0.5, alternating=True)
    assert reference.run(Train(both, turns, data, BatchSchedule(1, 7), Key(5))).losses["own"] == pytest.approx(
        expected, abs=1e-12
    )


def test_targets_may_be_logits():
    start, teacher, data = model(DENSE), model(LINEAR, 3), split(12, Key(1))
    wanted = data.labelled(reference.run(Predict(teacher, data)))
    optimizer = SGD(Imitate("mse"), 0.1)
    after = trained(start, wanted, BatchSchedule(10, 5), optimizer).models["own"]

    def distance(m):
        return (m(data.inputs()) - teacher(data.inputs())).square().mean()

    assert distance(after) < distance(start) / 2
