"""Modules that do more than compute layers: they run somewhere, with the results of the reference, and the reason is said."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fedme
from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Predict, Train
from fedme.execution import compiled, reference
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.sample_independence import require_separate
from fedme.learning.accountant import PrivacyError
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD
from fedme.networks import from_instance
from fedme_test_support import needs_compiled_code, same

CLASSES = 3
LARGE = 50.0


def layers():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def operation(factory, dtype=torch.float64):
    x = torch.randn(9, 6, generator=Key(0).torch(), dtype=torch.float64)
    data = Split(Arrays(x, torch.arange(9) % CLASSES), torch.arange(9))
    model = Model.init(Arch(factory), Key(1), dtype)
    return Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(2, 4), Key(2))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = layers()

    def forward(self, x):
        return self.net(x)


class Checkpointed(Wrapped):
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def weight_norm():
    net = layers()
    parametrizations.weight_norm(net[0])
    return net


def spectral_norm():
    net = layers()
    parametrizations.spectral_norm(net[0])
    return net


def scripted():
    return torch.jit.script(layers())


def lazy():
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, CLASSES))
    net(torch.zeros(1, 6))  # as a user must, before a federation averages its weights
    return net


class Switches(Wrapped):
    """Buffers of truth values and whole numbers, which are not used in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.ones(3, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(3))


class MaskedByBuffer(Wrapped):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.arange(6) % 2 == 0)

    def forward(self, x):
        return self.net(x * self.seen)


class HalfBuffer(Wrapped):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 0.5, dtype=torch.float16))

    def forward(self, x):
        return self.net(x * self.scale.to(x.dtype))


class RandomBuffer(MaskedByBuffer):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.rand(6) > 0.5)


class Switched(Wrapped):
    """Decides by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.tensor(True))

    def forward(self, x):
        return self.net(2 * x if self.on else x)


class SwitchedInEvaluation(Switched):
    def forward(self, x):
        return self.net(2 * x if not self.training and not self.on else x)


class CountsSomeTimes(Wrapped):
    """Counts large inputs in a part of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        self.counts[0].add_(int(self.training and x.shape[1] > 6))
        return self.net(x)


class Clipped(Wrapped):
    """Limits its weights, which random ones hardly reach."""

    def forward(self, x):
        with torch.no_grad():
            self.net[0].weight.clamp_(-1, 1)
        return self.net(x)


class ClippedData(Wrapped):
    def forward(self, x):
        self.net[0].weight.data.clamp_(-0.1, 0.1)
        return self.net(x)


class Renormalised(Wrapped):
    """A limit of norms, as EEGNet has it."""

    def forward(self, x):
        self.net[0].weight.data = torch.renorm(self.net[0].weight.data, p=2, dim=0, maxnorm=0.3)
        return self.net(x)


class Averaging(Wrapped):
    """Keeps a mean of its inputs, which decides nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.net(x)


class SinglePrecision(Wrapped):
    def forward(self, x):
        return self.net(x.float().to(x.dtype))


class WholeNumbers(Wrapped):
    def forward(self, x):
        return self.net((3 * x).long().to(x.dtype))


class InferenceOnly(Wrapped):
    def forward(self, x):
        return self.net(2 * x if torch.is_inference_mode_enabled() else x)


class ChancesInEvaluation(Wrapped):
    def forward(self, x):
        return self.net(x) if self.training else self.net(x).softmax(1)


class ChangesInputs(Wrapped):
    def forward(self, x):
        x += 1
        return self.net(x)


class ChangesPartOfInputs(Wrapped):
    def forward(self, x):
        x[:, 0] = 0
        return self.net(x)


class NoNumbers(Wrapped):
    def forward(self, x):
        return self.net(torch.cat([x, x[:, :0].tanh()], 1))


class Chosen(Wrapped):
    """Conditions made of many weights."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(6, 2000))

    def forward(self, x):
        return self.net(x + torch.where(self.wide > 0, self.wide, 0.1).mean(1))


class Noisy(Wrapped):
    def forward(self, x):
        return self.net(x + 0.1 * torch.randn_like(x))


