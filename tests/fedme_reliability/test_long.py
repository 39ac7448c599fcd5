"""A run that is looked at while it grows, in small; `make reliability` has 2,000 rounds."""

import io

import pytest
from rich.console import Console

from fedme.running.progress import Display
from fedme_reliability.frame import Row
from fedme_reliability.long import RUNS, Look, Watched, judged

QUIET = Display(Console(file=io.StringIO()), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_long_run_stays_as_it_is_and_can_be_read(name, tmp_path):
    watched = Watched(RUNS[name], 300, tmp_path, QUIET)
    found = list(judged(name, watched))
    assert [row for row in found if not row.kept] == []
    assert watched.reads > 10
    assert len(found) == 5


class Seen:
    """A run of eight rounds as it might have been."""

    rounds, reads, wrong = 8, 8, ()
    quarter = Watched.quarter

    def __init__(self, folder, looks):
        self.folder, self.looks = folder, looks
        self.ended = type("Ended", (), {"code": 0, "said": ""})
        (folder / "summary.json").write_text('{"rounds": 8}')
        (folder / "metrics.jsonl").write_text("{}\n")


@pytest.mark.parametrize(("grows", "what"), [(1, "memory"), (2, "open files"), (3, "files in the run directory")])
def test_whatever_grows_is_noticed(grows, what, tmp_path):
    steady = [Look(t, 100.0, 5, 9) for t in range(8)]
    assert all(row.kept for row in judged("fml", Seen(tmp_path, steady)))
    growing = [look._replace(**{Look._fields[grows]: look[grows] + 9 * look.round}) for look in steady]
    broken = [row.what for row in judged("fml", Seen(tmp_path, growing)) if not row.kept]
    assert len(broken) == 1
    assert what in broken[0]


def test_too_few_looks_prove_nothing(tmp_path):
    assert Row("fml: looked at often enough", 1, 0, "1 looks") in list(judged("fml", Seen(tmp_path, [Look(3, 100.0, 5, 9)])))
