"""The compiled code equals the reference, for every network, rule and loss it takes, and takes nothing else."""

import itertools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Evaluate, Predict, Train
from fedme.execution import compiled, compiled_library, reference
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau
from fedme_test_support import DENSE, LINEAR, WIDE, clients, needs_compiled_code, same
from fedme_test_traced_networks import Depthwise, Functional, GroupNormNet, ResNet, Transformer

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "none": nn.Identity}


def test_it_was_built_where_there_is_a_compiler():
    if shutil.which("g++") is None:
        pytest.skip("needs g++ (apt-get install g++ && make clean install)")
    assert not isinstance(compiled.library(), str), f"{compiled.library()}; `make install` builds it"


def test_code_of_other_sources_is_left_alone(tmp_path, monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("needs g++ (apt-get install g++ && make clean install)")
    (tmp_path / "empty.cpp").touch()
    built = tmp_path / f"_compiled{EXTENSION_SUFFIXES[0]}"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", built, tmp_path / "empty.cpp"], check=True)
    monkeypatch.setattr(compiled_library, "__file__", str(tmp_path / "compiled_library.py"))
    assert "built from other sources" in compiled_library.library.__wrapped__()


def network(widths: tuple[int, ...], activation: str, bias: bool, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=bias), ACTIVATIONS[activation](), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def operation(archs, optimizer, samples, local, features, classes, dtype=torch.float64, seed=0):
    draw = Key(seed).torch()
    source = Arrays(
        torch.randn(3 * samples, features, generator=draw), torch.randint(0, classes, (3 * samples,), generator=draw)
    )
    rows = torch.randperm(3 * samples, generator=draw)[:samples]
    models = {role: Model.init(arch, Key(seed).at(role), dtype) for role, arch in archs.items()}
    frozen = {role: Model.init(arch, Key(seed).at("f", role), dtype) for role, arch in archs.items()}
    opt = {r: {n: torch.randn(p.shape, generator=draw, dtype=dtype) for n, p in m.params.items()} for r, m in models.items()}
    return Train(models, optimizer, Split(source, rows), local, Key(seed).at("t"), opt if optimizer.momentum else {}, frozen)


def equal(op, tolerance=1e-9):
    batched = Dispatcher(path="compiled")
    ((got, _),) = batched([op])
    assert batched.explain() == ["train: 1 operations compiled"]
    want = reference.run(op)
    for role, model in want.models.items():
        assert list(got.models) == list(want.models)
        for name, value in model.params.items():
            assert torch.allclose(got.models[role].params[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)
        for name, value in want.opt.get(role, {}).items():
            assert torch.allclose(got.opt[role][name], value, rtol=tolerance, atol=tolerance)
    assert dict(got.losses) == pytest.approx(dict(want.losses), rel=tolerance, abs=tolerance, nan_ok=True)
    assert want.opt.keys() == got.opt.keys()


widths = st.integers(1, 37)
shares = st.floats(0, 2)


@needs_compiled_code
@settings(max_examples=120, deadline=None)
@given(
    hidden=st.lists(st.lists(widths, max_size=3), min_size=1, max_size=2),
    features=widths,
    classes=st.integers(1, 13),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
    samples=st.integers(1, 40),
    local=st.builds(BatchSchedule, epochs=st.integers(1, 2), batch=st.integers(1, 17), shuffle=st.booleans()),
    mutual=st.one_of(st.none(), st.tuples(shares, shares, shares, shares)),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    prox=st.sampled_from([0.0, 0.5]),
    clip=st.sampled_from([None, None, 0.5, 100.0]),
    dropout=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_training_equals_the_reference(
    hidden, features, classes, activation, bias, samples, local, mutual, momentum, weight_decay, prox, clip, dropout, seed
):
    archs = {
        role: Arch.named(f"{role}-{each}-{features}-{classes}-{activation}-{bias}-{samples}-{dropout}", network,
                         widths=(features, *each, classes), activation=activation, bias=bias, dropout=dropout)
        for role, each in zip("ab", hidden, strict=False)
    }  # fmt: skip
    both = len(archs) == 2 and mutual is not None
    objective = Mutual("a", "b", mutual[:2], mutual[2:]) if both else CrossEntropy()
    optimizer = SGD(objective, 0.05, momentum=momentum, weight_decay=weight_decay, prox=prox, clip=clip)
    equal(operation(archs, optimizer, samples, local, features, classes, seed=seed))


@needs_compiled_code
@settings(max_examples=60, deadline=None)
@given(
    hidden=st.tuples(st.lists(widths, max_size=2), st.lists(widths, max_size=2)),
    features=widths,
    classes=st.integers(1, 13),
    samples=st.integers(1, 40),
    local=st.builds(BatchSchedule, epochs=st.integers(1, 2), batch=st.integers(1, 17), shuffle=st.booleans()),
    inner=st.integers(1, 3),
    l2=st.sampled_from([0.0, 0.1]),
    mutual=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_inner_loops_equal_the_reference(hidden, features, classes, samples, local, inner, l2, mutual, seed):
    first, second = (
        Arch.named(
            f"moreau-{features}-{each}-{classes}", network, widths=(features, *each, classes), activation="relu", bias=True
        )
        for each in hidden
    )
    archs = {"aux": first, "local": second, "theta": first} if mutual else {"theta": first, "w": first}
    optimizer = (MutualMoreau if mutual else Moreau)(0.05, 0.02, 3.0, inner, l2)
    equal(
        replace(operation(archs, SGD(CrossEntropy(), 0.1), samples, local, features, classes, seed=seed), optimizer=optimizer)
    )


@needs_compiled_code
def test_wide_layers_in_single_precision():
    arch = Arch.named("wide-one", network, widths=(784, 100, 10), activation="relu", bias=True)
    equal(operation({"own": arch}, SGD(CrossEntropy(), 0.01), 95, BatchSchedule(1, 10), 784, 10, torch.float32), 1e-4)


@needs_compiled_code
def test_what_diverges_is_not_a_number_either_way():
    arch = Arch.named("diverging", network, widths=(6, 5, 3), activation="relu", bias=True)
    op = operation({"own": arch}, SGD(CrossEntropy(), 1e200), 20, BatchSchedule(3, 5), 6, 3)
    equal(op)
    ((got, _),) = Dispatcher(path="compiled")([op])
    assert not got.models["own"].finite


@needs_compiled_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_equal_the_reference(dtype):
    arch = Arch.named("looking", network, widths=(7, 9, 5), activation="tanh", bias=True)
    for samples in (1, 4, 99, 100, 101, 250):
        op = operation({"own": arch}, SGD(CrossEntropy(), 0.1), samples, BatchSchedule(1, 5), 7, 5, dtype)
        model = op.models["own"]
        batched = Dispatcher(path="compiled")
        (logits, _), (score, _) = batched([Predict(model, op.data), Evaluate(model, op.data)])
        want = reference.run(Predict(model, op.data))
        assert torch.allclose(logits, want, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
        assert score.accuracy == reference.run(Evaluate(model, op.data)).accuracy
        assert all("compiled" in line for line in batched.explain())


@needs_compiled_code
def test_results_do_not_depend_on_threads_or_company():
    data = clients((7, 23, 1, 12, 2, 40))
    ops = [
        Train({"own": Model.init(WIDE, Key(i))}, SGD(CrossEntropy(), 0.1), d.train, BatchSchedule(2, 5), Key(i))
        for i, d in enumerate(data.values())
    ]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([got for got, _ in Dispatcher()(ops)])
    finally:
        torch.set_num_threads(before)
    found.append([Dispatcher()([op])[0][0] for op in ops])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.losses == b.losses
            assert all(torch.equal(a.models["own"].params[n], b.models["own"].params[n]) for n in a.models["own"].params)


@needs_compiled_code
def test_models_that_are_handed_over_stay_as_they_are():
    op = operation({"own": WIDE}, SGD(CrossEntropy(), 0.1, momentum=0.9), 20, BatchSchedule(1, 5), 3, 4)
    model = op.models["own"]
    given = [*model.params.values(), *op.opt["own"].values()]
    before = [value.clone() for value in given]
    ((got, _),) = Dispatcher(path="compiled")([op])
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    assert not any(torch.equal(got.models["own"].params[name], value) for name, value in model.params.items())


@needs_compiled_code
def test_weights_in_any_order_of_memory():
    op = operation({"own": LINEAR}, SGD(CrossEntropy(), 0.1), 20, BatchSchedule(1, 5), 3, 4)
    model = op.models["own"]
    turned = model.with_params({n: p.t().contiguous().t() if p.dim() == 2 else p for n, p in model.params.items()})
    a, b = (reference.run(Predict(m, op.data)) for m in (model, turned))
    ((c, _),) = Dispatcher(path="compiled")([Predict(turned, op.data)])
    assert torch.allclose(a, b, atol=1e-12)
    assert torch.allclose(a, c, atol=1e-12)


class Custom(SGD):
    """An optimizer of the user."""

    def __init__(self):
        super().__init__(CrossEntropy(), 0.1)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.used(x)


@needs_compiled_code
@pytest.mark.parametrize(
    ("optimizer", "arch", "reason"),
    [
        (SGD(CrossEntropy(), 0.1, alternating=True), DENSE, "alternating steps"),
        (SGD(CrossEntropy(), 0.1, prox=0.1), DENSE, "a proximal term, but not for every model"),
        (Moreau(0.1, 0.05, 2.0, 3, objective=Imitate("mse")), DENSE, "unsupported loss Imitate"),
        (SGD(Imitate("mse"), 0.1), DENSE, "unsupported loss Imitate"),
        (SGD(Mutual("own", "other"), 0.1), DENSE, "unsupported loss Mutual"),
        (Custom(), DENSE, "unsupported optimizer Custom"),
        (SGD(CrossEntropy(), 0.1), Arch(Spare), "the weight unused.bias is not used"),
    ],
    ids=str,
)
def test_what_it_does_not_know_is_left_to_others(optimizer, arch, reason):
    op = Train({"own": Model.init(arch, Key(0))}, optimizer, clients()["1"].train, BatchSchedule(1, 5), Key(0))
    route = Dispatcher().route(op)
    assert route.backend.name != "compiled"
    assert "not compiled" in route.reason
    assert reason in route.reason


@needs_compiled_code
@pytest.mark.parametrize("last_batch", ["drop", "scale"])
@pytest.mark.parametrize("batch", [4, 5, 30])
def test_a_last_batch_is_dropped_or_scaled(batch, last_batch):
    equal(operation({"own": WIDE}, SGD(CrossEntropy(), 0.1, 0.9), 13, BatchSchedule(3, batch, last_batch=last_batch), 3, 4))


@needs_compiled_code
def test_labels_that_do_not_exist_are_refused():
    data = clients()["1"].train
    op = Train({"own": Model.init(DENSE, Key(0), torch.float64)}, SGD(CrossEntropy(), 0.1), data, BatchSchedule(1, 5), Key(0))
    wrong = data.labelled(torch.full((len(data),), 4))
    with pytest.raises(IndexError, match="class numbers must be >= 0 and < 4, got 4 to 4"):
        Dispatcher(path="compiled")([Train(op.models, op.optimizer, wrong, op.batch_schedule, op.key)])


@needs_compiled_code
def test_what_does_not_fit_together_is_refused():
    narrow, wide = (Arch.named(f"classes-{n}", network, widths=(3, n), activation="relu", bias=True) for n in (4, 5))
    data = clients()["1"].train
    pair = {"a": Model.init(narrow, Key(0)), "b": Model.init(wide, Key(0))}
    op = Train(pair, SGD(Mutual("a", "b"), 0.1), data, BatchSchedule(1, 5), Key(0))
    with pytest.raises(ValueError, match="must have the same classes"):
        Dispatcher(path="compiled")([op])
    own = {"own": pair["a"]}
    for frozen in ({"own": pair["b"]}, {"own": Model.init(narrow, Key(0), torch.float64)}):
        op = Train(own, SGD(CrossEntropy(), 0.1, prox=1.0), data, BatchSchedule(1, 5), Key(0), {}, frozen)
        with pytest.raises(ValueError, match="must be .*, got"):
            Dispatcher(path="compiled")([op])


def test_without_an_extension_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_library, "__file__", str(tmp_path / "compiled_library.py"))
    assert compiled_library.library.__wrapped__() == "the extension was not built when fedme was installed (no C++ compiler?)"


@needs_compiled_code
def test_wide_vectors_are_used_where_they_pay_and_can_be_left_out(monkeypatch):
    choose = compiled_library.library.__wrapped__
    monkeypatch.delenv(compiled_library.NARROW, raising=False)
    pays = bool(compiled_library.loaded("_compiled").fedme_avx512_pays())
    assert choose().fedme_vector_bytes() == (64 if pays else 32)
    monkeypatch.setenv(compiled_library.NARROW, "1")
    assert choose().fedme_vector_bytes() == 32


def test_without_compiled_code_networks_are_stacked(monkeypatch):
    monkeypatch.setattr(compiled, "library", lambda: "the extension was not built")
    op = Train({"own": Model.init(DENSE, Key(0))}, SGD(CrossEntropy(), 0.1), clients()["1"].train, BatchSchedule(1, 5), Key(0))
    batched = Dispatcher()
    batched([op])
    assert batched.explain() == [
        "no compiled code: the extension was not built",
        "train: 1 operations stacked (not compiled: no compiled code)",
    ]


@needs_compiled_code
def test_compiled_code_runs_on_threads_here_with_the_same_bits():
    ops = [
        Train({"own": Model.init(WIDE, Key(i))}, SGD(CrossEntropy(), 0.1), d.train, BatchSchedule(2, 5), Key(9 - i))
        for i, d in enumerate(clients((7, 23, 9, 12)).values())
    ]
    one, several = Dispatcher(), Dispatcher(workers=3)
    a, b = ([done.models["own"] for done, _ in each(ops)] for each in (one, several))
    several.close()
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert several.paths == one.paths == {("train", "compiled", ""): 4}


@needs_compiled_code
def test_networks_of_earlier_calls_get_the_weights_of_this_one():
    """Also if other networks were there in between, and if other weights are at the same place."""
    engine, source = Dispatcher(path="compiled"), Arrays(torch.randn(9, 36, generator=Key(1).torch()), torch.arange(9) % 5)
    data = Split(source, torch.arange(9))
    models = [Model.init(Arch(chain, hidden=hidden), Key(hidden)) for hidden in (8, 9, 8, 8)]
    looks = [Predict(model, data) for model in models]
    for _ in range(2):
        for model, look in zip(models, looks, strict=True):
            torch.testing.assert_close(engine([look])[0][0], reference.predict(look))
            op = Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(1, 4), Key(2))
            expected = reference.train(op).models["own"].params
            torch.testing.assert_close(dict(engine([op])[0][0].models["own"].params), dict(expected))
            for value in model.params.values():
                value += 0.1
            torch.testing.assert_close(engine([look])[0][0], reference.predict(look))


def chain(hidden):
    return nn.Sequential(nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, 5))


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 5))


