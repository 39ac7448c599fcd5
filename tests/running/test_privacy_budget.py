"""The [privacy] table: every method within its epsilon, in the records and after a crash; what cannot be private is refused."""

import json

import pytest

from fedme.config.experiment import ConfigError, load
from fedme.core.method import PlannedTraining
from fedme.core.operations import BatchSchedule
from fedme.learning.accountant import PrivacyError
from fedme.methods import METHODS
from fedme.results import records, summary
from fedme.running import privacy_budget, run
from fedme_test_runs import Killed, Watching, do, identical, timeless
from fedme_test_support import clients

PRIVATE = ["privacy.epsilon=6", "train.epochs=1", "finetune.epochs=0", "rounds=2"]
MORE = {
    "fedme": ["method.order=alternating"],
    "fedmd": ["method.private_epochs=1", "method.public_epochs=1"],
    "mapper": ["method.lambdas=[0.0,0.5,1.0]", "evaluate_every=2", "finetune.epochs=1"],
    "fedrep": ["models.shared=dnn-8"],  # with a body: both of its trainings
    "fml": ["models.shared=dnn-8", "finetune.epochs=1", "finetune.when=always"],
}


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.not_private])
def test_a_method_that_sends_more_than_trained_models_is_refused_before_anything_is_computed(tmp_path, name):
    with pytest.raises(ConfigError, match=f"privacy: cannot cover method '{name}': its clients send "):
        do(tmp_path / "run", *PRIVATE, f"method={name}")
    assert not list(tmp_path.glob("run/*.safetensors"))


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if not kind.not_private])
def test_every_method_spends_what_was_planned_and_no_more(tmp_path, name):
    folder = do(tmp_path / "run", *PRIVATE, f"method={name}", *MORE.get(name, []))
    rows = list(records.read(folder))
    who = {"0", "1", "2", "3", *(["(pool)"] if name == "centralized" else [])}
    last = {row["client"]: row["epsilon"] for row in rows}
    assert last.keys() == who
    for client in who:
        mine = [row["epsilon"] for row in rows if row["client"] == client]
        assert mine == sorted(mine)
        assert 5.9 < mine[-1] <= 6.0  # the plan is what is done, not more and not less
    found = summary.read(folder)["privacy"]
    assert found["delta"] == 1e-5
    assert found["epsilon"] == last


@pytest.mark.parametrize(
    "words",
    [["train.optimizer=adam", "train.momentum=0"], ["train.last_batch=drop"], ["train.last_batch=scale"]],
    ids=lambda words: words[0],
)
def test_other_optimizers_and_last_batches_spend_what_was_planned(tmp_path, words):
    """Adam only processes what the noise has protected; batches are Poisson samples, so there is no last one."""
    more = ["method=fedme", "method.order=alternating", "finetune.epochs=1"]
    rows = list(records.read(do(tmp_path / "run", *PRIVATE, *more, *words)))
    plain = list(records.read(do(tmp_path / "plain", *PRIVATE, *more)))
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in plain]
    assert 5.9 < rows[-1]["epsilon"] <= 6.0


def test_the_same_after_a_crash_with_the_same_bits(tmp_path):
    words = [*PRIVATE, "rounds=4", "finetune.epochs=1"]
    whole = do(tmp_path / "whole", *words)
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=25)
    assert 0 < len({row["round"] for row in records.read(tmp_path / "cut")}) < 4
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")
    assert summary.read(tmp_path / "cut")["privacy"] == summary.read(whole)["privacy"]


def test_who_is_not_in_the_cohort_spends_nothing(tmp_path):
    folder = do(tmp_path / "run", *PRIVATE, "rounds=3", "train.cohort=2", "method=fedavg")
    rows = list(records.read(folder))
    took_part = {(row["round"], row["client"]) for row in rows if row["stage"] == "training"}
    before = dict.fromkeys("0123", 0.0)
    for t in range(3):
        now = {row["client"]: row["epsilon"] for row in rows if row["round"] == t}
        for client in "0123":
            assert (now[client] > before[client]) == ((t, client) in took_part)
        before = now
    assert max(before.values()) <= 6.0


def test_a_reply_that_is_lost_was_paid_for(tmp_path):
    folder = do(tmp_path / "run", *PRIVATE, "rounds=1", "faults.lost_in={1=[0]}", "method=fedavg")
    assert all(row["epsilon"] > 5 for row in records.read(folder))


