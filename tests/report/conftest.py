import io

import pytest
from rich.console import Console

from fedme import report
from fedme.config.experiment import load
from fedme.report import chromium
from fedme.running import run
from fedme.running.progress import Display
from fedme_test_browser import new_page, open_file

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


@pytest.fixture(scope="session", name="run_preset")
def preset_runner():
    """Run a preset with the settings of these tests."""
    return run_preset


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """FedMe and Local with two seeds each, and HypCluster with one, over the same five clients."""
    home = tmp_path_factory.mktemp("runs")
    folders = [run_preset(home / f"fedme-{seed}", "digits-fedme", f"seed={seed}") for seed in (0, 1)]
    folders += [run_preset(home / f"local-{seed}", "digits-local", f"seed={seed}") for seed in (0, 1)]
    return [*folders, run_preset(home / "hyp", "digits-fedavg", "method.name=hypcluster", "name=hyp")]


@pytest.fixture(scope="session")
def file(runs, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "report.html"
    report.write(runs, target)
    return target


@pytest.fixture(scope="module")  # tests of other files start browsers of their own, and a process can have only one at a time
def browser():
    with chromium.launch() as browser:
        yield browser


@pytest.fixture
def page(browser, file):
    """The report, freshly opened; at the end its console must be empty."""
    page, messages = new_page(browser)
    open_file(page, file)
    yield page
    assert messages == []
    page.close()
