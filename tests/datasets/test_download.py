import hashlib
import io
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedme.datasets import DATASETS, DataError, download
from fedme.datasets.download import Archive, File, obtain

CONTENT = b"some data" * 50_000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder, and the address under which it is served."""
    monkeypatch.setenv("NO_PROXY", "*")
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()
        thread.join()


def test_a_missing_file_is_fetched_once(tmp_path, server):
    served, url = server
    (served / "a.gz").write_bytes(CONTENT)
    target = tmp_path / "data"
    remote = [File("a.gz", url + "a.gz", MD5)]
    assert obtain("set", target, ["a.gz"], remote) == {"a.gz": target / "a.gz"}
    assert (target / "a.gz").read_bytes() == CONTENT
    (served / "a.gz").unlink()
    assert obtain("set", target, ["a.gz"], remote) == {"a.gz": target / "a.gz"}


def test_a_progress_bar_is_drawn_on_a_terminal(tmp_path, server, monkeypatch, capsys):
    served, url = server
    (served / "a").write_bytes(CONTENT)
    monkeypatch.setenv("FORCE_COLOR", "1")
    obtain("set", tmp_path, ["a"], [File("a", url + "a", MD5)])
    drawn = capsys.readouterr()
    assert "a" in drawn.err
    assert "kB" in drawn.err
    assert drawn.out == ""


def test_an_unpacked_file_counts_as_there(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    assert obtain("set", tmp_path, ["a.gz"], []) == {"a.gz": tmp_path / "a"}


def check_refused(tmp_path: Path, remote: list[File], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        obtain("set", tmp_path / "data", [file.name for file in remote], remote)
    message = str(caught.value)
    assert all(file.name in message for file in remote)
    assert str(tmp_path / "data") in message
    assert "FEDME_DATA" in message
    assert not any(path.is_file() for path in (tmp_path / "data").glob("*"))


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, server):
    served, url = server
    (served / "a").write_bytes(b"something else")
    check_refused(tmp_path, [File("a", url + "a", MD5), File("b", url + "b", MD5)], "checksum")


def test_a_missing_page(tmp_path, server):
    check_refused(tmp_path, [File("a", server[1] + "a", MD5)], "404")


def test_no_server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as closed:
        port = closed.server_port
    check_refused(tmp_path, [File("a", f"http://127.0.0.1:{port}/a", MD5)], "no connection")


def test_a_folder_that_cannot_be_written(tmp_path, server):
    served, url = server
    (served / "a").write_bytes(CONTENT)
    (tmp_path / "data").write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written"):
        obtain("set", tmp_path / "data", ["a"], [File("a", url + "a", MD5)])


def tar(members: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry)
    return packed.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def serve(server, name: str, content: bytes, largest: int = 100) -> Archive:
    (server[0] / name).write_bytes(content)
    return Archive(server[1] + name, hashlib.md5(content).hexdigest(), {"in/a": "a", "in/b": "b"}, largest)


@pytest.mark.parametrize(("name", "pack"), [("x.tar.gz", tar), ("x.zip", zipped)])
def test_only_listed_members_are_unpacked(tmp_path, server, name, pack):
    content = pack({"in/a": b"1", "../evil": b"2", "/evil": b"3", "in/b": b"4", "in/c": b"5"})
    folder = tmp_path / "deep" / "data"
    paths = obtain("set", folder, ["a"], serve(server, name, content))
    assert paths == {"a": folder / "a"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"1", "b": b"4"}
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tar.gz", tar({"in/a": b"1"}), "does not contain in/b"),
        ("x.tar.gz", tar({"in/a": b"1"}, links=("in/b",)), "does not contain in/b"),
        ("x.tar.gz", tar({"in/a": b"1" * 101, "in/b": b""}), "has 101 bytes"),
        ("x.zip", zipped({"in/a": b"1" * 101, "in/b": b""}), "has 101 bytes"),
        ("x.tar.gz", tar({"in/a": b"1", "in/b": b"2"})[:60], "cannot be unpacked"),
        ("x.zip", b"PK nonsense", "cannot be unpacked"),
    ],
    ids=["missing", "a link", "large in tar", "large in zip", "cut short", "nonsense"],  # archives hold the time they were made
)
def test_bad_archives_are_refused(tmp_path, server, name, content, message):
    with pytest.raises(DataError, match=message):
        obtain("set", tmp_path / "data", ["a", "b"], serve(server, name, content))
    assert not list((tmp_path / "data").glob("*.part"))


def test_the_root_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDME_DATA", str(tmp_path))
    assert download.root() == tmp_path
    monkeypatch.delenv("FEDME_DATA")
    assert "fedme" in str(download.root())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist", "cifar10", "cifar100"])
def test_without_a_network_every_missing_file_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for variable in ("NO_PROXY", "no_proxy", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(DataError, match="FEDME_DATA") as caught:
        DATASETS[name]().load(tmp_path)
    assert ("test" if "cifar" in name else "train-images-idx3-ubyte.gz") in str(caught.value)
    assert str(tmp_path) in str(caught.value)
