"""The demo's sentences are computed from its runs, whatever came out of them."""

import json

import pytest

from fedme.cli import demo_command
from fedme.cli.demo_command import DEMO, story
from fedme.core.atomic_files import sealed
from fedme.core.metrics import Metrics
from fedme.running import run
from fedme_test_runs import Watching

ARCHITECTURES = ("mlr", "cnn", "cnn")


@pytest.fixture
def sentences(tmp_path):
    """The story of runs with these accuracies per client: of Local, and of FedMe."""

    def write(name, accuracies, architectures, **cost):
        folder = tmp_path / name
        folder.mkdir()
        rows = []
        for t in (0, 1):  # only the last round counts
            for client, (accuracy, arch) in enumerate(zip(accuracies, architectures, strict=True)):
                about = {
                    "round": t,
                    "client": f"c{client}",
                    "model": "personal",
                    "arch": arch,
                    "split": "test",
                    "stage": "round",
                }
                measured = Metrics(20, 10, 2).plain("classification") | {"accuracy": accuracy if t else 0.0}
                costs = {"bytes_up": 1, "bytes_down": 1, "client_seconds": 0.1, "server_seconds": 0.1}
                rows.append({key: None if value != value else value for key, value in (about | measured | costs).items()})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        total = {"bytes_up": 0, "bytes_down": 0, "client_seconds": 0.0, "server_seconds": 0.0} | cost
        (folder / "summary.json").write_text(json.dumps(sealed({"rounds": 2, **total})))
        return folder

    def tell(alone, together, architectures=ARCHITECTURES):
        local = write("local", alone, architectures)
        fedavg = write("fed avg", together, architectures, bytes_up=4_000_000, bytes_down=6_000_000, client_seconds=1.5)
        fedme = write("fedme", together, architectures, bytes_up=1_000_000, bytes_down=1_500_000, server_seconds=0.5)
        return story(local, fedavg, fedme)

    return tell


def test_gains_losses_cost_architectures_and_what_to_do_next(sentences):
    gained, lost, cost, held, after = sentences([0.5, 0.6, 0.9], [0.8, 0.7, 0.85])
    assert gained == (
        "Gained: 2 of 3 clients do better with FedMe than after training alone, by 20.0 points on average; "
        "client c0 gained most, from 50 to 80 %."
    )
    assert lost == "Lost: 1 client does worse, by 5.0 points on average, client c2 by 5.0; 0 clients stayed the same."
    assert cost == ("Cost: FedMe sent 2.5 MB and computed for 0.5 s, FedAvg 10.0 MB and 1.5 s; training alone sends nothing.")
    assert held == "Architectures: of 3 clients, 2 ended with cnn and 1 with mlr."
    assert "fed avg'" in after  # a path with a space is quoted
    assert "about 20 test samples per client" in after


def test_nobody_gained(sentences):
    gained, lost, *_ = sentences([0.5, 0.6, 0.9], [0.4, 0.6, 0.7])
    assert gained == "Gained: none of the 3 clients does better with FedMe than after training alone."
    assert lost == "Lost: 2 clients do worse, by 15.0 points on average, client c2 by 20.0; 1 client stayed the same."


def test_all_equal(sentences):
    gained, lost, _, held, _ = sentences([0.5, 0.6, 0.9], [0.5, 0.6, 0.9], ["mlr"] * 3)
    assert gained == "Gained: none of the 3 clients does better with FedMe than after training alone."
    assert lost == "Lost: no client; 3 clients stayed the same."
    assert held == "Architectures: all 3 clients ended with mlr."


def test_everybody_gained(sentences):
    gained, lost, *_ = sentences([0.5, 0.6, 0.8], [0.6, 0.7, 0.9])
    assert gained.startswith("Gained: 3 of 3 clients do better")
    assert lost == "Lost: no client."


def test_clients_whose_models_diverged_are_not_counted(sentences):
    assert sentences([0.5, None, 0.8], [0.6, 0.7, None])[0].startswith("Gained: 1 of 1 client does better")


def test_nothing_can_be_compared(sentences):
    gained, lost, *_ = sentences([None] * 3, [0.6] * 3)
    assert gained == "Gained: unknown, no client has a test result in both runs."
    assert lost == "Lost: unknown."


def test_the_demo_prints_its_table_and_its_sentences_every_time(fedme, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    short = ["rounds=2", "partition.clients=4", "models.assign=round-robin", "models.selection_rounds=1"]
    load = demo_command.load
    monkeypatch.setattr(demo_command, "load", lambda name: load(name, short))
    for suffix in ("", "-2"):
        code, out, err = fedme("demo")
        assert code == 0
        assert "digits-fedme (3 of 3)" in err
        starts = [line.split(": ")[0] for line in out.splitlines()[-5:]]
        assert starts == ["Gained", "Lost", "Cost", "Architectures", "Next"]
        assert f"fedme report {' '.join(f'runs/{name}{suffix}' for name in DEMO)}`" in out
    assert fedme("run", DEMO[-1], "seed=1", *short, "-q")[0] == 0  # what the demo advises


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_clients_of_the_demo_keep_different_architectures(seed, tmp_path):
    experiment, _ = demo_command.load(DEMO[-1], [f"seed={seed}", f"output={tmp_path / 'run'}"])
    held = demo_command.outcome(run.start(experiment, Watching())).architectures
    assert sum(count >= 3 for count in held.values()) >= 2, held
