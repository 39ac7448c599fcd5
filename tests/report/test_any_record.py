"""Whatever a line of metrics.jsonl says, there is a report, and it says what it could not use."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fedme import report
from fedme.results import records, summary

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=30)
    | st.just("\ud800\u202e\x1b[2J"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)
NOTES = ["cluster", "lender", "adopts", "own", "guest", "missing", "malicious", "\u202enote"]


@pytest.fixture(scope="module")
def copies(runs, tmp_path_factory):
    """A finished run, and one that is not, each with its lines."""
    home = tmp_path_factory.mktemp("any")
    made = []
    for name in ("finished", "unfinished"):
        folder = shutil.copytree(runs[0], home / name)
        if name == "unfinished":
            (folder / summary.NAME).unlink()
        made.append((folder, (folder / records.NAME).read_bytes().splitlines(keepends=True)))
    return made


def written(folder):
    target = folder / "report.html"
    report.write([folder], target)
    return target.read_text()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
def test_any_value_in_any_field_gives_a_page(data, copies):
    folder, lines = data.draw(st.sampled_from(copies))
    number = data.draw(st.integers(0, len(lines) - 1))
    row = json.loads(lines[number])
    field = data.draw(st.sampled_from([*row, "epsilon", "extra", "notes"]))
    value = data.draw(JSON)
    if field == "notes" and data.draw(st.booleans()):
        value = {**row.get("notes", {}), **data.draw(st.dictionaries(st.sampled_from(NOTES), JSON, min_size=1, max_size=3))}
    row[field] = value
    line = json.dumps(row).encode() + b"\n"
    (folder / records.NAME).write_bytes(b"".join([*lines[:number], line, *lines[number + 1 :]]))
    assert "<html" in written(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"round": ', "line 1: "),
        ("[1]", "line 1: not a table"),
        ('"' + "x" * 1000 + '"', "line 1: not a table"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_the_page_says_what_it_could_not_use(line, said, copies):
    for folder, lines in copies:
        (folder / records.NAME).write_bytes(b"".join([line.encode() + b"\n", *lines]))
        page = written(folder)
        assert "Left out of this report, because it cannot be used" in page
        assert said in page
        (folder / records.NAME).write_bytes(b"".join(lines))
        assert "Left out of this report" not in written(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"notes": {"cluster": "text from a site"}}, "the note 'cluster' has an unusable value"),
        ({"notes": {"adopts": True}}, "the note 'adopts' names no lender"),
        ({"round": 10**15}, "'round' must be at most 3"),
        ({"client": "nobody"}, "'client' is not one of the run: nobody"),
        ({"loss": 1e308}, "'loss' must be at most 1e+100"),
        ({"samples": -1}, "a count must be"),
    ],
)
def test_a_value_that_is_wrong_is_named(change, said, copies):
    for folder, lines in copies:
        row = json.loads(lines[0]) | change
        (folder / records.NAME).write_bytes(b"".join([*lines, json.dumps(row).encode() + b"\n"]))
        assert said in written(folder)
