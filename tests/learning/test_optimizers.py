"""Local steps descend what they claim to, agree with PyTorch's optimiser, and treat a stack of clients one by one."""

import dataclasses

import pytest
import torch
from torch.func import functional_call, grad, vmap

from fedme.core import tree
from fedme.core.key import Key
from fedme.core.model import Model, template
from fedme.core.operations import Batch
from fedme.execution.reference import Autograd
from fedme.learning import optimizers
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam, Moreau, MutualMoreau
from fedme_test_support import CLASSES, DENSE, FEATURES, LINEAR


def batch(seed=0, samples=6, step=0):
    draw = Key(seed).at("batch").torch()
    x = torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(0, CLASSES, (samples,), generator=draw), step)


def model(arch, seed):
    return Model.init(arch, Key(seed), torch.float64)


def take(optimizer, models, data, opt=None, frozen=None):
    return optimizer(
        Autograd(optimizer.objective, {}), models, optimizer.init(models) if opt is None else opt, frozen or {}, data
    )


def vector(m):
    return torch.cat([value.flatten() for value in m.params.values()])


def at(m, flat):
    parts = flat.split([value.numel() for value in m.params.values()])
    return m.with_params({name: part.reshape(m.params[name].shape) for name, part in zip(m.params, parts, strict=True)})


def slope(function, m, h=1e-6):
    """Central differences of a number over all weights of a model."""
    start = vector(m)
    ways = torch.eye(len(start), dtype=start.dtype) * h
    return torch.stack([(function(at(m, start + way)) - function(at(m, start - way))) / (2 * h) for way in ways])


def mutual_loss(m, peer, data):
    """CE + KL(peer || m), the peer a constant: no autograd, no library code."""
    p, q = m(data.x).softmax(-1), peer(data.x).softmax(-1)
    label = -p[torch.arange(len(data.y)), data.y].log()
    return (label + (q * (q / p).log()).sum(-1)).mean()


def near(m, anchor, lam):
    return lam / 2 * (vector(m) - vector(anchor)).square().sum()


# PFML

LAM, L2, INNER_LR, LR = 2.0, 0.1, 0.05, 0.03


def pfml_follows_its_objective(inner, aux_l2=None):
    """Whether every inner and outer step is minus the rate times the slope of L + lam/2 |. - anchor|^2 + l2/2 |.|^2."""
    data = batch()
    aux, local, previous, received = model(DENSE, 1), model(LINEAR, 2), model(DENSE, 3), model(LINEAR, 4)
    optimizer = MutualMoreau(LR, INNER_LR, LAM, inner, L2, aux_l2=aux_l2)
    own_l2 = {"aux": L2 if aux_l2 is None else aux_l2, "local": L2}
    after, opt = take(optimizer, {"aux": aux, "local": local, "theta": aux}, data, frozen={"aux": previous, "local": received})
    assert opt == {}
    nought = {"aux": at(aux, 0 * vector(aux)), "local": at(local, 0 * vector(local))}

    def descended(m, peer, anchor, rate, role):
        g = slope(lambda w: mutual_loss(w, peer, data) + near(w, anchor, LAM) + near(w, nought[role], own_l2[role]), m)
        return at(m, vector(m) - rate * g)

    theta, what = aux, local
    for _ in range(inner):
        theta, what = (
            descended(theta, what, previous, INNER_LR, "aux"),
            descended(what, theta, received, INNER_LR, "local"),
        )
    expected = {
        "theta": theta,
        "aux": descended(aux, local, theta, LR, "aux"),
        "local": descended(local, aux, what, LR, "local"),
    }
    assert after.keys() == expected.keys()
    return all(torch.allclose(vector(after[role]), vector(expected[role]), rtol=0, atol=1e-9) for role in expected)


@pytest.mark.parametrize("aux_l2", [None, 0.0, 0.4])
@pytest.mark.parametrize("inner", [1, 2])
def test_pfml_descends_its_objective_by_finite_differences(inner, aux_l2):
    assert pfml_follows_its_objective(inner, aux_l2)


