"""The failing disk itself: it must do harm, or what survives it has survived nothing."""

import errno
import os

import pytest

from fedme_reliability.disk import Disk


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "spare").mkdir()

    def made(kind, at=1, seed=0):
        return Disk(tmp_path / "run", kind, at, tmp_path / "spare", seed)

    return made


def written(disk, name, data, sync):
    path = disk.folder / name
    with disk.open(path, "wb") as file:
        file.write(data)
    if sync:
        handle = os.open(path, os.O_RDONLY)
        disk.fsync(handle)
        os.close(handle)
    return path


def test_without_power_what_was_not_synced_is_cut_somewhere(disk):
    sizes = []
    for seed in range(20):
        broken = disk("none", seed=seed)
        safe, unsafe = written(broken, "safe", b"x" * 100, True), written(broken, "unsafe", b"x" * 100, False)
        broken.lose_power()
        assert safe.stat().st_size == 100
        sizes.append(unsafe.stat().st_size)
    assert min(sizes) < 20
    assert len(set(sizes)) > 10


def test_without_power_a_rename_may_not_have_happened(disk):
    seen = set()
    for seed in range(20):
        broken = disk("none", seed=seed)
        target = written(broken, "target", b"old", True)
        source = written(broken, "source", b"new", True)
        broken.replace(source, target)
        broken.lose_power()
        seen.add(target.read_bytes())
    assert seen == {b"old", b"new"}


def test_a_rename_in_a_synced_directory_has_happened(disk):
    for seed in range(20):
        broken = disk("none", seed=seed)
        target = written(broken, "target", b"old", True)
        broken.replace(written(broken, "source", b"new", True), target)
        handle = os.open(broken.folder, os.O_RDONLY)
        broken.fsync(handle)
        os.close(handle)
        broken.lose_power()
        assert target.read_bytes() == b"new"


@pytest.mark.parametrize(("kind", "number"), [("full", errno.ENOSPC), ("broken", errno.EIO)])
def test_a_disk_that_takes_no_more_takes_half_of_it_and_then_nothing(disk, kind, number):
    broken = disk(kind, at=2)
    written(broken, "first", b"abcd", False)
    for name, left in (("second", b"ab"), ("third", b"")):
        with pytest.raises(OSError, match=os.strerror(number)) as refused:
            written(broken, name, b"abcd", False)
        assert refused.value.errno == number
        assert (broken.folder / name).read_bytes() == left
    with pytest.raises(OSError, match=os.strerror(number)):
        broken.replace(broken.folder / "first", broken.folder / "other")
    broken.unlink(broken.folder / "second")
    assert sorted(path.name for path in broken.folder.iterdir()) == ["first", "third"]


def test_short_writes_are_finished_by_whoever_writes(disk):
    assert written(disk("short"), "long", bytes(range(256)) * 20, False).read_bytes() == bytes(range(256)) * 20


def test_files_elsewhere_are_left_alone(disk, tmp_path):
    broken = disk("full", at=1)
    with broken.open(tmp_path / "outside", "wb") as file:
        file.write(b"abcd")
    assert (tmp_path / "outside").read_bytes() == b"abcd"
    assert broken.count == 0
