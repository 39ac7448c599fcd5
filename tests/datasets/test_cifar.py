import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.datasets import DataError
from fedme.datasets.cifar import CIFAR10_CLASSES, CIFAR10_TRAIN, Cifar10, Cifar100, _records


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (6, 2, 3072), dtype=np.uint8)
    for number, name in enumerate((*CIFAR10_TRAIN, "test_batch.bin")):
        records = np.concatenate([np.array([[number], [9 - number]], dtype=np.uint8), images[number]], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return tmp_path, images.reshape(12, 3, 32, 32)


@pytest.fixture
def cifar100(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in (("train.bin", 4), ("test.bin", 2)):
        labels = np.stack([np.arange(count), 50 + np.arange(count)], axis=1).astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, np.zeros((count, 3072), np.uint8)], axis=1).tobytes())
    return tmp_path


def test_cifar10(cifar10):
    root, images = cifar10
    dataset = Cifar10().load(root)
    assert (len(dataset.train), len(dataset.test)) == (10, 2)
    assert dataset.source.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    assert dataset.schema.classes == CIFAR10_CLASSES
    assert dataset.source.x.dtype == torch.uint8
    mean = np.array([0.4914, 0.4824, 0.4467]).reshape(3, 1, 1)
    std = np.array([0.2471, 0.2435, 0.2616]).reshape(3, 1, 1)
    np.testing.assert_allclose(dataset.source.inputs(torch.arange(12)), (images / 255 - mean) / std, atol=1e-5)
    half = Cifar10(scaling="half").load(root).source.inputs(torch.arange(12))
    np.testing.assert_allclose(half, (images / 255 - 0.5) / 0.5, atol=1e-5)


def test_augmentation_is_for_training_batches_only(cifar10):
    root, _ = cifar10
    plain, augmented = Cifar10().load(root).source, Cifar10(augment=2).load(root).source
    rows = torch.arange(12)
    torch.testing.assert_close(plain.inputs(rows), augmented.inputs(rows))
    changed = augmented.inputs(rows, Key(0))
    assert changed.shape == (12, 3, 32, 32)
    assert not torch.equal(changed, plain.inputs(rows))
    torch.testing.assert_close(plain.inputs(rows, Key(0)), plain.inputs(rows))


def test_cifar100_has_two_label_spaces(cifar100):
    fine, coarse = Cifar100().load(cifar100), Cifar100(labels="coarse").load(cifar100)
    assert fine.source.labels.tolist() == [50, 51, 52, 53, 50, 51]
    assert coarse.source.labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert (len(fine.schema.classes), len(coarse.schema.classes)) == (100, 20)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(DataError, match=r"pickle.*cifar-10-binary\.tar\.gz.*cifar-10-batches-bin"):
        Cifar10().load(tmp_path)
    with pytest.raises(DataError, match=r"pickle.*cifar-100-binary\.tar\.gz.*cifar-100-binary"):
        Cifar100().load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (bytes(3072), "3072 bytes are not a multiple of the record size, 3073"),
        (bytes(3073) + b"\x0a" + bytes(3072), "between 0 and 9, got 10"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        _records(path, (10,))
    assert str(path) in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(length=st.integers(0, 3 * 3074), fill=st.integers(0, 255), limits=st.sampled_from([(10,), (20, 100)]))
def test_any_bytes_give_a_data_error_or_records(tmp_path_factory, length, fill, limits):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(bytes([fill]) * length)
    try:
        labels, images = _records(path, limits)
    except DataError:
        return
    assert len(labels) == len(images) == length // (3072 + len(limits))
    assert all(int(labels[:, column].max()) < limit for column, limit in enumerate(limits))


@pytest.mark.parametrize("options", [{"scaling": "unit"}, {"augment": -1}])
@pytest.mark.parametrize("dataset_class", [Cifar10, Cifar100])
def test_unknown_options_are_refused(dataset_class, options):
    with pytest.raises(DataError, match=next(iter(options))):
        dataset_class(**options)


@pytest.mark.skipif("FEDME_DATA" not in os.environ, reason="needs data sets (FEDME_DATA=DIRECTORY make test)")
def test_real_cifar10():
    dataset = Cifar10().load(Path(os.environ["FEDME_DATA"]))
    assert torch.bincount(dataset.source.labels[dataset.train]).tolist() == [5000] * 10
    x = dataset.source.inputs(dataset.train[::50])
    assert float(x.mean(dim=(0, 2, 3)).abs().max()) < 0.05