def test_the_printed_sign_of_equation_8_does_not(monkeypatch):
    right = optimizers._descend
    monkeypatch.setattr(optimizers, "_descend", lambda m, g, anchor, lr, lam, l2: right(m, g, anchor, lr, -lam, l2))
    assert not pfml_follows_its_objective(1)


# pFedMe


def envelope_value(theta, w, lam, data):
    p = theta(data.x).softmax(-1)
    return -p[torch.arange(len(data.y)), data.y].log().mean() + near(theta, w, lam)


def test_pfedme_descends_its_inner_objective_by_finite_differences():
    data, theta, w = batch(), model(DENSE, 1), model(DENSE, 2)
    zero = at(theta, 0 * vector(theta))
    after, opt = take(Moreau(LR, INNER_LR, LAM, 1, L2), {"theta": theta, "w": w}, data)
    g = slope(lambda m: envelope_value(m, w, LAM, data) + near(m, zero, L2), theta)
    assert opt == {}
    assert torch.allclose(vector(after["theta"]), vector(theta) - INNER_LR * g, rtol=0, atol=1e-9)
    assert torch.allclose(vector(after["w"]), vector(w) - LR * LAM * (vector(w) - vector(after["theta"])), rtol=0, atol=1e-12)


def test_pfedme_steps_of_theta_are_pulled_to_w_as_it_was():
    data, theta, w = batch(), model(LINEAR, 1), model(LINEAR, 2)
    twice, _ = take(Moreau(LR, INNER_LR, LAM, 2), {"theta": theta, "w": w}, data)
    once, _ = take(Moreau(LR, INNER_LR, LAM, 1), {"theta": theta, "w": w}, data)
    again, _ = take(Moreau(LR, INNER_LR, LAM, 1), {"theta": once["theta"], "w": w}, data)
    assert torch.equal(vector(twice["theta"]), vector(again["theta"]))


def test_pfedme_with_an_exact_inner_solution_descends_the_moreau_envelope():
    """dF/dw = lam (w - theta*), where F(w) is the smallest value of the inner objective: by differences of F itself."""
    data, w = batch(), model(LINEAR, 2)
    optimizer = Moreau(LR, 0.3, LAM, 80)

    def best(v):
        return take(optimizer, {"theta": v, "w": v}, data)[0]

    def envelope(v):
        return envelope_value(best(v)["theta"], v, LAM, data)

    for seed in range(3):
        way = torch.randn(len(vector(w)), generator=Key(seed).torch(), dtype=torch.float64)
        h = 1e-5
        expected = (envelope(at(w, vector(w) + h * way)) - envelope(at(w, vector(w) - h * way))) / (2 * h)
        moved = (vector(w) - vector(best(w)["w"])) / LR
        assert (moved @ way).item() == pytest.approx(expected.item(), abs=1e-7)


# Plain SGD against PyTorch


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("limit", [None, 0.3, 1e6])
def test_sgd_is_torchs_over_five_steps(momentum, decay, limit):
    start = model(DENSE, 1)
    module = start.module()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.2, momentum=momentum, weight_decay=decay)
    optimizer = SGD(CrossEntropy(), 0.2, momentum, decay, limit)
    models = {"own": start}
    opt = optimizer.init(models)
    for step in range(5):
        data = batch(step, step=step)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(data.x), data.y).backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimiser.step()
        models, opt = take(optimizer, models, data, opt)
    for name, p in module.named_parameters():
        assert torch.allclose(models["own"].params[name], p, rtol=0, atol=1e-13)
    assert not torch.allclose(vector(models["own"]), vector(start), atol=1e-3)
    if momentum:
        for name, p in module.named_parameters():
            assert torch.allclose(opt["own"][name], optimiser.state[p]["momentum_buffer"], rtol=0, atol=1e-13)
    else:
        assert opt == {}


STEPS = 60


def torchs(make, limit):
    """The weights after many steps of an optimizer of PyTorch, and its states by parameter."""
    module = model(DENSE, 1).module()
    optimizer = make(module.parameters())
    for step in range(STEPS):
        data = batch(step, step=step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(data.x), data.y).backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
    return {name: (p.detach(), optimizer.state[p]) for name, p in module.named_parameters()}