class ByValues(Wrapped):
    def forward(self, x):
        return self.net(x if x.mean() > 0 else -x)


class SometimesDeeper(Wrapped):
    """So rarely that a few steps need not show it."""

    def forward(self, x):
        return self.net(self.net[0](x).mean(1, keepdim=True) + x if random.random() < 0.1 else x)


class SometimesScaled(Wrapped):
    def forward(self, x):
        return self.net(x * (2.0 if np.random.rand() < 0.1 else 1.0))


class ByList(Wrapped):
    """Random inputs of a check are hardly as large as this."""

    def forward(self, x):
        return self.net(x if max(x.flatten().tolist()) < LARGE else x / LARGE)


class ByArray(Wrapped):
    def forward(self, x):
        return self.net(x if self.net[0](x).detach().numpy().max() < LARGE else x / LARGE)


class ByEqual(Wrapped):
    def forward(self, x):
        return self.net(2 * x if torch.equal(x[:, 0], x[:, 1]) else x)


class StopsEarly(Wrapped):
    """In evaluation mode only."""

    def forward(self, x):
        hidden = self.net[:2](x)
        if not self.training and hidden.abs().max() > LARGE:
            return hidden[:, :CLASSES]
        return self.net[2](hidden)


class ByHand(nn.Module):
    """A recurrent layer step by step, which begins with zeros."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.head = nn.LSTMCell(2, 5), nn.RMSNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x):
        hidden = cell = x.new_zeros(x.shape[0], 5)
        for step in x.view(-1, 3, 2).unbind(1):
            hidden, cell = self.cell(step, (hidden, cell))
        return self.head(self.norm(hidden) + torch.ones_like(hidden))


class Options(Wrapped):
    def forward(self, x, *, factor=2.0):
        return self.net(factor * x)


class Counting(Wrapped):
    """Decides by the number of its calls, which it keeps in an attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) if self.calls % 2 else self.net(2 * x)


class Remembering(Wrapped):
    """Keeps a size and its latest hidden values, which change nothing."""

    size = None

    def forward(self, x):
        self.size, self.latest = x.shape[1:], self.net[0](x)
        return self.net(x)


BY_VALUES = ByValues, ByList, ByArray, ByEqual, StopsEarly


