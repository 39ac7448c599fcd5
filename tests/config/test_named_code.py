"""No door imports code that a folder names, unless the user says so."""

import json
import shutil
import sys
import tomllib

import numpy as np
import pytest
import tomli_w
from hypothesis import given, strategies as st
from rich.console import Console

import fedme as fedme_api
from fedme.artifacts import saved_models
from fedme.config.experiment import ConfigError, load
from fedme.config.named_code import command_for, load_saved, named_code
from fedme.core.atomic_files import RunError, sealed
from fedme.deployment.operator_folder import Settings
from fedme.deployment.provisioning import write
from fedme.deployment.site_settings import Site
from fedme.results import summary
from fedme.running import local_baseline, run
from fedme.running.progress import Display

MODULE = "hostile_module"
CODE = """
from pathlib import Path
from torch import nn
from fedme.methods.fedme.fedme import FedMe

Path({marker!r}).touch()

def Net(**options):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

class Method(FedMe):
    pass

def criterion(candidate):
    return 0.0
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of an ordinary experiment."""
    folder = tmp_path_factory.mktemp("runs")
    words = [
        "rounds=1",
        "partition.clients=2",
        "train.epochs=1",
        "method.clusters=1",
        'models.pool=["mlr"]',
        f"output={folder / 'run'}",
    ]
    with Display(Console(quiet=True), quiet=True) as display:
        run.start(load("digits-fedme", words)[0], display)
    return folder / "run"


def changed_config(change):
    def apply(folder):
        path = folder / "config.toml"
        config = tomllib.loads(path.read_text())
        change(config)
        path.write_text(tomli_w.dumps(config))

    return apply


def changed_model(folder):
    """Every saved model says that its network is in the module."""
    for path in folder.rglob("*.json"):
        about = json.loads(path.read_text())
        if not isinstance(about, dict) or "arch" not in about:
            continue
        del about["check"]
        path.write_text(json.dumps(sealed(about | {"arch": f"{MODULE}:Net"})))


PLACES = {
    "saved models": changed_model,
    "method": changed_config(lambda config: config["method"].update(name=f"{MODULE}:Method")),
    "function": changed_config(lambda config: config["method"].update(criterion=f"{MODULE}:criterion")),
    "pool": changed_config(lambda config: config["models"].update(pool=[f"{MODULE}:Net"])),
    "pool with options": changed_config(lambda config: config["models"].update(pool=[{"name": f"{MODULE}:Net", "x": 1}])),
    "options in the name": changed_config(lambda config: config["models"].update(pool=[f"{MODULE}:Net(x=1)"])),
    "shared": changed_config(lambda config: config["models"].update(shared=f"{MODULE}:Net")),
}


def doors(fedme, folder, samples):
    """Everything that a person may do with a folder that somebody sent, as functions."""
    client = next(path for path in sorted((folder / "clients").iterdir()) if path.is_dir())
    name = client.name
    yield "load_model", lambda: fedme_api.load_model(client)
    yield "load_run", lambda: fedme_api.load_run(folder)
    yield "load_run of a client", lambda: fedme_api.load_run(folder)[name]
    yield "load_run join", lambda: fedme_api.load_run(folder).join(fedme_api.Client("new", str(samples)))
    yield "load_run report", lambda: fedme_api.load_run(folder).report(folder / "page.html")
    for words in (
        ["join", folder, "--data", samples],
        ["predict", folder, samples, "-c", name],
        ["evaluate", folder, samples, "-c", name],
        ["export", folder, "-c", name, "--to", "onnx", "-o", folder / "model.onnx"],
        ["export", client, "--to", "safetensors", "-o", folder / "model.safetensors"],
        ["report", folder],
        ["watch", folder, "--once"],
        ["show", folder],
        ["show", folder, "--clients"],
        ["compare", folder],
        ["verdict", folder],
        ["audit", folder, "--shadows", "2"],
        ["resume", folder],
    ):
        yield " ".join(map(str, words[:1])), lambda words=words: fedme(*words)


@pytest.mark.parametrize(("place", "unfinished"), [*((place, False) for place in PLACES), ("method", True), ("pool", True)])
def test_no_door_imports_what_a_folder_names(place, unfinished, finished, tmp_path, monkeypatch, fedme):
    marker, folder = tmp_path / "imported", tmp_path / "run"
    (tmp_path / f"{MODULE}.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, folder)
    PLACES[place](folder)
    if unfinished:
        (folder / "summary.json").unlink()
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=np.zeros((10, 1, 8, 8), dtype="uint8"), y=np.arange(10))
    tried = 0
    for door, go in doors(fedme, folder, samples):
        try:
            go()
        except (RunError, ConfigError, KeyError) as error:
            assert door.startswith("load_"), (door, error)
        assert MODULE not in sys.modules, f"{door} imported the module"
        assert not marker.exists(), f"{door} ran the code of the module"
        tried += 1
    assert tried > 15