@needs_compiled_code
@pytest.mark.parametrize("network", [Functional, ResNet, GroupNormNet, Depthwise, Transformer, dropping])
def test_clients_that_share_a_call_are_each_client_alone(network, monkeypatch):
    """Also after a client whose weights are not finite, and whatever the sizes of their batches."""
    monkeypatch.setattr(compiled, "PIECES", 1)  # all in one call
    source = Arrays(torch.randn(60, 1, 6, 6, generator=Key(1).torch()), torch.arange(60) % 5)
    schedule, ops = BatchSchedule(2, 4), []
    for client, (samples, factor) in enumerate([(3, 1.0), (9, 1.0), (12, float("nan")), (9, 1.0), (20, 1.0), (2, 1.0)]):
        model = Model.init(Arch(network), Key(client))
        model = model.with_params({name: factor * value for name, value in model.params.items()})
        data = Split(source, torch.arange(samples) + client)
        ops.append(Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, schedule, Key(client)))
    engine = Dispatcher(path="compiled")

    def all_alone(operations):  # each on a thread of its own, which has no networks of earlier calls
        results = []
        for op in operations:
            with ThreadPoolExecutor(1) as thread:
                results.append(thread.submit(engine, [op]).result()[0][0])
        return results

    def equal(one, other):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

    trained = [result for result, _ in engine(ops)]
    for together, alone in zip(trained, all_alone(ops), strict=True):
        for part in ("params", "buffers"):
            one, other = (dict(getattr(result.models["own"], part)) for result in (together, alone))
            equal(one, other)
    assert [result.models["own"].finite for result in trained] == [True, True, False, True, True, True]
    models = [trained[index].models["own"] for index in (0, 2, 1, 1, 3, 1)]  # one model may be evaluated several times
    looks = [Predict(model, op.data) for model, op in zip(models, ops, strict=True)]
    for (together, _), alone in zip(engine(looks), all_alone(looks), strict=True):
        equal(together, alone)
    assert {name: path for name, path, _ in engine.paths} == {"train": "compiled", "predict": "compiled"}
