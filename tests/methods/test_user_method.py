"""A user's method gets everything that the built-in ones get. `tests/fedme_test_user_method.py` has unusual names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedme.config.experiment import load
from fedme.deployment import site_engine, submitted_runs, transfer_log
from fedme.deployment.operator_folder import Federation
from fedme.learning.accountant import PrivacyError
from fedme.results import records, summary
from fedme.running import privacy_budget, run
from fedme_test_deployment import Deployment, LocalGrid
from fedme_test_runs import TINY, Killed, Watching, do, identical

SOUP = ["method.name=fedme_test_user_method:Soup", "method.salt=0.25", "models.shared=dnn-8", "finetune.epochs=0"]
PRIVATE = [*SOUP, "models.assign=mlr", "privacy.epsilon=8", "privacy.clip=0.5", "rounds=2"]


@pytest.fixture(scope="module")
def soup(tmp_path_factory):
    return do(tmp_path_factory.mktemp("soup") / "run", *SOUP)


def test_it_runs_is_listed_with_its_settings_and_reported(soup, fedme, tmp_path):
    assert summary.read(soup)["method"] == "fedme_test_user_method:Soup"
    code, out, _ = fedme("list", "methods", "fedme_test_user_method:Soup")
    assert code == 0
    assert "salt" in out
    assert "weight of the client's own seasoning" in " ".join(out.split())
    assert fedme("report", soup, "--output", tmp_path / "report.html")[0] == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_it_resumes_to_the_same_bits(soup, tmp_path):
    stopped = tmp_path / "run"
    with pytest.raises(Killed):
        do(stopped, *SOUP, fuse=15)
    run.resume(stopped, Watching(), imports=True)
    assert identical(stopped, soup)


def test_unseen_clients_start_from_what_it_offers(soup, fedme, tmp_path):
    digits = load_digits()
    np.savez(tmp_path / "new.npz", x=digits.images[:40, None].astype(np.float32), y=digits.target[:40])
    code, out, err = fedme("join", soup, "--imports", "--data", tmp_path / "new.npz", "--name", "new", "--json")
    assert code == 0, err
    assert json.loads(out)["started_from"] == "broth"


def test_epsilon_is_kept_and_disclosures_are_said(tmp_path, fedme):
    code, _, err = fedme("run", "digits-fedme", *TINY, *PRIVATE, f"output={tmp_path / 'run'}")
    assert code == 0, err
    assert "how many grams a client adds" in " ".join(err.split())
    spent = [row["epsilon"] for row in records.read(tmp_path / "run") if row["round"] == 1]
    assert 7.5 < min(spent) <= max(spent) <= 8.0  # both trainings of every round are in the plan


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Unannounced", "trains more in one round than the method announces"),
        ("Leaking", "predicts on the training samples of a private client"),
        ("Leaking method.reads=samples", "reads `data.train.inputs` of a private client"),
    ],
)
def test_no_false_privacy_claim(method, message, tmp_path):
    words = f"method.name=fedme_test_user_method:{method}".split()
    with pytest.raises(PrivacyError, match=message):
        do(tmp_path / "run", *PRIVATE, *words)
    assert not (tmp_path / "run").exists()  # nothing was finished, so nothing is left


def test_scores_of_training_samples_are_never_silently_outside_epsilon():
    experiment, _ = load("digits-fedavg", ["method=hypcluster", "privacy.epsilon=8"])
    assert "losses of models on training samples, computed without noise" in privacy_budget.outside(experiment)


def test_it_can_be_audited(soup, fedme):
    code, out, err = fedme("audit", soup, "--imports", "--json", "--shadows", "2")
    assert code == 0, err
    assert {row["model"] for row in json.loads(out)["rows"]} == {"seasoned", "portion"}


@pytest.mark.parametrize("attack", ["sign-flip", "shape", "architecture", "non-finite", "replay"])
def test_spoilt_replies_are_refused_or_used_but_end_no_run(attack, tmp_path):
    folder = do(tmp_path / "run", *SOUP, f"attack.kind={attack}", 'attack.clients=["1"]')
    refused = summary.read(folder).get("refused", {})
    assert set(refused) == (set() if attack == "sign-flip" else {"1"})


def test_sites_give_the_models_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(site_engine, "RETRY_DELAY", 0.0)
    deployment = Deployment(tmp_path)
    deployment.agree(method={"name": "fedme_test_user_method:Soup"})
    for name in "abc":
        deployment.change(deployment.site(name) / "site.toml", imports=True)
    federation = Federation.read(deployment.federation)
    folder = submitted_runs.create(federation, submitted_runs.read(federation, federation.folder / "experiment.toml"))
    LocalGrid(deployment).run_server(folder)
    assert submitted_runs.without_model(folder) == []
    assert json.loads((folder / "shared" / "offers.json").read_text()) == ["broth"]
    transfers = transfer_log.read(folder)
    assert {model["as"] for line in transfers for model in line["models"]} == {"portion", "seasoned"}


@pytest.mark.deploy
def test_flower_gives_the_models_of_one_process(tmp_path):
    words = [*SOUP, "models.assign=mlr", "engine.path=reference"]
    here = do(tmp_path / "here", *words)
    command = ["run", "digits-fedme", *TINY, *words, "engine.name=flower", "engine.workers=2", f"output={tmp_path / 'there'}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-m", "fedme", *command], check=True, env=environment, cwd=tmp_path)
    for path in sorted(here.glob("clients/*/model.safetensors")):
        assert path.read_bytes() == (tmp_path / "there" / path.relative_to(here)).read_bytes()