@pytest.mark.parametrize("place", ["method", "pool"])
def test_the_refusal_names_the_code_and_the_way_to_allow_it(place, finished, tmp_path, monkeypatch, fedme):
    marker, folder = tmp_path / "imported", tmp_path / "run"
    (tmp_path / f"{MODULE}.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(finished, folder)
    PLACES[place](folder)
    named = f"{MODULE}:{'Method' if place == 'method' else 'Net'}"
    for words in (["resume", folder], ["audit", folder]):
        code, _, err = fedme(*words)
        said = " ".join(err.split())
        assert code == 2
        assert f"names code: {named}; importing it runs it. If you trust this folder, use --imports" in said
    with pytest.raises(ConfigError, match=r"imports=True"):
        fedme_api.load_run(folder)
    assert not marker.exists()
    fedme("resume", folder, "--imports")
    try:
        assert marker.exists()
        fedme_api.load_run(folder, imports=True)
    finally:
        sys.modules.pop(MODULE, None)


def test_a_saved_model_is_imported_when_asked(finished, tmp_path, monkeypatch):
    marker, folder = tmp_path / "imported", tmp_path / "run"
    (tmp_path / f"{MODULE}.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(finished, folder)
    changed_model(folder)
    client = next(path for path in sorted((folder / "clients").iterdir()) if path.is_dir())
    with pytest.raises(RunError, match="import path"):
        fedme_api.load_run(folder)[client.name]
    assert not marker.exists()
    saved_models.load_model(client, imports=True)
    assert marker.exists()
    sys.modules.pop(MODULE, None)


@pytest.mark.needs("flwr")
def test_a_site_imports_code_of_the_experiment_only_if_it_says_so(tmp_path, monkeypatch):
    marker = tmp_path / "imported"
    write(tmp_path / "fed", None, ["a"], Settings())
    folder = tmp_path / "fed" / "sites" / "a"
    (folder / f"{MODULE}.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(folder)
    for place in ("method", "pool"):
        text = (folder / "experiment.toml").read_text()
        old, new = {"method": ('"fedme"', f'"{MODULE}:Method"'), "pool": ('"dnn-32"', f'"{MODULE}:Net"')}[place]
        (folder / "experiment.toml").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=r"names code: hostile_module:\w+; .* set `imports = true` in site.toml"):
            Site.read(folder / "site.toml").task()
        assert not marker.exists()
        (folder / "experiment.toml").write_text(text)
    (folder / "experiment.toml").write_text(text.replace('"dnn-32"', f'"{MODULE}:Net"'))
    (folder / "site.toml").write_text((folder / "site.toml").read_text().replace("imports = false", "imports = true"))
    Site.read(folder / "site.toml").task()
    assert marker.exists()
    sys.modules.pop(MODULE, None)


def test_an_ordinary_configuration_names_no_code(finished):
    assert named_code(tomllib.loads((finished / "config.toml").read_text())) == []
    load_saved(finished / "config.toml", imports=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.dictionaries(st.sampled_from(["models", "method", "clients", "data"]), VALUES))
def test_any_table_can_be_asked(config):
    assert all(":" in path for path in named_code(config))


def test_commands_in_messages_import_the_code_that_a_run_names(tmp_path):
    quiet = Display(Console(quiet=True), quiet=True)
    assert command_for(tmp_path / "no run", "verdict") == f"fedme verdict '{tmp_path}/no run'"
    for pool, flag in (("mlr", ""), ("mine:Net", " --imports")):
        folder = tmp_path / flag.strip()
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(f'[models]\npool = ["{pool}"]\n')
        assert command_for(folder) == f"fedme resume {folder}{flag}"
        with pytest.raises(RunError, match="continues it") as refused:
            local_baseline.judge(folder, load("digits-fedavg")[0], quiet)
        assert f"`fedme resume {folder}{flag}` continues it" in str(refused.value)
        with pytest.raises(RunError, match="continues it") as refused:  # of a run that may be somebody else's
            summary.read(folder)
        assert f"`fedme resume {folder}` continues it" in str(refused.value)
