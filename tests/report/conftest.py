import io

import pytest
from rich.console import Console

from fedme.config.experiment import load
from fedme.running import run
from fedme.running.progress import Display

TINY = [
    "rounds=4",
    "partition.clients=5",
    "data.limit=200",
    "data.unlabeled=20",
    "models.pool=['mlr','dnn-8']",
    "models.assign=round-robin",
    "method.clusters=2",
]


def run_preset(folder, preset, *words):
    words = [word for word in (*TINY, *words) if preset == "digits-fedme" or not word.startswith("method.clusters")]
    experiment, _ = load(preset, [*words, f"output={folder}"])
    return run.start(experiment, Display(Console(file=io.StringIO()), quiet=True))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """FedMe and Local with two seeds each, and HypCluster with one, over the same five clients."""
    home = tmp_path_factory.mktemp("runs")
    folders = [run_preset(home / f"fedme-{seed}", "digits-fedme", f"seed={seed}") for seed in (0, 1)]
    folders += [run_preset(home / f"local-{seed}", "digits-local", f"seed={seed}") for seed in (0, 1)]
    return [*folders, run_preset(home / "hyp", "digits-fedavg", "method.name=hypcluster", "name=hyp")]