def ours(optimizer, first=0, models=None, opt=None, steps=STEPS):
    models = models or {"own": model(DENSE, 1)}
    opt = optimizer.init(models) if opt is None else opt
    for step in range(first, first + steps):
        models, opt = take(optimizer, models, batch(step, step=step), opt)
    return models, opt


PAIRS = {
    "nesterov": (
        lambda p, d: torch.optim.SGD(p, 0.2, 0.9, weight_decay=d, nesterov=True),
        SGD(CrossEntropy(), 0.2, 0.9, nesterov=True),
    ),
    "adam": (lambda p, d: torch.optim.Adam(p, 0.02, weight_decay=d), Adam(CrossEntropy(), 0.02)),
    "adamw": (lambda p, d: torch.optim.AdamW(p, 0.02, weight_decay=d), Adam(CrossEntropy(), 0.02, decoupled_weight_decay=True)),
    "adam, other constants": (
        lambda p, d: torch.optim.Adam(p, 0.02, (0.5, 0.9), 1e-3, weight_decay=d),
        Adam(CrossEntropy(), 0.02, (0.5, 0.9), 1e-3),
    ),
    "adam without momentum": (
        lambda p, d: torch.optim.Adam(p, 0.02, (0.0, 0.9), weight_decay=d),
        Adam(CrossEntropy(), 0.02, (0.0, 0.9)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("limit", [None, 0.3])
def test_optimizers_are_torchs_over_many_steps(name, decay, limit):
    make, optimizer = PAIRS[name]
    optimizer = dataclasses.replace(optimizer, weight_decay=decay, clip=limit)
    models, opt = ours(optimizer)
    for parameter, (expected, state) in torchs(lambda p: make(p, decay), limit).items():
        assert torch.allclose(models["own"].params[parameter], expected, rtol=0, atol=1e-12)
        if isinstance(optimizer, Adam):
            for part in ("exp_avg", "exp_avg_sq", "step"):
                got, wanted = opt["own"][f"{parameter}.{part}"], state[part]
                assert torch.allclose(got.double(), wanted.double(), rtol=0, atol=1e-12)
        else:
            assert torch.allclose(opt["own"][parameter], state["momentum_buffer"], rtol=0, atol=1e-12)
    assert not torch.allclose(vector(models["own"]), vector(model(DENSE, 1)), atol=1e-2)


def test_adam_in_32_bits_is_torchs_to_their_precision():
    start = Model.init(DENSE, Key(1), torch.float32)
    module = start.module()
    theirs, optimizer = torch.optim.Adam(module.parameters(), 0.02), Adam(CrossEntropy(), 0.02)
    models, opt = {"own": start}, optimizer.init({"own": start})
    for step in range(5):
        data = batch(step, step=step)
        data = Batch(data.x.float(), data.y, step)
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(module(data.x), data.y).backward()
        theirs.step()
        models, opt = take(optimizer, models, data, opt)
    for name, p in module.named_parameters():
        assert torch.allclose(models["own"].params[name], p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_a_state_that_is_handed_in_goes_on_where_it_stopped(name):
    _, optimizer = PAIRS[name]
    whole, final = ours(optimizer)
    half, state = ours(optimizer, steps=STEPS // 2)
    again, end = ours(optimizer, STEPS // 2, half, state, STEPS // 2)
    assert torch.equal(vector(whole["own"]), vector(again["own"]))
    assert all(torch.equal(final["own"][part], end["own"][part]) for part in final["own"])
    reset, _ = ours(optimizer, STEPS // 2, half, None, STEPS // 2)
    assert not torch.allclose(vector(whole["own"]), vector(reset["own"]), atol=1e-6)


def test_the_pull_and_the_clip_come_before_adam_and_decoupled_decay_after_both():
    start, anchor, data = model(LINEAR, 1), model(LINEAR, 2), batch()
    g = vector(start.with_params(Autograd(CrossEntropy(), {})({"own": start}, data)[0]["own"]))
    g = g + 0.7 * (vector(start) - vector(anchor))
    g = g * 0.1 / (g.norm() + 1e-6)
    optimizer = Adam(CrossEntropy(), 0.2, eps=0.01, weight_decay=0.5, clip=0.1, prox=0.7, decoupled_weight_decay=True)
    after, _ = take(optimizer, {"own": start}, data, frozen={"own": anchor})
    expected = vector(start) * (1 - 0.2 * 0.5) - 0.2 * g / (g.abs() + 0.01)  # the first step: both means are unbiased
    assert torch.allclose(vector(after["own"]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer", [SGD(CrossEntropy(), 0.2, momentum=0.9, nesterov=True), Adam(CrossEntropy(), 0.2)], ids=str
)
def test_an_optimizer_leaves_what_it_was_given_alone(optimizer):
    start, data = model(DENSE, 1), batch()
    models, opt = {"own": start}, optimizer.init({"own": start})
    before = vector(start).clone()
    take(optimizer, models, data, opt)
    assert models["own"] is start
    assert torch.equal(vector(start), before)
    assert not any(value.any() for value in opt["own"].values())


def test_the_proximal_pull_is_clipped_with_the_gradient_and_only_where_there_is_an_anchor():
    start, anchor, data = model(LINEAR, 1), model(LINEAR, 2), batch()
    g = vector(start.with_params(Autograd(CrossEntropy(), {})({"own": start}, data)[0]["own"]))
    pull = g + 0.7 * (vector(start) - vector(anchor))
    after, _ = take(SGD(CrossEntropy(), 0.2, prox=0.7), {"own": start}, data, frozen={"own": anchor})
    assert torch.allclose(vector(after["own"]), vector(start) - 0.2 * pull)
    shrunk = pull * 0.1 / (pull.norm() + 1e-6)
    after, _ = take(
        SGD(CrossEntropy(), 0.2, clip=0.1, prox=0.7, weight_decay=0.5), {"own": start}, data, frozen={"own": anchor}
    )
    assert torch.allclose(vector(after["own"]), vector(start) - 0.2 * (shrunk + 0.5 * vector(start)))
    after, _ = take(SGD(CrossEntropy(), 0.2, prox=0.7), {"own": start}, data, frozen={"other": anchor})
    assert torch.allclose(vector(after["own"]), vector(start) - 0.2 * g)


def test_each_model_of_a_pair_is_clipped_by_itself():
    data = batch()
    pair = {"own": model(LINEAR, 1), "guest": at(model(LINEAR, 2), 300 * vector(model(LINEAR, 2)))}
    optimizer = SGD(CrossEntropy(), 0.2, clip=0.5)
    after, _ = take(optimizer, pair, data)
    for role, m in pair.items():
        alone, _ = take(optimizer, {role: m}, data)
        assert torch.allclose(vector(after[role]), vector(alone[role]), rtol=0, atol=1e-14)


# The same rules on a stack of clients


@dataclasses.dataclass
class Stacked:
    """The gradients of a stack of clients, each with its own weights and its own batch."""

    objective: object

    def clip(self, grads, limit):
        return tree.clip(grads, limit, lead=1)

    def __call__(self, models, data, draw=0):
        modules = {role: template(m.arch, True) for role, m in models.items()}

        def loss(params, x, y):
            logits = {role: functional_call(modules[role], p, (x,)) for role, p in params.items()}
            return sum(each.mean() for each in self.objective(logits, y).values())

        params = {role: dict(m.params) for role, m in models.items()}
        return vmap(grad(loss))(params, data.x, data.y), {role: m.buffers for role, m in models.items()}


def stacked(models):
    """One model whose weights have the clients as their first axis."""
    return models[0].with_params({name: torch.stack([m.params[name] for m in models]) for name in models[0].params})


def alone(m, client):
    return m.with_params({name: value[client] for name, value in m.params.items()})


N = 4
RULES = {
    "sgd": (SGD(CrossEntropy(), 0.2, 0.9, 0.01, clip=0.4, prox=0.3), {"own": DENSE}),
    "mutual": (SGD(Mutual("own", "guest"), 0.2, 0.9, clip=0.4), {"own": DENSE, "guest": LINEAR}),
    "nesterov": (SGD(CrossEntropy(), 0.2, 0.9, 0.01, clip=0.4, nesterov=True), {"own": DENSE}),
    "adam": (Adam(CrossEntropy(), 0.2, weight_decay=0.01, clip=0.4, prox=0.3), {"own": DENSE}),
    "adamw, mutual": (
        Adam(Mutual("own", "guest"), 0.2, weight_decay=0.1, decoupled_weight_decay=True),
        {"own": DENSE, "guest": LINEAR},
    ),
    "adam, alternating": (Adam(Mutual("own", "guest"), 0.2, clip=0.4, alternating=True), {"own": DENSE, "guest": LINEAR}),
    "alternating": (SGD(Mutual("own", "guest"), 0.2, clip=0.4, alternating=True), {"own": DENSE, "guest": LINEAR}),
    "moreau": (Moreau(LR, INNER_LR, LAM, 3, L2), {"theta": DENSE, "w": DENSE}),
    "mutual moreau": (MutualMoreau(LR, INNER_LR, LAM, 2, L2), {"aux": DENSE, "local": LINEAR, "theta": DENSE}),
}


def clients_of(archs, blown=None):
    """N clients' models, anchors and batches; the data of client `blown` are enormous."""
    models = [{role: model(arch, 10 * i + j) for j, (role, arch) in enumerate(archs.items())} for i in range(N)]
    anchors = [{role: model(arch, 500 + 10 * i + j) for j, (role, arch) in enumerate(archs.items())} for i in range(N)]
    data = [batch(i, step=3) for i in range(N)]
    if blown is not None:
        data[blown] = Batch(data[blown].x * 1e4, data[blown].y, 3)
    return models, anchors, data


def step_in_a_stack(optimizer, archs, models, anchors, data, times=2):
    together = {role: stacked([m[role] for m in models]) for role in archs}
    frozen = {role: stacked([m[role] for m in anchors]) for role in archs}
    whole = Batch(torch.stack([b.x for b in data]), torch.stack([b.y for b in data]), 3)
    alone = [optimizer.init(m) for m in models]
    opt = {role: {name: torch.stack([one[role][name] for one in alone]) for name in alone[0][role]} for role in alone[0]}
    for _ in range(times):
        together, opt = optimizer(Stacked(optimizer.objective), together, opt, frozen, whole)
    return together, opt


@pytest.mark.parametrize("name", RULES)
def test_a_rule_on_a_stack_is_the_rule_for_each_client_alone(name):
    optimizer, archs = RULES[name]
    models, anchors, data = clients_of(archs)
    together, opt = step_in_a_stack(optimizer, archs, models, anchors, data)
    for i in range(N):
        single, own = models[i], optimizer.init(models[i])
        for _ in range(2):
            single, own = take(optimizer, single, data[i], own, anchors[i])
        assert single.keys() == together.keys()
        for role in single:
            assert torch.allclose(vector(alone(together[role], i)), vector(single[role]), rtol=0, atol=1e-12)
        for role in own:
            assert all(torch.allclose(opt[role][n][i], own[role][n], rtol=0, atol=1e-12) for n in own[role])


@pytest.mark.parametrize("name", RULES)
def test_what_happens_to_one_client_of_a_stack_never_moves_another(name):
    optimizer, archs = RULES[name]
    calm, _ = step_in_a_stack(optimizer, archs, *clients_of(archs))
    wild, _ = step_in_a_stack(optimizer, archs, *clients_of(archs, blown=2))
    for role in calm:
        assert not torch.allclose(vector(alone(calm[role], 2)), vector(alone(wild[role], 2)))
        for other in (0, 1, 3):
            assert torch.allclose(vector(alone(calm[role], other)), vector(alone(wild[role], other)), rtol=0, atol=1e-13)


def test_the_clip_of_the_stack_really_clips():
    optimizer, archs = RULES["sgd"]
    models, anchors, data = clients_of(archs, blown=1)
    free = dataclasses.replace(optimizer, clip=None)
    clipped, _ = step_in_a_stack(optimizer, archs, models, anchors, data, times=1)
    wild, _ = step_in_a_stack(free, archs, models, anchors, data, times=1)
    start = vector(models[1]["own"])
    assert tree.norm(alone(clipped["own"], 1).params).isfinite()
    decay = 0.2 * 0.01 * start.norm()
    assert (vector(alone(clipped["own"], 1)) - start).norm() <= 0.2 * 0.4 + decay
    assert (vector(alone(wild["own"], 1)) - start).norm() > 10
