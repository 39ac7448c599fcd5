"""Runs with malicious clients: what is recorded of them, what they cost, who is kept out, and that resuming forgets nothing."""

import typing

import pytest
from rich.console import Console

from fedme.config.experiment import ConfigError, load
from fedme.config.hints import hints
from fedme.config.identity import digest
from fedme.federation.malicious_clients import AttackType
from fedme.results import records, summary
from fedme.running import run
from fedme.running.progress import Display

SMALL = [
    "rounds=5",
    "partition.name=iid",
    "partition.clients=5",
    "data.limit=150",
    "data.public=20",
    "models.pool=['dnn-8']",
    "models.assign=round-robin",
    "finetune.epochs=0",
    "train.batch=16",
]


class Killed(BaseException):
    """As good as a power cut."""


class Fused(Display):
    def __init__(self, rounds):
        super().__init__(Console(quiet=True), quiet=True)
        self.left = rounds

    def advance(self, *words):
        self.left -= 1
        if self.left == 0:
            raise Killed


def do(folder, *words, fuse=-1):
    experiment, _ = load("digits-fedme", [*SMALL, *words, f"output={folder}"])
    return run.start(experiment, Fused(fuse))


def weights(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in records.read(folder)]


OFFENDER = ["attack.clients=['2']", "attack.kind=non-finite", "defence.quarantine=2", "defence.quarantine_rounds=2"]


def test_an_offender_is_named_kept_out_for_a_while_and_in_no_mean(tmp_path, fedme):
    folder = do(tmp_path / "run", "method=fedavg", *OFFENDER)
    missing = {
        row["round"]: row["notes"]["missing"]
        for row in records.read(folder)
        if row["client"] == "2" and row.get("notes", {}).get("missing")
    }
    assert missing[0] == missing[1] == missing[4] == "refused: model.params.1.weight: is not finite"
    assert missing[2] == missing[3] == f"quarantined until round 4; last {missing[0]}"
    told = summary.read(folder)
    assert told["refused"] == {"2": {"rounds": 3, "first": 0, "reason": missing[0]}}
    assert told["quarantined"]["2"]["rounds"] == 2
    assert told["malicious"] == ["2"]
    assert {each["clients"] for each in told["results"]} == {4}
    code, out, _ = fedme("show", folder)
    assert code == 0
    assert "Malicious by configuration ([attack]), excluded from all means: client 2." in out
    assert "client 2: quarantined in 2 rounds, first in round 2" in out
    assert fedme("report", folder, "--output", tmp_path / "page.html")[0] == 0
    assert "client 2: quarantined in 2 rounds, first in round 2" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_quarantine_survives_a_crash(tmp_path, rounds):
    words = ["method=fedme", *OFFENDER]
    whole = do(tmp_path / "whole", *words)
    with pytest.raises(Killed):
        do(tmp_path / "torn", *words, fuse=rounds)
    assert run.resume(tmp_path / "torn", Fused(-1))
    assert timeless(tmp_path / "torn") == timeless(whole)
    assert weights(tmp_path / "torn") == weights(whole)


@pytest.mark.parametrize("kind", ["sign-flip", "huge-norm"])
def test_a_norm_bound_keeps_what_an_attack_destroys(tmp_path, kind):
    words = ["method=fedavg", "attack.clients=['2']", f"attack.kind={kind}", "rounds=8", "data.limit=800"]

    def accuracy(folder):
        return next(r["accuracy"]["pooled"] for r in summary.read(folder)["results"] if r["split"] == "test")

    open_, guarded = do(tmp_path / "open", *words), do(tmp_path / "guarded", *words, "defence.norm=0.5")
    assert accuracy(guarded) > accuracy(open_) + 0.2
    assert "refused" not in summary.read(guarded)  # such messages are well formed


def test_label_flipping_is_learnt_and_tested_honestly(tmp_path):
    words = ["method=local", "attack.clients=['2']", "attack.kind=label-flip", "data.limit=800"]
    folder = do(tmp_path / "run", *words)
    last = [r for r in records.read(folder) if (r["client"], r["stage"], r["round"]) == ("2", "round", 4)]
    wrong, right = (next(r["accuracy"] for r in last if r["split"] == split) for split in ("test", "val"))
    assert right > wrong + 0.3  # it has learnt its wrong labels well


