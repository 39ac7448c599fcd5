"""Reading the metrics of a run at any moment, and summing them up without keeping them all."""

import json
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from fedme.core.atomic_files import RunError
from fedme.core.metrics import MEASURES, Metrics
from fedme.results import records, summary

ABOUT = {"model": "personal", "arch": "mlr", "split": "test", "stage": "round"}
COSTS = ("bytes_up", "bytes_down", "client_seconds", "server_seconds")
FIGURES = dict.fromkeys((*COSTS, *Metrics(0, 0, 0).plain("classification")), 1)
ROWS = [{"round": t, "client": client, **ABOUT, **FIGURES} for t in range(3) for client in ("Zürich", "東京", "b")]
TEXT = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


@given(st.integers(0, len(TEXT)))
def test_a_file_that_ends_anywhere_is_its_whole_lines(tmp_path_factory, end):
    folder = tmp_path_factory.mktemp("run")
    (folder / records.NAME).write_bytes(TEXT[:end])
    found = list(records.read(folder))
    assert found == ROWS[: TEXT[:end].count(b"\n")]


@pytest.mark.parametrize("bad", [b"\xff\xfe\n", b"{\n", b"\x00\x00\n"])
def test_a_whole_line_that_is_no_row_is_damage(tmp_path, bad):
    (tmp_path / records.NAME).write_bytes(TEXT + bad)
    with pytest.raises(RunError, match=r"metrics.jsonl, line 10: damaged"):
        list(records.read(tmp_path))


def scored(t, client, split, accuracy, samples=10):
    about = {"round": t, "client": client, "model": "personal", "stage": "round", "split": split}
    cost = {"bytes_up": 1, "bytes_down": 2, "client_seconds": 0.5, "server_seconds": 0.25}
    metrics = dict.fromkeys([m.key for m in MEASURES["classification"]], accuracy)
    return about | metrics | cost | {"samples": samples, "correct": round(accuracy * samples)}


CONFIG = {"name": "x", "method": {"name": "fml"}, "seed": 0, "rounds": 4}


def test_a_summary_by_hand():
    accuracy = {0: (0.2, 0.4), 1: (0.6, 0.8), 2: (0.8, 0.6), 3: (0.1, 0.3)}  # of two clients; rounds 1 and 2 are equally good
    pairs = [(t, client, each) for t, both in accuracy.items() for client, each in zip("ab", both, strict=True)]
    rows = [scored(t, client, split, each) for t, client, each in pairs for split in ("val", "test")]
    found = summary.summarise(iter(rows), CONFIG)
    picked = {
        (r["selection"], r["split"]): (r["round"], r["accuracy"]["client_mean"], r["accuracy"]["pooled"])
        for r in found["results"]
    }
    assert picked == {
        ("last round", "val"): (3, pytest.approx(0.2), pytest.approx(0.2)),
        ("last round", "test"): (3, pytest.approx(0.2), pytest.approx(0.2)),
        ("best round by validation", "val"): (1, pytest.approx(0.7), pytest.approx(0.7)),
        ("best round by validation", "test"): (1, pytest.approx(0.7), pytest.approx(0.7)),
    }
    assert (found["bytes_up"], found["bytes_down"], found["client_seconds"], found["server_seconds"]) == (8, 16, 4.0, 1.0)


def test_a_summary_counts_what_was_missing():
    reasons = ["late: it took 7.00 s", "late: it took 9.00 s", "dropped out", "joins in round 3", True]
    rows = [scored(0, str(i), "val", 0.5) | {"notes": {"missing": why}} for i, why in enumerate(reasons)]
    found = summary.summarise([*rows, scored(0, "9", "val", 0.5) | {"notes": {"lender": ""}}], CONFIG)
    assert found["missing"] == {"dropped out": 1, "joins": 1, "late": 2, "no reply": 1}
    assert summary.summarise([scored(0, "9", "val", 0.5)], CONFIG)["missing"] == {}


def test_a_summary_of_many_rounds_keeps_few_of_them():
    def rows(rounds):
        for t in range(rounds):
            for client in range(10):
                for split in ("val", "test"):
                    yield scored(t, str(client), split, (t % 7) / 10)

    peaks = []
    for rounds in (20, 600):
        tracemalloc.start()
        summary.summarise(rows(rounds), CONFIG)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
