"""The cells of the table "What works with which method": what works runs, and what does not is refused by name."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import fedme
from fedme.api.learner import learner
from fedme.artifacts import unseen_clients
from fedme.auditing import run_audit
from fedme.config.experiment import ConfigError, load
from fedme.core.atomic_files import RunError
from fedme.core.method import TaskError
from fedme.deployment.site_settings import agreed_task
from fedme.methods import METHODS
from fedme_test_runs import Watching, do

WEBSITE = Path(__file__).parents[2] / "website"
REFUSALS = (ConfigError, TaskError, RunError)
ONE = ["models.assign=dnn-8", "models.pool=['dnn-8']", "models.shared=dnn-8"]


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(WEBSITE))
    try:
        spec = importlib.util.spec_from_file_location("fedme_method_pages", WEBSITE / "method_pages.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(WEBSITE))
    return module.OPTIONS


def works(table, option, name, attempt):
    """Whether an attempt succeeds exactly if the table says so."""
    refused = table[option](METHODS[name])
    if not refused:
        attempt()
        return
    with pytest.raises(REFUSALS) as error:
        attempt()
    assert str(error.value)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "words",
    [["train.cohort=2"], ["faults.lost=0.3"], ["finetune.epochs=1"], ["train.steps=2"]],
    ids=lambda words: words[0].partition("=")[0],
)
def test_what_works_with_all(name, words, tmp_path):
    do(tmp_path / "run", "rounds=2", f"method.name={name}", *ONE, *words)


@pytest.mark.parametrize("name", METHODS)
def test_privacy(table, name, tmp_path):
    pytest.importorskip("opacus", reason="needs opacus")
    words = ["rounds=1", f"method.name={name}", *ONE, "privacy.epsilon=8", "privacy.clip=1.0", "finetune.epochs=0"]
    works(table, "`[privacy]`", name, lambda: do(tmp_path / "run", *words))


@pytest.mark.parametrize("name", METHODS)
def test_other_optimizers(table, name, tmp_path):
    words = ["rounds=1", f"method.name={name}", *ONE, "train.optimizer=adam", "train.lr=0.01", "train.momentum=0"]
    works(table, "`train.optimizer`", name, lambda: do(tmp_path / "run", *words))


@pytest.mark.parametrize("name", METHODS)
def test_regression(table, name, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype("float32")
    clients = [fedme.Client(f"c{i}", train=(x + i, (x @ [1, 2, 3]).astype("float32")), model="dnn-8") for i in range(3)]
    made = learner(METHODS[name])(rounds=1)
    given = {"unlabeled": x, "public": (x, (x @ [1, 2, 3]).astype("float32"))}
    works(table, "regression, several labels", name, lambda: made.fit(clients, output=tmp_path / "run", quiet=True, **given))


@pytest.mark.parametrize("name", METHODS)
def test_join_and_audit(table, name, tmp_path):
    do(tmp_path / "run", "rounds=1", f"method.name={name}", *ONE)
    experiment, _ = load(tmp_path / "run" / "config.toml")
    works(table, "`fedme join`", name, lambda: unseen_clients.load_offers(tmp_path / "run", experiment))
    works(table, "`fedme audit`", name, lambda: run_audit.audit(tmp_path / "run", Watching(), shadows=2))


@pytest.mark.parametrize("name", METHODS)
def test_deployment(table, name, tmp_path):
    text = f"rounds = 1\n[method]\nname = '{name}'\n[data]\nname = 'sites'\nshape = [4]\nclasses = ['a', 'b']\n"
    (tmp_path / "experiment.toml").write_text(text + "[models]\npool = ['dnn-8']\nshared = 'dnn-8'\n")
    works(table, "`fedme deploy`", name, lambda: agreed_task(load(tmp_path / "experiment.toml")[0]))


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_travel_by_name(table, name, tmp_path):
    words = ["rounds=1", f"method.name={name}", *ONE, "data.unlabeled=0", 'method.shared=["3."]']
    works(table, "`method.shared`", name, lambda: do(tmp_path / "run", *words))