@needs_compiled_code
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Wrapped, ""),
        (weight_norm, "not compiled"),
        (spectral_norm, "not compiled"),
        (lazy, ""),
        (HalfBuffer, ""),
        (Switches, ""),
        (MaskedByBuffer, ""),
        (Switched, ""),
        (SwitchedInEvaluation, ""),
        (CountsSomeTimes, "its forward pass changes counts"),
        (RandomBuffer, "not all models have the same numbers in the buffer seen"),
        (Clipped, "its forward pass changes net.0.weight"),
        (ClippedData, "its forward pass uses .data"),
        (Renormalised, "its forward pass uses .data"),
        (Averaging, "its forward pass changes mean"),
        (SinglePrecision, "its forward pass computes in single precision"),
        (WholeNumbers, "unsupported operation to int64"),
        (InferenceOnly, "compiled predictions differ from those of the network"),
        (ChancesInEvaluation, "compiled predictions differ from those of the network"),
        (ChangesInputs, ""),
        (ChangesPartOfInputs, "not compiled"),
        (NoNumbers, "an operation on a tensor without numbers"),
        (Chosen, "it computes with more than 1024 numbers of weights alone"),
        (Options, ""),
        (Remembering, ""),
        (Noisy, "its forward pass draws random numbers (randn_like)"),
        (ByHand, ""),
        (SometimesDeeper, "its forward pass draws random numbers"),
        (SometimesScaled, "its forward pass draws random numbers"),
        *((network, "its forward pass depends on the values of tensors") for network in BY_VALUES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_odd_modules_train_as_by_the_reference(factory, reason):
    op = operation(factory)
    engine = Dispatcher()
    route = engine.route(op)
    assert reason in route.reason
    assert (route.backend.name == "compiled") == (not reason)
    before = {name: value.clone() for name, value in op.models["own"].params.items()}
    ((got, _),) = engine([op])
    wanted = reference.run(op)
    assert all(torch.equal(op.models["own"].params[name], value) for name, value in before.items())
    assert same(got.models["own"], wanted.models["own"], 1e-9)
    for path in ("stacked", "workers"):
        ((other, _),) = Dispatcher(path=path)([op])
        assert same(other.models["own"], wanted.models["own"], 1e-9)
    assert any(reason in line for line in engine.explain())
    ((logits, _),) = engine([Predict(wanted.models["own"], op.data)])
    assert torch.allclose(logits, reference.run(Predict(wanted.models["own"], op.data)), rtol=1e-9, atol=1e-9)


@needs_compiled_code
@pytest.mark.parametrize("path", ["auto", "compiled"])
def test_a_network_that_counts_its_calls_is_not_compiled(path):
    op = operation(Counting)
    engine = Dispatcher(path=path)
    assert engine.route(op).backend.name != "compiled"
    assert "its forward pass changes its attribute calls" in engine.route(op).reason


@pytest.mark.parametrize(("factory", "named"), [(Counting, True), (Remembering, False), (spectral_norm, False), (Noisy, False)])
def test_attributes_that_belong_to_no_client_are_noted(factory, named, capsys, tmp_path):
    clients = [fedme.Client(name, train=(torch.randn(20, 6), torch.arange(20) % CLASSES), model=factory()) for name in "ab"]
    fedme.FedAvg(rounds=1).fit(clients, output=tmp_path / "run")
    shown = " ".join(capsys.readouterr().err.split())
    assert ("the forward pass of Counting changes its attribute calls" in shown) == named
    assert ("changes its attribute" in shown) == named


class MakesTensors(Wrapped):
    """Its forward pass makes tensors of torch's default type, and decides by values, so that it is not compiled."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(2, 6, batch_first=True)

    def forward(self, x):
        state = torch.zeros(1, len(x), 6)
        hidden, _ = self.cell(x.view(-1, 3, 2), (state, state))
        return self.net(hidden[:, -1] if x.mean() > LARGE else hidden[:, -1] + torch.ones(6))


@pytest.mark.parametrize("path", ["auto", "workers", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_may_make_tensors_in_its_forward_pass(path, dtype):
    ops = [operation(MakesTensors, dtype), operation(MakesTensors, dtype)]
    wanted = [reference.run(op).models["own"] for op in ops]
    for expected, (got, _) in zip(wanted, Dispatcher(path=path)(ops), strict=True):
        assert got.models["own"].dtype == dtype
        assert same(got.models["own"], expected, 1e-9 if dtype == torch.float64 else 1e-5)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("compilable", [False, True])
def test_a_network_that_makes_tensors_is_trained_saved_and_used_in_float64(compilable, capfd, tmp_path):
    factory = ByHand if compilable else MakesTensors
    x = torch.randn(20, 6, generator=Key(0).torch())
    clients = [fedme.Client(name, train=(x, torch.arange(20) % CLASSES), model=factory()) for name in "ab"]
    result = fedme.FedAvg(rounds=1, engine={"dtype": "float64"}).fit(clients, output=tmp_path / "run")
    assert result["a"].logits(x).dtype == torch.float64
    shown = capfd.readouterr().err
    for noise in ("torch.ops", "symbolic_shapes"):  # what torch prints where it cannot trace a network
        assert noise not in shown
    assert ("only its weights are saved" in shown) != compilable


CALLS = []


def hooked():
    net = layers()
    net[0].register_forward_hook(lambda module, inputs, output: CALLS.append(1))
    return net


@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
def test_a_hook_that_only_looks_on_sees_every_batch_of_every_client(path):
    ops = [operation(hooked), operation(hooked)]
    wanted = [reference.run(op).models["own"] for op in ops]
    engine = Dispatcher(path=path)
    for op in ops:
        engine.route(op)  # which may try the network
    CALLS.clear()
    done = engine(ops)
    assert len(CALLS) == 2 * 6  # three batches in each of two epochs
    assert all(same(got.models["own"], model, 1e-9) for (got, _), model in zip(done, wanted, strict=True))


def hooked_itself():
    net = Wrapped()
    net.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return net


@needs_compiled_code
@pytest.mark.parametrize(
    ("factory", "reason"),
    [(hooked, "its part 0 (Linear) has hooks"), (hooked_itself, "the network (Wrapped) has hooks")],
)
def test_why_a_network_with_hooks_is_not_compiled(factory, reason):
    engine, op = Dispatcher(), operation(factory)
    ((got, _),) = engine([op])
    assert same(got.models["own"], reference.run(op).models["own"], 1e-9)
    (line,) = engine.explain()
    assert line == f"train: 1 operations eager (not compiled or stacked or stacked by vmap: {reason})"


class Pair(Wrapped):
    def forward(self, x):
        return self.net(x), x


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor


class Record(Wrapped):
    def forward(self, x):
        return Answer(self.net(x))


@dataclasses.dataclass
class LogitsAnswer:
    logits: torch.Tensor


class Logits(Wrapped):
    def forward(self, x):
        return LogitsAnswer(self.net(x))


@pytest.mark.parametrize(("factory", "kind"), [(Pair, "tuple"), (Record, "Answer")])
def test_an_output_that_is_no_tensor_is_an_error_that_says_so(factory, kind):
    with pytest.raises(TypeError, match=f"must return a tensor, or an object with the attribute logits, got {kind}"):
        Dispatcher()([operation(factory)])


def test_an_object_with_logits_is_an_output():
    op = operation(Logits)
    ((got, _),) = Dispatcher()([op])
    wanted = reference.run(operation(Wrapped)).models["own"].params
    assert all(torch.allclose(got.models["own"].params[name], value, rtol=0, atol=1e-9) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Checkpointed, "forward pass of Checkpointed uses torch.utils.checkpoint, .* call the function itself"),
        (scripted, "has a part that was made by torch.jit, .* use the module itself"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_would_run_with_other_weights_is_refused(factory, message):
    with pytest.raises(TypeError, match=message):
        Dispatcher()([operation(factory)])


class TwoInputs(Wrapped):
    def forward(self, x, mask):
        return self.net(x * mask)


def test_a_forward_pass_that_needs_more_arguments_is_an_error_that_names_them():
    with pytest.raises(TypeError, match="mask"):
        Dispatcher()([operation(TwoInputs)])


@needs_compiled_code
@pytest.mark.parametrize("network", [Switched, SwitchedInEvaluation])
def test_a_model_whose_buffers_decide_otherwise_is_not_compiled(network):
    op = operation(network)
    model = op.models["own"]
    other = dataclasses.replace(op, models={"own": model.with_buffers({"on": torch.tensor(False)})})
    engine = Dispatcher()
    for (got, _), wanted in zip(engine([op, other]), (op, other), strict=True):
        assert same(got.models["own"], reference.run(wanted).models["own"], 1e-9)
    assert "train: 1 operations compiled" in engine.explain()
    assert any("the network was traced with other numbers in its buffer on" in line for line in engine.explain())
    ((logits, _),) = Dispatcher()([Predict(other.models["own"], other.data)])
    assert torch.allclose(logits, reference.run(Predict(other.models["own"], other.data)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", ["auto", "stacked", "workers"])
@pytest.mark.parametrize("factory", [ChangesInputs, ChangesPartOfInputs])
def test_models_that_learn_from_each_other_have_inputs_of_their_own(factory, path):
    op = operation(factory)
    model = op.models["own"]
    both = dataclasses.replace(op, models={"a": model, "b": model}, optimizer=SGD(Mutual("a", "b"), 0.1))
    ((got, _),) = Dispatcher(path=path)([both])
    wanted = reference.run(both)
    assert all(same(got.models[role], wanted.models[role], 1e-9) for role in "ab")
    assert same(got.models["a"], got.models["b"], 1e-9)


def test_the_last_sample_does_not_see_the_first_one_under_privacy():
    assert require_separate_fails(lambda x: x + x[:1])
    assert require_separate_fails(lambda x: x + x[-1:])
    assert not require_separate_fails(lambda x: x * 2)


def require_separate_fails(change):
    class Changed(Wrapped):
        def forward(self, x):
            return self.net(change(x))

    arch = Arch.named(f"changed {id(change)}", Changed)
    try:
        require_separate(arch, torch.randn(3, 6, generator=Key(0).torch()))
    except PrivacyError:
        return True
    return False


def weight_hooked():
    net = layers()
    net[0].weight.register_hook(lambda gradient: 0 * gradient)
    return net


@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
def test_a_hook_of_a_weight_changes_its_gradient(path):
    op = operation(weight_hooked)
    engine = Dispatcher(path=path)
    ((got, _),) = engine([op])
    for result in (got, reference.run(op)):
        trained = result.models["own"]
        assert torch.equal(trained.params["0.weight"], op.models["own"].params["0.weight"])
        assert not torch.equal(trained.params["2.weight"], op.models["own"].params["2.weight"])
    if path == "auto":
        assert "its weight 0.weight has hooks" in engine.explain()[0]


def test_a_copy_of_a_network_has_the_hooks_of_its_weights():
    op = operation(from_instance(weight_hooked()))
    trained = reference.run(op).models["own"].params
    assert torch.equal(trained["0.weight"], op.models["own"].params["0.weight"])
    assert not torch.equal(trained["2.weight"], op.models["own"].params["2.weight"])


class FrozenStatistics(nn.Module):
    """Batch normalisation whose statistics never change, as when a trained network is tuned."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES))
        self.net[1].eval()

    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()
        return self

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("path", ["auto", "workers"])
def test_layers_in_evaluation_mode_stay_in_it_after_a_batch_of_one(path):
    op = operation(FrozenStatistics)  # 9 samples in batches of 4
    ((got, _),) = Dispatcher(path=path)([op])
    wanted = reference.run(op).models["own"]
    assert same(got.models["own"], wanted, 1e-9)
    assert torch.equal(got.models["own"].buffers["net.1.running_mean"], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_returns_single_precision_runs(dtype):
    class Narrow(Wrapped):
        def forward(self, x):
            return self.net(x).float()

    arch = Arch.named(f"narrow {dtype}", Narrow)
    op = operation(arch.factory, dtype)
    engine = Dispatcher()
    ((got, _),) = engine([op])
    assert same(got.models["own"], reference.run(op).models["own"], 1e-9 if dtype == torch.float64 else 1e-5)
    assert ("operations compiled" in engine.explain()[0]) == (
        dtype == torch.float32 and not isinstance(compiled.library(), str)
    )


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.read(self.table(x)))

    def read(self, x):
        return x.mean(1)


class LimitedWords(Words):
    """Norms of rows are limited in the forward pass, where random ones need no limit."""

    def __init__(self):
        super().__init__(max_norm=10.0)


class ShorterWords(Words):
    def __init__(self):
        super().__init__(max_norm=0.5)


class PackedWords(Words):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def read(self, x):
        return self.layer(nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 5), batch_first=True))[1][-1]


class BatchSecond(Words):
    """Dropout where the batch is the second dimension: its masks depend on the number of samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.3)

    def read(self, x):
        return self.layer(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("path", ["auto", "stacked", "workers"])
@pytest.mark.parametrize("network", [LimitedWords, ShorterWords, PackedWords, BatchSecond])
def test_odd_networks_of_symbols_train_as_by_the_reference(network, path):
    words = torch.randint(0, 9, (9, 7), generator=Key(0).torch())
    data = Split(Arrays(words, torch.arange(9) % CLASSES), torch.arange(9))
    ops = []
    for client in range(2):
        model = Model.init(Arch(network), Key(client), torch.float64)
        model.params["table.weight"].mul_(4)
        ops.append(Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(2, 4), Key(2)))
    engine = Dispatcher(path=path)
    for op, (got, _) in zip(ops, engine(ops), strict=True):
        assert same(got.models["own"], reference.run(op).models["own"], 1e-9)
    if path == "auto" and not isinstance(compiled.library(), str):
        reasons = {LimitedWords: "its forward pass changes table.weight", ShorterWords: "its forward pass changes table.weight"}
        assert reasons.get(network, "") in engine.explain()[0]
        assert ("operations compiled" in engine.explain()[0]) == (network is BatchSecond)
