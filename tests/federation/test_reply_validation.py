"""What arrives is examined before it is used: bad replies are left out, named, and change nothing for the others."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Report, Round, TaskError
from fedme.core.metrics import Metrics
from fedme.core.model import Model
from fedme.core.operations import Computation, Score
from fedme.core.tree import leaves
from fedme.core.typed import TypedError
from fedme.federation.client_work import ModelScore
from fedme.federation.in_process import InProcessEngine
from fedme.federation.malicious_clients import SPOILING, Attack, MaliciousClients
from fedme.federation.offences import FOR_GOOD, OffenceRecord, quarantined, record_offences
from fedme.federation.reply_validation import MessageTypes, bounded, check_reply, check_report, check_scores, check_sent
from fedme.federation.round import NoReply, Reply, run_round
from fedme.learning.partial_model import Part
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training
from fedme.methods import METHODS, fedavg, fedmd, fml, hypcluster, shared_model
from fedme.methods.fedme import fedme
from fedme_test_support import DENSE, LINEAR, NORMALISED, WIDE, clients, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.05)
ROOT = Key(0)
MIXED = ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
SHARING = [name for name in METHODS if name not in ("local", "centralized")]
MALFORMED = [*SPOILING, "replay"]


def method_of(name):
    return METHODS[name](train=TRAIN, **({"public_epochs": 1, "private_epochs": 1} if name == "fedmd" else {}))


def tensors(value) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


class Silent(InProcessEngine):
    """Some replies never arrive, though the clients did their work; then they hear nothing more in the round.

    Below the quorum the server asks again. As in `FailingClients`, nobody works twice for that.
    """

    lost = frozenset()
    worked = None  # the last round in which clients have worked whose replies are lost

    def exchange(self, downs, when):
        first = when.phase == self.method.phases[0] and when.t != self.worked
        self.worked = when.t
        answers = super().exchange({c: down for c, down in downs.items() if first or (when.t, c) not in self.lost}, when)
        return {c: NoReply("lost") if (when.t, c) in self.lost else answer for c, answer in answers.items()}


class Bad(Silent):
    """The same replies arrive, but spoilt."""

    kind = "non-finite"

    def exchange(self, downs, when):
        spoilt = [client for t, client in self.lost if t == when.t]
        return MaliciousClients(super(Silent, self), self.method, Attack((), self.kind), spoilt).exchange(downs, when)


def run(name, kind, engine_of, pairs, rounds=3):
    method = method_of(name)
    setting = task((DENSE, WIDE, LINEAR, LINEAR) if name in MIXED else (NORMALISED,) * 4, NORMALISED, 8, split(6, Key(9)))
    engine = engine_of(method, setting, clients((7, 12, 4, 5), public=8), ROOT)
    engine.lost, engine.kind = frozenset(pairs), kind
    server, traffic = method.init_server(setting, ROOT.at("init")), []
    for t in range(rounds):
        played = run_round(method, setting, engine, server, t, rounds, ROOT)
        server = played.server
        traffic.append(played.traffic)
    return server, engine, traffic


@pytest.mark.parametrize("name", SHARING)
@settings(max_examples=8)
@given(
    kind=st.sampled_from(MALFORMED),
    pairs=st.sets(st.tuples(st.integers(0, 2), st.sampled_from("0123")), min_size=1, max_size=6),
)
@example(kind="non-finite", pairs={(1, client) for client in "0123"})  # below the quorum: the server asks again
def test_a_bad_reply_is_as_if_it_had_never_come(name, kind, pairs):
    expected, silent, _ = run(name, kind, Silent, pairs)
    server, bad, traffic = run(name, kind, Bad, pairs)
    assert all(map(torch.equal, tensors(server), tensors(expected)))
    assert len(tensors(server)) == len(tensors(expected)) > 0 or name == "fedmd"
    never = set("0123") - {client for _, client in pairs}
    for client in never:
        mine, theirs = tensors(bad.states[client]), tensors(silent.states[client])
        assert len(mine) == len(theirs)
        assert all(map(torch.equal, mine, theirs))
    for t, found in enumerate(traffic):
        refused = {client for client, each in found.items() if each.reason.startswith("refused: ")}
        assert refused == {client for at, client in pairs if at == t}
        assert all(each.answered == (client not in refused) for client, each in found.items())


def test_the_reason_names_the_place():
    for kind, words in (
        ("non-finite", "refused: model.params.0.weight: is not finite"),
        ("shape", "refused: model.params.0.weight: must be float64 of shape (6, 3), got float64 of shape (1, 6, 3)"),
        ("architecture", "refused: model.arch: must be of architecture normalised, got intruder"),
        ("replay", "refused: when: expected"),
    ):
        _, _, traffic = run("fedavg", kind, Bad, {(0, "2")}, rounds=1)
        assert traffic[0]["2"].reason.startswith(words)


MODEL = Model.init(LINEAR, Key(1), torch.float64)
OTHER = Model.init(DENSE, Key(1), torch.float64)
WHEN = Round(0, 2)


def refusal(name, down, up, samples=7, when=WHEN):
    method, setting = METHODS[name](train=TRAIN), task((LINEAR, DENSE, LINEAR), public=8)
    with pytest.raises(TypedError) as error:
        check_reply(method, setting, down, up, when, samples)
    return str(error.value)


def changed(model, **params):
    return replace(model, params={**model.params, **{k.replace("_", "."): v for k, v in params.items()}})


@pytest.mark.parametrize(
    ("up", "words"),
    [
        ("nonsense", "must be a TrainedCopy, got a str"),
        (shared_model.SharedModel(MODEL), "must be a TrainedCopy, got a SharedModel"),
        (shared_model.TrainedCopy(OTHER, 7), "model.arch: must be of architecture linear, got dense"),
        (shared_model.TrainedCopy(None, 7), "model: must be a table, got None"),
        (shared_model.TrainedCopy("weights", 7), "model: must be a table, got 'weights'"),
        (shared_model.TrainedCopy(MODEL, 8), "samples: must be >= 1 and <= 7, the number that the client announced, got 8"),
        (shared_model.TrainedCopy(MODEL, 0), "samples: must be >= 1 and <= 7, the number that the client announced, got 0"),
        (shared_model.TrainedCopy(MODEL, -1), "samples: must be >= 1 and <= 7, the number that the client announced, got -1"),
        (shared_model.TrainedCopy(MODEL, True), "samples: must be an integer, got true"),
        (shared_model.TrainedCopy(MODEL, 3.5), "samples: must be an integer, got 3.5"),
        (shared_model.TrainedCopy(MODEL, "7"), "samples: must be an integer, got '7'"),
        (shared_model.TrainedCopy(replace(MODEL, params={}), 7), "model.params.0.bias: is missing"),
        (shared_model.TrainedCopy(changed(MODEL, extra=torch.zeros(1)), 7), "model.params.extra: was not sent"),
        (
            shared_model.TrainedCopy(changed(MODEL, **{"0.bias": torch.zeros(4)}), 7),
            "model.params.0.bias: must be float64 of shape (4,)",
        ),
        (
            shared_model.TrainedCopy(changed(MODEL, **{"0.bias": 3.0}), 7),
            "model.params.0.bias: must be a Tensor, got a float",
        ),
        (
            shared_model.TrainedCopy(changed(MODEL, **{"0.bias": torch.full((4,), torch.inf).double()}), 7),
            "model.params.0.bias: is not finite",
        ),
    ],
)
def test_what_fedavg_takes_back_is_what_it_sent(up, words):
    assert refusal("fedavg", shared_model.SharedModel(MODEL), up).startswith(words)


def test_what_only_a_method_knows():
    down = fedme.Down(MODEL, OTHER, "1", 0)
    assert refusal("fedme", down, fedme.Up(MODEL, OTHER, "2", False)) == "lender: must be 1, got 2"
    assert refusal("fedme", down, fedme.Up(MODEL, None, "1", True)).startswith("adopts: a model that was not sent back")
    assert refusal("fedme", down, fedme.Up(MODEL, MODEL, "1", False)).startswith("guest.arch: must be of architecture dense")
    alone = fedme.Down(MODEL)
    assert refusal("fedme", alone, fedme.Up(MODEL, OTHER, None, False)) == "guest: must be empty, because the server sent none"
    assert refusal("fedme", down, fedme.Up(MODEL, OTHER, "1", 1)) == "adopts: must be true or false, got 1"
    two = hypcluster.Hypotheses((MODEL, MODEL))
    for number in (-1, 2):
        assert refusal("hypcluster", two, hypcluster.Up(number, MODEL, 7)).startswith("cluster: must be from 0 to 1")
    part = Part(MODEL.params, {})
    other = Part({"0.weight": MODEL.params["0.weight"]}, {})
    assert refusal("fml", part, fml.Up(other, 7)) == "part.params.0.bias: is missing"
    rows = fedmd.Down(torch.arange(3))
    outputs, digest = Round(0, 2, "outputs"), Round(0, 2, "digest")
    wrong = fedmd.Up(torch.zeros(3, 5, dtype=torch.float64))
    assert refusal("fedmd", rows, wrong, when=outputs).startswith("logits: must be float64 of shape (3, 4)")
    right = fedmd.Up(torch.zeros(3, 4, dtype=torch.float64))
    assert refusal("fedmd", rows, right, when=digest) == "logits: must be empty, because the server sent none"
    assert check_reply(METHODS["fedmd"](), task(public=8), rows, right, outputs, 7)


@dataclass(frozen=True)
class Offer:
    """A reply whose fields have other names than those of the message: only its types are known."""

    fresh: Model
    more: Part | None
    weights: tuple[float, ...]


class Offering(fedavg.FedAvg):
    def client_round(
        self, state: Empty, down: shared_model.SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, Offer, Report]]:
        raise NotImplementedError


def test_a_method_of_ones_own_is_examined_by_its_types():
    method, setting, down = Offering(TRAIN), task((LINEAR, DENSE)), shared_model.SharedModel(MODEL)
    check_reply(method, setting, down, Offer(OTHER, None, (1.0, 2.0)), WHEN, None)
    check_reply(method, setting, down, Offer(OTHER, Part({"a": torch.zeros(3)}, {}), ()), WHEN, None)
    for up, words in [
        (Offer(replace(MODEL, arch=WIDE), None, ()), "fresh: no client has the architecture wide"),
        (Offer(replace(MODEL, arch=DENSE), None, ()), "fresh.0.weight: does not fit dense"),
        (Offer(OTHER, Part({"a": 3}, {}), ()), "more"),
        (Offer(OTHER, None, ("x",)), "weights[0]: must be a number"),
        (Offer(OTHER, None, 1.0), "weights: must be a list"),
        (Offer(OTHER, "x", ()), "more: must be"),
        (Offer(OTHER, None, (float("nan"),)), "weights[0]: is not finite"),
    ]:
        with pytest.raises(TypedError, match=re.escape(words)):
            check_reply(method, setting, down, up, WHEN, None)


class Unannotated(fedavg.FedAvg):
    def client_round(self, state, down, data, when, key):
        return super().client_round(state, down, data, when, key)


class Bare(Method):
    def client_round(self, state, down, data, when, key):
        raise NotImplementedError


def test_a_function_without_annotations_has_those_of_the_one_that_it_overrides():
    assert MessageTypes.of(Unannotated(TRAIN)) == MessageTypes.of(fedavg.FedAvg(TRAIN))
    Bare.__abstractmethods__ = frozenset()
    with pytest.raises(TaskError, match="method 'Bare': client_round says no type of state or down or return"):
        MessageTypes.of(Bare())


def test_reports_and_scores_must_be_possible():
    check_report(Report({"own": float("nan")}, {"own": Score(0, float("nan"), 0.0)}, {"a": "b"}), 0.0, "classification")
    score = Score(5, 0.1, 0.5)
    for report, seconds in [
        (Report({}), float("nan")),
        (Report({}), -1.0),
        (Report({}, {"own": replace(score, accuracy=float("nan"))}), 1.0),
        (Report({}, {"own": replace(score, accuracy=7.0)}), 1.0),
        (Report({}, {"own": replace(score, samples=-1)}), 1.0),
        (Report({}, {}, {"a": "x" * 1000}), 1.0),
        (Report({str(i): 0.0 for i in range(100)}), 1.0),
    ]:
        with pytest.raises(TypedError):
            check_report(report, seconds, "classification")
    check_report(Report({}, {"own": replace(score, accuracy=float("nan"))}), 1.0, "regression")  # never right or wrong
    fine = ModelScore("personal", "mlr", "round", "test", Metrics(10, 7, 3, 0.5, 0.7))
    check_scores([fine], "classification")
    decisions = Metrics(10, 17, 3, 0.5, 17 / 30, exact_match=0.2)  # 3 labels per sample
    check_scores([replace(fine, metrics=decisions)], "multi-label")
    for impossible in (replace(decisions, correct=31), replace(decisions, correct=-1), replace(decisions, accuracy=None)):
        with pytest.raises(TypedError, match="is not possible for 10 samples"):
            check_scores([replace(fine, metrics=impossible)], "multi-label")
    with pytest.raises(TypedError):
        check_scores([replace(fine, metrics=decisions)], "classification")
    for odd in (
        replace(fine, split="train"),
        replace(fine, stage="training"),
        replace(fine, model="m" * 1000),
        replace(fine, metrics=replace(fine.metrics, correct=11)),
        replace(fine, metrics=replace(fine.metrics, accuracy=1.1)),
        replace(fine, metrics=replace(fine.metrics, auroc=float("nan"))),
    ):
        with pytest.raises(TypedError):
            check_scores([odd], "classification")


def test_a_client_looks_at_what_the_server_sends():
    method, setting = fedavg.FedAvg(TRAIN), task()
    check_sent(method, setting, shared_model.SharedModel(MODEL), WHEN)
    single = Model.init(LINEAR, Key(1), torch.float32)
    broken = changed(MODEL, **{"0.bias": torch.full((4,), torch.nan).double()})
    for down, when in [
        (shared_model.SharedModel(single), WHEN),
        (shared_model.SharedModel(broken), WHEN),
        (shared_model.SharedModel(MODEL), Round(2, 2)),
        (shared_model.SharedModel(MODEL), Round(-1, 2)),
        (shared_model.SharedModel(MODEL), Round(0, 2, "digest")),
    ]:
        with pytest.raises(TypedError):
            check_sent(method, setting, down, when)


def test_a_change_is_scaled_down_to_the_bound_by_hand():
    sent = {"model": replace(MODEL, params={"w": torch.tensor([1.0, 1.0])}, buffers={"n": torch.tensor(3)})}
    far = shared_model.TrainedCopy(replace(MODEL, params={"w": torch.tensor([4.0, 5.0])}, buffers={"n": torch.tensor(9)}), 7)
    near = bounded(far, sent, 2.5)  # the change (3, 4) has norm 5
    assert torch.allclose(near.model.params["w"], torch.tensor([2.5, 3.0]), atol=1e-5)
    assert near.model.buffers["n"] == 9
    assert near.samples == 7
    assert bounded(far, sent, 5.0).model is far.model  # within the bound not a bit changes
    huge = shared_model.TrainedCopy(replace(MODEL, params={"w": torch.tensor([3e38, 3e38])}, buffers={}), 7)
    assert bounded(huge, sent, 2.5).model.params["w"].isfinite().all()
    part = bounded(fml.Up(Part({"w": torch.tensor([4.0, 5.0])}, {}), 1), {"part": Part(sent["model"].params, {})}, 2.5).part
    assert torch.equal(part.params["w"], near.model.params["w"])
    guest = fedme.Up(None, far.model, "1", False)
    assert torch.equal(bounded(guest, {"own": MODEL, "guest": sent["model"]}, 2.5).guest.params["w"], near.model.params["w"])


def test_offenders_are_kept_out_for_a_while_or_for_good():
    lenient, strict = Defence(quarantine=2, quarantine_rounds=3), Defence(quarantine=1)
    once = record_offences({}, [("a", "refused: x")], 4, lenient)
    assert once == {"a": OffenceRecord(1, "refused: x", 0)}
    assert not quarantined(once, 5)
    twice = record_offences(once, [("a", "refused: y")], 6, lenient)
    assert [t for t in range(7, 14) if quarantined(twice, t)] == [7, 8, 9]
    assert twice["a"].until == 10
    assert twice["a"].words() == "quarantined until round 10; last refused: y"
    assert record_offences(twice, [("a", "refused: z")], 10, lenient)["a"].offences == 1  # it begins anew
    assert record_offences({}, [("a", "refused: x")], 0, strict)["a"].until == FOR_GOOD
    assert "for good" in record_offences({}, [("a", "refused: x")], 0, strict)["a"].words()
    assert record_offences({}, [("a", "refused: x")], 0, Defence())["a"].until == 0


def test_whoever_is_in_quarantine_is_not_asked():
    method, setting = method_of("fedavg"), task()
    engine = Bad(method, setting, clients(), ROOT)
    engine.lost = frozenset({(0, "1"), (1, "1")})
    kept = Defence(quarantine=2, quarantine_rounds=2)
    server, offences, asked = method.init_server(setting, ROOT.at("init")), {}, []
    for t in range(5):
        played = run_round(method, setting, engine, server, t, 5, ROOT, defence=kept, offences=offences)
        server, offences = played.server, played.offences
        asked.append(played.traffic["1"].bytes_down > 0)
        if t == 2:
            assert played.traffic["1"].reason.startswith("quarantined until round 4; last refused: ")
    assert asked == [True, True, False, False, True]


def test_an_answer_that_was_not_asked_for_is_nobodys():
    class Chatty(InProcessEngine):
        def exchange(self, downs, when):
            return {**super().exchange(downs, when), "stranger": Reply(MODEL, Report({}), 0.0)}

    method, setting = method_of("fedavg"), task()
    played = run_round(method, setting, Chatty(method, setting, clients(), ROOT), method.init_server(setting, ROOT), 0, 1, ROOT)
    assert "stranger" not in played.traffic
    assert "stranger" not in played.offences


def test_everybody_in_quarantine_is_a_round_of_nobody():
    for name in SHARING:
        method = method_of(name)
        setting = task((DENSE,) * 3, public=8, unlabeled=split(6, Key(9)))
        engine = InProcessEngine(method, setting, clients(public=8), ROOT)
        server = method.init_server(setting, ROOT.at("init"))
        out = dict.fromkeys(setting.members, OffenceRecord(0, "refused: x", FOR_GOOD))
        played = run_round(method, setting, engine, server, 0, 1, ROOT, offences=out)
        assert not any(each.answered for each in played.traffic.values())
        assert played.offences == out
