"""What the fuzzer found once, each as a case of its own: errors in one line, nothing believed, no memory filled."""

import json
import zipfile
import zlib

import numpy as np
import pytest
import torch

from fedme.config.experiment import ConfigError, load, override, read_toml
from fedme.core.atomic_files import RunError, read_tensors, sealed, unsealed, write_json, write_tensors, write_text
from fedme.core.foreign_text import LONGEST, one_line
from fedme.core.typed import TypedError
from fedme.datasets import data_files
from fedme.datasets.data_errors import DataError
from fedme.datasets.site_files import Sites
from fedme.networks import ArchError, arch
from fedme.results import records, summary


def test_what_came_from_outside_is_shown_in_one_short_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("a\x00\u202eb\ud83d") == "a\\x00\\u202eb\\ud83d"
    assert len(one_line("x" * 10**6)) <= LONGEST + 1
    assert len(str(TypedError("a" * 10**6, "b" * 10**6))) <= LONGEST + 1


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 100_000, "a = \x00", "\xff\xfe", "a = 1\na = 2"])
def test_toml_that_no_reader_reads(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"experiment.toml: "):
        read_toml(path)
    with pytest.raises(ConfigError):
        override({}, ["rounds=[" + "[" * 100_000])


@pytest.mark.parametrize("name", [["fedme"], {"fedme": 1}, 3, True])
def test_a_name_that_is_no_text(tmp_path, name):
    for table in ("method", "data", "partition"):
        with pytest.raises(ConfigError, match=f"{table}.name"):
            load("digits-fedme", [f"{table}.name={json.dumps(name)}".replace('{"fedme": 1}', "{fedme = 1}")])


@pytest.mark.parametrize("path", [":x", "a..b:c", ".:x", "os:", "no_such_module:x"])
def test_an_import_path_that_leads_nowhere(path):
    with pytest.raises(ConfigError, match="method.adopt: cannot import"):
        load("digits-fedme", [f"method.adopt={path}"])


def test_an_architecture_whose_options_are_a_labyrinth():
    schema = Sites((1, 8, 8), ("a", "b")).schema
    for spec in ("mlr(" + "(" * 200 + ")" * 200 + ")", "mlr(x=" + "-" * 300 + "1)", "mlr" * 1000):
        with pytest.raises(ArchError):
            arch(spec, schema)


def test_a_sample_cannot_be_larger_than_any_memory():
    with pytest.raises(DataError, match="shape: must describe at most"):
        Sites((1, 8, 10**12), ("a", "b"))


def test_tables_and_tensors_carry_their_fingerprint(tmp_path):
    plain = {"a": [1, 2.5, None], "b": {"1": "x"}, "n": float("nan")}
    write_json(tmp_path / "t.json", sealed(plain))
    written = json.loads((tmp_path / "t.json").read_text())
    assert unsealed(written) == {"a": [1, 2.5, None], "b": {"1": "x"}, "n": None}
    for wrong in ({**written, "a": [1, 2.5, 3]}, {**written, "c": 1}, {k: v for k, v in written.items() if k != "b"}):
        with pytest.raises(ValueError, match="checksum"):
            unsealed(wrong)
    for wrong in ([], "x", None, 3):
        with pytest.raises(ValueError, match="not a table"):
            unsealed(wrong)
    assert unsealed({"a": 1}) == {"a": 1}  # of an earlier version
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}, {"state": {"1": 2, "10": 3, "2": [1.5]}})
    tensors, about = read_tensors(path)
    assert about == {"state": {"1": 2, "10": 3, "2": [1.5]}}
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RunError, match="w.safetensors: damaged"):
        read_tensors(path)
    path.write_bytes(whole.replace(b"1.5", b"2.5"))
    with pytest.raises(RunError, match="w.safetensors: damaged"):
        read_tensors(path)


def test_half_a_letter_does_not_stop_a_run(tmp_path):
    write_text(tmp_path / "x.txt", "a\ud83db")
    assert (tmp_path / "x.txt").read_text() == "a\\ud83db"


ROW = {
    **dict.fromkeys(("client", "model", "split", "stage"), "x"),
    **dict.fromkeys(("round", "samples", "bytes_up", "bytes_down", "correct", "classes_present"), 1),
    **dict.fromkeys(("client_seconds", "server_seconds", "loss", "accuracy", "balanced_accuracy", "macro_f1"), 0.5),
    **dict.fromkeys(("auroc", "ece", "arch"), None),
}


def written(folder, *rows):
    (folder / records.NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(records.read(folder))


def test_rows_that_nobody_can_compute_with_are_refused_by_line(tmp_path):
    assert written(tmp_path, ROW, {**ROW, "notes": {"a": 1}}) == [ROW, {**ROW, "notes": {"a": 1}}]
    for wrong in (
        *({**ROW, name: value} for name in ("round", "samples") for value in (-1, 1.5, True, None, "1", 10**30)),
        *({**ROW, "accuracy": value} for value in ("0.5", [], float("nan"), float("inf"))),
        *({key: value for key, value in ROW.items() if key != name} for name in ("client", "loss", "round")),
        *({**ROW, "notes": []}, {**ROW, "arch": 3}, [], 3, None),
    ):
        with pytest.raises(RunError, match=r"metrics.jsonl, line 2: damaged"):
            written(tmp_path, ROW, wrong)
    for line in (b"\xff\xfe{}\n", b"[" * 100_000 + b"\n"):
        (tmp_path / records.NAME).write_bytes(line)
        with pytest.raises(RunError, match=r"metrics.jsonl, line 1: damaged"):
            list(records.read(tmp_path))


def test_records_that_the_checkpoint_does_not_count_on_are_refused(tmp_path):
    book = records.Records(tmp_path, 0)
    book.write([ROW])
    book.close()
    path = tmp_path / records.NAME
    records.Records(tmp_path, book.size, book.check).close()
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6"))
    with pytest.raises(RunError, match="checksum"):
        records.Records(tmp_path, book.size, book.check)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match="shorter than the checkpoint says"):
        records.Records(tmp_path, book.size, book.check)


@pytest.mark.parametrize(
    "text", ["name = 'x'", "seed = 1", "name = 'x'\nseed = 1\nrounds = 1\nmethod = 3", "[method]\nname = 'a'"]
)
def test_a_configuration_of_a_run_without_its_tables(tmp_path, text):
    (tmp_path / summary.CONFIG).write_text(text)
    with pytest.raises(RunError, match=r"config.toml: cannot be read: .* is missing"):
        summary.config_of(tmp_path)


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w", force_zip64=True) as entry:
        for _ in range(300):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match=r"bomb.npz\): \d+ bytes unpack to 314572800"):
        data_files.read_file(path, "y", "client a")
    np.savez_compressed(path, x=np.zeros((1000, 100)), y=np.zeros(1000))  # only well compressed
    assert len(data_files.read_file(path, "y", "client a")) == 1000


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = (60_000).to_bytes(4, "big")
    head = size + size + bytes([8, 0, 0, 0, 0])
    (tmp_path / "cat").mkdir()
    pixels = zlib.compress(bytes(1 << 20))
    (tmp_path / "cat" / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
    with pytest.raises(DataError, match=r"bomb.png cannot be read \(.*decompression bomb"):
        data_files.read_file(tmp_path, None, "client a")


@pytest.mark.parametrize(("offset", "value"), [(60, b"\xff" * 20), (200, b"\x00" * 30)])
def test_damage_inside_a_compressed_array(tmp_path, offset, value):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 4)), y=np.arange(50))
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x.npz\): "):
        data_files.read_file(path, "y", "client a")
