"""The benchmark's own arithmetic: the division that all sides share, and the table that is published. No peers, no timing."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedme.core.data import Arrays, Schema
from fedme.core.key import Key
from fedme.datasets import DataOptions, Dataset, federate
from fedme.datasets.partitioners import PARTITIONS, Pool

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The scripts of the benchmark import each other by name, as they do when one of them is started."""
    before, known = set(sys.modules), dict(PARTITIONS)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    PARTITIONS.clear()
    PARTITIONS.update(known)
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def images():
    """As many samples as MNIST, one feature each."""
    labels = torch.arange(70_000) % 10
    rows = torch.arange(70_000)
    schema = Schema((1,), tuple("0123456789"))
    return Dataset("counted", Arrays(rows[:, None].float(), labels), schema, rows[:60_000], rows[60_000:])


def test_sizes_have_the_totals_that_were_published():
    found = module("division").sizes(clients=20, least=374, most=4641, steps=5240, batch=10)
    assert sum(found) == 52_400
    assert sum(-(-size // 10) for size in found) == 5240
    assert (len(found), found[0], found[-1]) == (20, 380, 4640)
    assert found == sorted(found)
    assert len(set(found)) == 20
    assert all(size % 10 == 0 for size in found)


@pytest.mark.parametrize(
    ("clients", "least", "most", "steps", "batch"),
    [(3, 1, 30, 5, 10), (4, 20, 120, 28, 10), (7, 5, 5, 7, 5), (50, 1, 999, 900, 4)],
)
def test_any_possible_totals_are_met(clients, least, most, steps, batch):
    found = module("division").sizes(clients, least, most, steps, batch)
    assert len(found) == clients
    assert sum(found) == steps * batch
    assert all(least <= size <= most and size % batch == 0 for size in found)


@pytest.mark.parametrize("steps", [19 * 38 + 464 - 1, 38 + 19 * 464 + 1])
def test_impossible_totals_are_refused(steps):
    with pytest.raises(ValueError, match="cannot make"):
        module("division").sizes(20, 374, 4641, steps, 10)


@pytest.mark.parametrize("val", [0.0, 0.12])
def test_clients_train_on_exactly_these_sizes_with_and_without_validation(images, val):
    partition = module("division").Unequal(val=val)
    first, again = (federate(images, partition, DataOptions(val=val), Key(0)) for _ in range(2))
    trained = [len(data.train) for data in first.clients.values()]
    assert sorted(trained) == module("division").sizes(20, 374, 4641, 5240, 10)
    assert trained != sorted(trained)  # the order says nothing about the size
    assert sum(len(data.test) for data in first.clients.values()) == 10_000
    everything = torch.cat([data.train.rows for data in first.clients.values()])
    assert len(everything.unique()) == 52_400
    assert everything.max() < 60_000
    assert all(bool(len(data.val)) == bool(val) for data in first.clients.values())
    assert first.partition.digest() == again.partition.digest()


def test_too_few_samples_are_refused(images):
    pool = Pool(images.source.labels, images.train[:1000], images.test)
    with pytest.raises(ValueError, match="samples are wanted"):
        module("division").Unequal()(pool, Key(0))


def test_natural_clients_have_whole_batches():
    division = module("division")
    experiment = module("session").parse(module("rows").synthetic(quick=True))
    assert isinstance(experiment.partition, division.WholeBatches)
    federation = module("session").assembly.gather(experiment)
    assert len(federation.clients) == 5
    assert all(len(data.train) % 10 == 0 and len(data.test) for data in federation.clients.values())


def test_peers_read_what_we_train_on(tmp_path):
    rows, session, export, protocol = (module(name) for name in ("rows", "session", "export", "protocol"))
    with session.Session.of(rows.synthetic(quick=True)) as ours:
        export.save_data(ours.federation, tmp_path / "data.npz")
        export.save_weights(ours, tmp_path / "weights.npz")
        data = protocol.read(str(tmp_path / "data.npz"))
        for theirs, mine in zip(data.clients, ours.federation.clients.values(), strict=True):
            np.testing.assert_array_equal(theirs.x, mine.train.inputs().numpy())
            np.testing.assert_array_equal(theirs.y, mine.train.y.numpy())
        assert len(data.test.y) == sum(len(mine.test) for mine in ours.federation.clients.values())
        network = module("networks").build("dense", protocol.read_weights(str(tmp_path / "weights.npz")))
        x = torch.from_numpy(data.test.x)
        assert torch.allclose(network(x), ours.server.model(x), atol=1e-6)
        count = ours.counted()
        assert count.samples == sum(len(mine.y) for mine in data.clients)
        assert count.steps * 10 == count.samples


def test_the_network_of_pfllib_has_its_size():
    assert sum(p.numel() for p in module("networks").cnn().parameters()) == 582_026


def test_every_row_can_be_configured():
    """All configurations are read, quick or not; nothing is loaded."""
    rows, session = module("rows"), module("session")
    for quick in (False, True):
        for row in rows.table(quick):
            session.parse(row.config | {"rounds": row.total})
            for against in row.against:
                assert against.kind != "ours" or session.parse(against.config)


def test_the_table_has_every_bar():
    bars = {(row.name, against.peer): against.bar for row in module("rows").table() for against in row.against}
    assert len(bars) == 18
    assert bars["fedavg-mlr", "fedjax"] == 4.5
    assert bars["fedme-dnn", "our FedAvg"] == 2.2
    assert bars["whole-run", "its training alone"] == 1.15
    assert {bars[name, "its training alone"] for name in ("fit-20", "fit-200", "run-20")} == {1.3}


def said(seconds, steps=10, samples=100, accuracy=0.9, **more):
    return {"seconds_per_round": seconds, "steps": steps, "samples": samples, "accuracy": accuracy, **more}


def row_of(name):
    row = next(row for row in module("rows").table() if row.name == name)
    return row, row.against[0]


def test_a_ratio_is_judged_by_medians_of_equal_work():
    judge = module("report").judge
    row, against = row_of("fedavg-mlr")
    line = judge(row, against, said([0.1, 0.1, 9.0]), said([0.5, 0.5, 0.1], accuracy=0.91))
    assert (line["ratio"], line["met"], line["note"]) == (pytest.approx(5.0), True, "")
    assert {"work", "ours_s", "peer", "peer_s", "ratio", "bar", "met"} <= line.keys()
    assert not judge(row, against, said([0.2]), said([0.5]))["met"]
    unequal = judge(row, against, said([0.1]), said([0.5], steps=11))
    assert (unequal["met"], unequal["note"]) == (False, "steps differ: 10 and 11")
    assert "accuracies differ" in judge(row, against, said([0.1]), said([0.5], accuracy=0.88))["note"]


def test_where_less_is_better_the_ratio_is_ours_to_theirs():
    row, against = row_of("fedme-mlr")
    line = module("report").judge(row, against, said([0.3]), said([0.2], accuracy=0.5))
    assert (line["ratio"], line["met"]) == (pytest.approx(1.5), True)


def test_a_whole_run_is_judged_by_means():
    row, against = row_of("whole-run")
    line = module("report").judge(row, against, said([0.22], None, None), said([0.1, 0.1, 0.4]))
    assert (line["ratio"], line["met"]) == (pytest.approx(1.1), True)


def test_the_share_of_the_peak_is_arithmetic_over_time():
    row, against = row_of("femnist-cnn2")
    line = module("report").judge(
        row, against, said([2.0], flop=100e9), said([], None, None, 0.0, gflops={"1": 50.0, "2": 100.0})
    )
    assert (line["ratio"], line["met"]) == (pytest.approx(0.5), True)
    assert line["peer_s"] == pytest.approx(1.0)


def test_both_files_are_written_and_a_failed_peer_is_a_line(tmp_path):
    report = module("report")
    row, against = row_of("fedavg-mlr")
    lines = [
        report.judge(row, against, said([0.1]), said([0.5])),
        report.unanswered(row, row.against[1], said([0.1]), "no such | package"),
    ]
    results = {
        "machine": report.machine(),
        "versions": {"fedme": "1"},
        "gemm": {"1": 90.0, "2": 180.0},
        "quick": False,
        "started": report.now(),
        "minutes": 1.0,
        "rows": lines,
    }
    report.write(results, tmp_path / "deep")
    read = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert [line["met"] for line in read["rows"]] == [True, None]
    page = (tmp_path / "deep" / "results.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert re.search(r"fedjax .* 0\.100 .* 0\.500 .* 5\.00 .* >= 4\.5 .* yes ", table[2])
    assert re.search(r"flower .* 0\.100 .* - .* - .* not measured .* 90\.0 ", table[3])
    assert "no such / package" in table[3]
    assert "180 GF/s on 2 thread(s)" in page


def test_an_answer_is_found_among_other_output(capsys):
    protocol = module("protocol")
    print("a peer says hello")
    protocol.answer("peer", "work", [0.25], 1, 2, 0.5)
    print("and goodbye")
    assert protocol.heard(capsys.readouterr().out)["seconds_per_round"] == [0.25]
    assert protocol.heard("nothing") is None


@pytest.mark.slow
def test_newcomers_are_measured_with_every_method():
    found = module("newcomers").accuracies(seed=0, rounds=1)
    assert next(iter(found)).startswith("Local")
    assert len(found) == 7
    assert all(0 <= value <= 100 for value in found.values())
