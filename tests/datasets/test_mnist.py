import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.datasets import DATASETS, DataError
from fedme.datasets.idx import read_idx
from fedme.datasets.mnist import EMNIST_CLASSES, FILES, Emnist, FashionMnist, Mnist, _emnist_files


def test_reads_gzipped_and_unpacked_files(tmp_path, write_mnist):
    written = write_mnist(tmp_path / "mnist", FILES)
    write_mnist(tmp_path / "fashion-mnist", tuple(name.removesuffix(".gz") for name in FILES))
    for dataset in (Mnist().load(tmp_path), FashionMnist().load(tmp_path)):
        assert (len(dataset.train), len(dataset.test)) == (12, 6)
        assert dataset.schema.shape == (1, 28, 28)
        assert dataset.owners is None
        images = np.concatenate([written[FILES[0]], written[FILES[2]]])
        torch.testing.assert_close(
            dataset.source.inputs(torch.arange(18))[:, 0], torch.tensor(images / 255, dtype=torch.float32)
        )
        assert dataset.source.labels.tolist() == [*written[FILES[1]], *written[FILES[3]]]
        assert dataset.source.x.dtype == torch.uint8


def test_scalings(tmp_path, write_mnist):
    written = write_mnist(tmp_path / "mnist", FILES)
    raw = np.concatenate([written[FILES[0]], written[FILES[2]]]).astype(np.float64)
    rows = torch.arange(18)
    standard = Mnist(scaling="standard").load(tmp_path).source.inputs(rows)[:, 0]
    np.testing.assert_allclose(standard, (raw / 255 - 0.1307) / 0.3081, atol=1e-5)
    per_pixel = Mnist(scaling="per-pixel").load(tmp_path).source.inputs(rows)[:, 0]
    np.testing.assert_allclose(per_pixel, (raw - raw.mean(0)) / (raw.std(0) + 0.001), atol=1e-4)


def test_padding_repeats_the_border(tmp_path, write_mnist):
    written = write_mnist(tmp_path / "mnist", FILES)
    dataset = Mnist(pad=2).load(tmp_path)
    assert dataset.schema.shape == (1, 32, 32)
    expected = np.pad(written[FILES[0]][3], 2, mode="edge")
    np.testing.assert_array_equal(dataset.source.x[3, 0], expected)


@pytest.mark.parametrize("split", list(EMNIST_CLASSES))
def test_emnist_is_turned_upright_and_counted_from_zero(tmp_path, write_mnist, split):
    names = _emnist_files(split)
    classes = len(EMNIST_CLASSES[split])
    written = write_mnist(tmp_path / "emnist", names, classes=classes, train=classes, first=int(split == "letters"))
    dataset = Emnist(split=split, scaling="standard").load(tmp_path)
    assert len(set(dataset.schema.classes)) == classes == {"byclass": 62, "letters": 26, "digits": 10}.get(split, 47)
    assert dataset.source.labels[:classes].tolist() == list(range(classes))
    np.testing.assert_array_equal(dataset.source.x[2, 0], written[names[0]][2].T)
    assert abs(float(dataset.source.inputs(dataset.train).mean())) < 1e-4
    assert float(dataset.source.inputs(dataset.train).std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"\x00\x00\x09\x03" + b[4:], "got 00000903"),
        (lambda b: b"", "got an empty file"),
        (lambda b: b[:9], "incomplete header"),
        (lambda b: b[:-1], "2352 bytes after its header, got 2351"),
        (lambda b: b + b"x", "2352 bytes after its header, got more"),
        (lambda b: b[:4] + b"\xff\xff\xff\xff" + b[8:], "got 4294967295"),
        (lambda b: b[:4] + b"\x00\x00\x00\x00" + b[8:], "number of items .* got 0"),
        (lambda b: b[:8] + b"\x00\x00\x00\x1d" + b[12:], r"shape \(28, 28\), got \(29, 28\)"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx_files_are_refused_by_name(tmp_path, idx, change, message, suffix):
    path = tmp_path / f"images{suffix}"
    content = change(idx(np.zeros((3, 28, 28))))
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, (28, 28))
    assert str(path) in str(caught.value)


def test_damaged_gzip_is_refused(tmp_path, idx):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((3, 28, 28))))[:-6])
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path, (28, 28))
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path, (28, 28))
    content = gzip.compress(idx(np.zeros((3, 28, 28))))
    path.write_bytes(content + b"more")
    with pytest.raises(DataError, match="trailing data"):
        read_idx(path, (28, 28))
    path.write_bytes(content[:-8] + b"\1\2\3\4" + content[-4:])
    with pytest.raises(DataError, match="cannot be read"):  # the checksum is wrong
        read_idx(path, (28, 28))


@settings(deadline=None, max_examples=150)
@given(data=st.data(), suffix=st.sampled_from(["", ".gz"]))
def test_mutated_idx_files_give_a_data_error_or_the_right_shape(tmp_path_factory, idx, data, suffix):
    content = idx(np.arange(3 * 4).reshape(3, 2, 2))
    content = bytearray(gzip.compress(content) if suffix else content)
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=60))
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path_factory.getbasetemp() / f"mutated{suffix}"
    path.write_bytes(content)
    try:
        values = read_idx(path, (2, 2))
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert values.shape[1:] == (2, 2)


def test_labels_must_fit_images_and_classes(tmp_path, write_mnist, idx):
    folder = tmp_path / "mnist"
    write_mnist(folder, FILES)
    (folder / FILES[1]).write_bytes(gzip.compress(idx(np.zeros(11))))
    with pytest.raises(DataError, match="11 labels, but 12 images"):
        Mnist().load(tmp_path)
    (folder / FILES[1]).write_bytes(gzip.compress(idx(np.full(12, 10))))
    with pytest.raises(DataError, match="labels of mnist must be between 0 and 9, got 10"):
        Mnist().load(tmp_path)


@pytest.mark.parametrize("options", [{"scaling": "none"}, {"pad": -1}])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist"])
def test_unknown_options_are_refused(name, options):
    with pytest.raises(DataError, match=f"^{next(iter(options))}: must be"):
        DATASETS[name](**options)


@pytest.mark.skipif("FEDME_DATA" not in os.environ, reason="needs data sets (FEDME_DATA=DIRECTORY make test)")
def test_real_mnist():
    dataset = Mnist(scaling="standard").load(Path(os.environ["FEDME_DATA"]))
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert torch.bincount(dataset.source.labels[dataset.train])[[5, 1]].tolist() == [5421, 6742]
    x = dataset.source.inputs(dataset.train)
    assert abs(float(x.mean())) < 1e-3
    assert abs(float(x.std()) - 1) < 1e-3