def test_without_noise_there_is_no_bound_and_it_is_said(tmp_path, fedme, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = do(tmp_path / "run", "privacy.noise_multiplier=0.0", "privacy.clip=inf", "rounds=1", "method=local")
    assert {row["epsilon"] for row in records.read(folder)} == {None}
    _, out, _ = fedme("show", folder)
    assert "no bound" in out
    _, out, _ = fedme("show", folder, "--clients")
    assert out.count("no bound") == 4


def test_epsilon_is_shown_and_what_lies_outside_is_said(tmp_path, fedme, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [
        "rounds=1",
        "data.limit=60",
        "partition.clients=2",
        "models.assign=mlr",
        "privacy.noise_multiplier=2.0",
        "finetune.epochs=0",
    ]
    code, out, err = fedme("run", "digits-fedme", *small, "output=run")
    assert code == 0
    assert "Privacy: epsilon " in out
    said = " ".join(err.split())
    assert "outside it: the validation and test parts" in said
    assert "which model a client adopts" in said
    assert "who knows the seed" in said


def test_noise_from_the_operating_system_is_forgotten_and_still_resumed(tmp_path):
    words = [*PRIVATE, "rounds=3", "privacy.secret=true", "method=local"]
    whole = do(tmp_path / "whole", *words)
    assert not (whole / privacy_budget.SECRET).exists()
    again = do(tmp_path / "again", *words)
    assert timeless(whole) != timeless(again)  # nobody can repeat it
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=20)
    kept = tmp_path / "cut" / privacy_budget.SECRET
    assert kept.stat().st_mode & 0o777 == 0o600
    assert len(kept.read_text()) == 64
    secret = kept.read_text()
    kept.unlink()
    with pytest.raises(ConfigError, match="missing or damaged"):
        run.resume(tmp_path / "cut", Watching())
    kept.write_text(secret)
    run.resume(tmp_path / "cut", Watching())
    assert summary.read(tmp_path / "cut")["privacy"] == summary.read(whole)["privacy"]
    text = "".join(path.read_text() for path in whole.rglob("*") if path.suffix in (".json", ".toml", ".jsonl"))
    assert secret not in text


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        (["models.assign=best-local"], ConfigError, "best-local' trains every architecture at every client without noise"),
        (["privacy.noise_multiplier=1.0"], ConfigError, "privacy.noise_multiplier: set either noise_multiplier or epsilon"),
        (["privacy.epsilon=0"], ConfigError, "privacy.epsilon: must be positive"),
        (["privacy.clip=0"], ConfigError, "privacy.clip: must be > 0"),
        (["privacy.clip=inf"], ConfigError, "privacy.clip: must be finite"),
        (["privacy.delta=1"], ConfigError, "privacy.delta: must be between 0 and 1"),
        pytest.param(
            ["privacy.secret=true", "engine=flower"], ConfigError, "privacy.secret", marks=pytest.mark.needs("flwr", "ray")
        ),
        (["method=centralized", "finetune.epochs=1"], ConfigError, "would be used twice"),
    ],
)
def test_what_cannot_be_private_is_refused_before_anything_is_trained(tmp_path, words, error, why):
    with pytest.raises(error, match=why):
        do(tmp_path / "run", *PRIVATE, *words)
    assert not (tmp_path / "run").exists()


def test_a_network_that_normalises_by_the_batch_is_refused(tmp_path, monkeypatch):
    (tmp_path / "normalised.py").write_text(
        "from torch import nn\n"
        "def net(classes: int):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PrivacyError, match=r"normalised:net: its layer 2 \(BatchNorm1d\) normalises by other samples"):
        do(tmp_path / "run", *PRIVATE, "models.pool=['mlr', 'normalised:net']")
    assert not (tmp_path / "run").exists()


def test_a_method_that_trains_more_than_planned_is_stopped(tmp_path, monkeypatch):
    once = PlannedTraining(BatchSchedule(batch=16, steps=1), 16)  # as if it took one step in all
    monkeypatch.setattr(privacy_budget, "whole_run", lambda experiment, samples: [(once, 1)])
    with pytest.raises(PrivacyError, match=r"its next training would take it to epsilon .*, beyond privacy.epsilon = 6"):
        do(tmp_path / "run", *PRIVATE)


def test_delta_that_allows_for_a_sample_is_pointed_out():
    experiment, _ = load("digits-fedme", ["privacy.noise_multiplier=1.0", "privacy.delta=0.1", "models.assign=mlr"])
    assert "delta is not below 1 / samples" in privacy_budget.cautions(experiment, clients((30,)))[0]
    assert privacy_budget.cautions(load("digits-fedme", [])[0], clients((30,))) == []


def test_a_table_of_privacy_leaves_other_fingerprints_alone():
    plain = load("digits-fedme", [])[0].plain()
    assert "privacy" not in plain
    with_it = load("digits-fedme", ["privacy.noise_multiplier=1.0"])[0].plain()
    assert with_it["privacy"] == {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "secret": False}
    json.dumps(with_it)


def test_an_unreadable_secret_is_an_error(tmp_path):
    options = load("digits-fedme", ["privacy.noise_multiplier=1.0", "privacy.secret=true"])[0].settings.privacy
    (tmp_path / privacy_budget.SECRET).write_text("no number")
    with pytest.raises(ConfigError, match="missing or damaged"):
        privacy_budget.secret_of(tmp_path, options, begun=True)