def test_malicious_clients_are_drawn_by_the_seed(tmp_path):
    folders = [do(tmp_path / str(i), "method=local", "attack.clients=2", f"seed={seed}") for i, seed in enumerate((0, 0, 1, 2))]
    chosen = [summary.read(folder)["malicious"] for folder in folders]
    assert chosen[0] == chosen[1]
    assert all(len(each) == 2 for each in chosen)
    assert len({tuple(each) for each in chosen}) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attack.clients=['x']"], "attack.clients: names x, but there is no such client"),
        (["attack.clients=9"], "attack.clients: must be at most 5, the number of clients, got 9"),
        (["attack.clients=-1"], "attack.clients: must be >= 0"),
        (
            ["attack.kind=label-flip", "attack.strength=3"],
            "attack.strength: has no effect on the attack 'label-flip'; remove it",
        ),
        (["attack.kind=sign-flop"], "did you mean 'sign-flip'"),
        (["defence.average=mode"], "defence.average"),
        (["defence.trim=0.7"], "defence.trim: must be >= 0 and < 0.5"),
        (["method.defence={norm=1.0}"], "method.defence: unknown key; these settings belong to the table"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        do(tmp_path / "run", *words)


def test_settings_that_do_nothing_are_said():
    for words, said in (
        (["method=local", "defence.average=median"], "local does not average models: defence.average has no effect"),
        (["method=fedavg", "defence.guest=1.0"], "fedavg does not use defence.guest: it has no effect"),
    ):
        assert said in hints(load("digits-fedme", words)[0])


def test_without_the_tables_a_configuration_is_what_it_was():
    plain = load("digits-fedme", ["defence.average=mean"])[0].plain()
    assert "defence" not in plain["method"]
    before = {key: value for key, value in plain.items() if key not in ("defence", "attack")}
    assert digest(before) == digest(plain)
    assert digest(load("digits-fedme", ["defence.norm=1.5"])[0].plain()) != digest(plain)


@pytest.mark.parametrize("method", ["Soup", "Blind", "Coloured"])
@pytest.mark.parametrize("kind", typing.get_args(AttackType))
def test_no_attack_stops_a_method_whose_messages_have_other_names(method, kind, tmp_path):
    """Not even one that declares nothing of its replies: a reply of another form is refused, and the client is named."""
    words = [f"method.name=fedme_test_user_method:{method}", "models.shared=dnn-8", "rounds=3"]
    folder = do(tmp_path / "run", *words, "attack.clients=['2']", f"attack.kind={kind}")
    missing = [(row["client"], str(row.get("notes", {}).get("missing"))) for row in records.read(folder)]
    refused = {client for client, reason in missing if reason.startswith("refused")}
    assert refused == ({"2"} if kind in ("non-finite", "shape", "architecture", "replay") else set())
    assert summary.read(folder)["malicious"] == ["2"]


def test_the_bound_holds_for_a_method_whose_messages_have_other_names(tmp_path):
    def losses(name, *words):
        folder = do(tmp_path / name, "method.name=fedme_test_user_method:Blind", "models.shared=dnn-8", "rounds=2", *words)
        wanted = {"model": "global", "stage": "round", "split": "val"}
        return [row["loss"] for row in records.read(folder) if wanted.items() <= row.items()]

    attack = ["attack.clients=['2']", "attack.kind=huge-norm"]
    assert max(losses("open", *attack)) > 100
    assert max(losses("bounded", *attack, "defence.norm=1.0")) < 3


def test_refused_replies_are_in_the_log(tmp_path):
    lines = []

    class Listening(Display):
        def note(self, text, always=False):
            lines.append(text)

    experiment, _ = load("digits-fedme", [*SMALL, "method=fedavg", *OFFENDER, f"output={tmp_path / 'run'}"])
    run.start(experiment, Listening(Console(quiet=True)))
    assert "round 0: 2: refused: model.params.1.weight: is not finite" in lines
