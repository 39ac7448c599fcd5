"""Numbers taken out of a run directory agree with the run's own summary."""

import json
import math

import pytest
from rich.console import Console

from fedme.config.experiment import load
from fedme.reproduction import measured
from fedme.reproduction.findings import points, value
from fedme.results import records, summary
from fedme.running.progress import Display
from fedme.running.run_queue import Batch, Planned

TINY = ["rounds=4", "evaluate_every=2", "data.limit=150", "partition.name=iid", "partition.clients=3", "data.unlabeled=20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    experiment, _ = load("digits-fedme", [*TINY, "models.assign=best-local", "models.selection_rounds=1"])
    planned = Planned("tiny", tmp_path_factory.mktemp("runs") / "tiny", experiment.plain())
    (outcome,) = Batch(Display(Console(stderr=True), quiet=True), after=measured.take).run([planned])
    assert not outcome.error
    return planned.folder


def test_agrees_with_the_summary(folder):
    found = measured.read(folder)
    lines = {(r["model"], r["stage"], r["split"], r["selection"]): r for r in summary.read(folder)["results"]}
    last = lines["personal", "round", "test", "last round"]["accuracy"]
    assert value(found, "own") == pytest.approx(100 * last["client_mean"], abs=1e-3)
    assert value(found, "PM") == pytest.approx(100 * last["pooled"], abs=1e-3)
    tuned = lines["personal", "finetuned", "test", "last round"]["accuracy"]
    assert value(found, "tuned") == pytest.approx(100 * tuned["client_mean"], abs=1e-3)
    best = lines["personal", "round", "test", "best round by validation"]["accuracy"]
    assert value(found, "own", "validation") == pytest.approx(100 * best["client_mean"], abs=1e-3)
    assert [t for t, _ in points(found, "own")] == [1, 3]
    counts = [
        row["samples"] for row in records.read(folder) if (row["stage"], row["split"], row["round"]) == ("round", "test", 3)
    ]
    curve = found.curves["personal round test"]
    assert curve.samples == sum(counts)
    assert curve.worth == pytest.approx(9 / sum(1 / count for count in counts), abs=0.1)
    assert [found.curves[f"client {i}"].samples for i in range(3)] == counts


def test_right_answers_of_every_client(folder):
    found = measured.read(folder)
    own = found.clients["personal round test"]
    assert list(own) == ["0", "1", "2"]
    assert value(found, "own") == pytest.approx(100 * sum(right / count for right, count in own.values()) / 3, abs=1e-3)
    assert value(found, "PM") == pytest.approx(
        100 * sum(right for right, _ in own.values()) / sum(count for _, count in own.values()), abs=1e-3
    )
    assert set(found.clients) == {"personal round test", "personal finetuned test"}


def test_what_a_mean_over_clients_is_worth():
    assert measured.effective_samples([50, 50, 50]) == 150
    assert measured.effective_samples([1, 1000]) == pytest.approx(4, abs=0.01)  # the client with one sample decides


def test_clients_losses_choices_and_seconds(folder):
    found = measured.read(folder)
    alone = [value(found, f"client {i}") for i in range(3)]
    assert value(found, "clients 0,1,2") == pytest.approx(sum(alone) / 3)
    assert value(found, "own") == pytest.approx(sum(alone) / 3, abs=1e-3)
    assert value(found, "loss own") > 0
    assert sum(found.chosen) == 3
    assert sum(value(found, f"chosen {k}") for k in (1, 2, 3)) == 3
    assert value(found, "seconds client") > 0


def test_what_is_not_finite_survives_the_file(folder):
    plain = json.loads((folder / measured.NAME).read_text())
    plain["curves"]["loss own"]["mean"][0] = None
    assert math.isnan(measured.from_plain(plain).curves["loss own"].mean[0])


def test_it_is_made_again_when_it_is_missing_or_damaged(folder):
    before = measured.read(folder)
    (folder / measured.NAME).unlink()
    assert measured.read(folder) == before
    assert measured.read(folder.parent / "nothing") is None
    (folder / measured.NAME).write_text("{")
    assert measured.read(folder) == before
