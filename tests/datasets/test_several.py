"""Clients with different data sets in one run."""

import dataclasses
import gzip
import struct

import numpy as np
import pytest
import torch

from fedme.config.experiment import ConfigError, load
from fedme.datasets.data_errors import DataError
from fedme.datasets.several import Several
from fedme.results import records
from fedme.running import run
from fedme_test_runs import Watching

TRAIN, TEST = 60, 20


@pytest.fixture
def published(tmp_path):
    """Files like those of MNIST and Fashion-MNIST, with few images."""
    draw = np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        folder = tmp_path / name
        folder.mkdir()
        for part, count in (("train", TRAIN), ("t10k", TEST)):
            labels = np.arange(count, dtype=np.uint8) % 10
            images = draw.integers(0, 256, (count, 28, 28)).astype(np.uint8)
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
                (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return tmp_path


def test_rows_classes_and_inputs_are_those_of_each_data_set(published):
    both = Several({"a": {"name": "mnist"}, "b": {"name": "fashion-mnist", "scaling": "standard"}})
    dataset = both.load(published)
    assert list(dataset.owners) == ["a", "b"]
    assert len(dataset.schema.classes) == 20
    assert dataset.schema.classes[0] == "a 0"
    assert dataset.schema.classes[10] == "b T-shirt/top"
    for i, name in enumerate(both.sets):
        alone = both._reader(name).load(published)
        train, test = dataset.owners[name]
        assert (len(train), len(test)) == (TRAIN, TEST)
        assert torch.equal(dataset.source.inputs(train), alone.source.inputs(alone.train))
        assert torch.equal(dataset.source.labels[test], alone.source.labels[alone.test] + 10 * i)
    assert both.groups["b"] == tuple((c,) for c in range(10, 20))


def test_shapes_must_agree(published):
    with pytest.raises(DataError, match="a 1 x 32 x 32, b 1 x 28 x 28"):
        Several({"a": {"name": "mnist", "pad": 2}, "b": {"name": "mnist"}}).load(published)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ({"a": {"name": "mnist"}}, "two or more clients"),
        ({"a": {"name": "mnist"}, "b": {"name": "nothing"}}, "sets.b: must have a name, one of digits, mnist"),
        ({"a": {"name": "mnist"}, "b": {}}, "got None"),
        ({"a": {"name": "mnist"}, "b": {"name": "mnist", "pads": 2}}, "data.sets.b.pads: unknown key"),
    ],
)
def test_wrong_settings_are_refused(sets, says):
    with pytest.raises(ValueError, match=says):
        Several(sets)


def test_fml_trains_clients_with_different_data_sets(published, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDME_DATA", str(published))
    words = [
        "rounds=2",
        "evaluate_every=1",
        "train.epochs=1",
        "models.shared=fml-cnn2(channels=4)",
        f"output={tmp_path / 'run'}",
    ]
    experiment, _ = load("fml-mnist-fashion", words)
    folder = run.start(experiment, Watching())
    rows = [row for row in records.read(folder) if row["stage"] == "round" and row["round"] == 1]
    assert {(row["client"], row["model"]) for row in rows} == {
        (client, model) for client in ("mnist", "fashion-mnist") for model in ("personal", "global")
    }
    assert all(row["samples"] == TEST and row["classes_present"] == 10 for row in rows)
    assert dataclasses.asdict(experiment.data)["groups"]["mnist"] == tuple((c,) for c in range(10))


def test_methods_with_one_model_and_other_partitions_are_refused(published, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDME_DATA", str(published))
    with pytest.raises(ConfigError, match="one client per data set"):
        load("fml-mnist-fashion", ["partition={name='iid', clients=2}"])
