"""The server's rounds with sites, without Flower's processes: every method, and whatever can happen to a site."""

import json
import shutil

import numpy as np
import pytest
from deployment import Deployment, Near
from safetensors.torch import load_file

from fedme.core.method import TaskError
from fedme.deploy import engine, runs
from fedme.deploy.federation import Federation
from fedme.engines.flower import EngineError
from fedme.experiment import records, summary
from fedme.experiment.config import ConfigError
from fedme.methods import METHODS


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "WAIT", 0.0)
    return Deployment(tmp_path)


def new(deployment):
    return runs.new(Federation.read(deployment.federation), deployment.federation / "experiment.toml")


def saved(deployment, run, name):
    folder = deployment.site(name) / "state" / "runs" / runs.token(run) / "clients" / name
    return load_file(folder / "model.safetensors") if folder.exists() else None


def check_models(deployment, run, names):
    expected = deployment.expected()
    for name in names:
        model = {**expected[name].params, **expected[name].buffers}
        mine = saved(deployment, run, name)
        assert mine.keys() == model.keys()
        assert all((mine[key] == value).all() for key, value in model.items())


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"centralized"}))
def test_every_method_gives_the_models_of_one_process(method, deployment):
    own = {"method": {"name": method}}
    if method == "fedmd":
        own["method"] |= {"public_epochs": 1, "private_epochs": 1}
        whole = np.load(deployment.site("a") / "data.npz")
        for folder in [deployment.federation, *deployment.federation.glob("sites/*")]:
            np.savez(folder / "public.npz", x=whole["x"], y=whole["y"])
        deployment.agree(data=deployment.experiment()["data"] | {"public_file": "public.npz"})
    deployment.agree(**own)
    run = new(deployment)
    Near(deployment).play(run)
    check_models(deployment, run, "abc")
    assert runs.without_model(run) == []


def test_data_is_never_pooled(deployment, fedme):
    deployment.agree(method={"name": "centralized"})
    code, _, err = fedme("deploy", "submit", "--federation", deployment.federation)
    assert (code, "method 'centralized' brings everybody's data to one place" in err) == (2, True)
    assert not list(deployment.federation.glob("runs/*"))
    code, _, err = fedme("deploy", "node", deployment.site("a") / "site.toml", "--check")
    assert (code, "method 'centralized' brings everybody's data to one place" in err) == (2, True)
