"""Following a run in the terminal."""

import io
import json
import shutil
import threading
import time

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from fedme.core.atomic_files import RunError
from fedme.report.terminal_plot import plot
from fedme.report.watch import FollowedRun, watch
from fedme.results import records


def console(terminal=False):
    return Console(file=io.StringIO(), width=120, force_terminal=terminal)


def test_once_draws_curves_and_the_last_numbers(runs):
    out = console()
    watch(runs[0], out, 1.0, once=True)
    output = out.file.getvalue()
    assert "digits-fedme: fedme, seed 0, finished" in output
    assert "validation accuracy %" in output
    assert "training loss" in output
    assert any("\u2801" <= letter <= "\u28ff" for letter in output)
    last = [
        r["accuracy"]
        for r in records.read(runs[0])
        if (r["round"], r["model"], r["split"], r["stage"]) == (3, "personal", "test", "round")
    ]
    assert f"test accuracy % {100 * sum(last) / len(last):.4g}" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_it_follows_a_run_to_its_end(runs, tmp_path, terminal):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    rest = (folder / records.NAME).read_bytes()
    (folder / records.NAME).write_bytes(b"")
    done = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()

    def go_on():
        with (folder / records.NAME).open("ab", buffering=0) as file:
            for start in range(0, len(rest), 5000):  # complete rounds or not
                file.write(rest[start : start + 5000])
                time.sleep(0.01)
        (folder / "summary.json").write_bytes(done)

    writer = threading.Thread(target=go_on)
    writer.start()
    out = console(terminal)
    watch(folder, out, 0.02)
    writer.join()
    output = out.file.getvalue()
    assert "round 4/4" in output
    if not terminal:
        assert [line.split(":")[0] for line in output.splitlines()] == [f"round {t}/4" for t in (1, 2, 3, 4)]


@pytest.mark.parametrize("cut", [1, 700, 1500])
def test_a_round_that_was_read_in_two_pieces_is_one_round(runs, tmp_path, cut):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    content = (folder / records.NAME).read_bytes()
    immediately = FollowedRun(folder)
    immediately.update()
    (folder / records.NAME).write_bytes(content[:-cut])
    piecewise = FollowedRun(folder)
    piecewise.update()
    (folder / records.NAME).write_bytes(content)
    piecewise.update()
    assert piecewise.curves == immediately.curves
    assert piecewise.sent == immediately.sent


def test_rounds_that_are_computed_again_replace_the_old_ones(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    run = FollowedRun(folder)
    assert run.update()
    sent = dict(run.sent)
    assert not run.update()
    lines = (folder / records.NAME).read_text().splitlines(keepends=True)
    (folder / records.NAME).write_text("".join(line for line in lines if json.loads(line)["round"] < 2))
    assert run.update()
    assert run.sent == {t: sent[t] for t in (0, 1)}


def test_a_run_without_a_round_and_no_run_at_all(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    (folder / records.NAME).unlink()
    (folder / "summary.json").unlink()
    out = console()
    watch(folder, out, 1.0, once=True)
    assert "no round is finished yet" in out.file.getvalue()
    with pytest.raises(RunError, match="not a run directory"):
        watch(tmp_path, out, 1.0)


points = st.lists(st.tuples(st.integers(0, 50), st.floats(-1e6, 1e6)), min_size=1, max_size=20)


@given(points, st.integers(1, 200), st.integers(2, 20))
def test_a_plot_fits_its_place_whatever_is_drawn(line, width, height):
    rows = plot({"a": line}, width, height, 50).plain.splitlines()
    assert len(rows) == height + 3
    assert rows[-1].endswith("51")
    assert all(len(row) <= max(width, 24) for row in rows[1:])
    assert any("\u2801" <= letter <= "\u28ff" for letter in "".join(rows))


def test_lines_differ_without_colours():
    """Of two lines, the second one is dashed, and the legend says so."""
    first, second = ([(x, float(x + shift)) for x in range(50)] for shift in (0, 10))
    one, other = (plot({"a": first, "b": second} if both else {"b": second}, 80, 10, 49).plain for both in (True, False))
    assert one.splitlines()[0].split() == ["━━━", "a", "╍╍╍", "b"]

    def dots(text):
        return sum(bin(ord(letter) - 0x2800).count("1") for letter in text if "\u2801" <= letter <= "\u28ff")

    assert dots(one) < 2 * dots(other)
    assert one.splitlines()[-1].split() == ["round", "1", "50"]
