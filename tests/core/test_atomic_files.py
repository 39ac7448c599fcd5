"""JSON files that can be read back, and files that are put on disk together: all of them, or none."""

import json
import math

import pytest

from fedme.core.atomic_files import finite, together, write_json, write_text


@pytest.mark.parametrize(
    "value",
    [
        {}, [], {"a": {}, "b": []}, {"é\n": "ü\u2028", "n": None, "t": True, "f": 1e-300}, [[1, 2], [], [{"a": [1.5, None]}]],
        {"long": [0.1] * 1000, "mixed": [1, "a", {"b": (1, 2)}], "nested": [["0", "Linear", {"bias": True}]]},
    ],
)  # fmt: skip
def test_json_comes_back(value, tmp_path):
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(value))


def test_a_list_of_numbers_is_one_line(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, 2], "b": [{"c": 3}]})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": [1, 2],\n  "b": [\n    {\n      "c": 3\n    }\n  ]\n}\n'


def test_numbers_that_json_cannot_represent_become_null():
    nan, inf, huge = math.nan, math.inf, 1.7e308
    assert finite([1.0, nan, -inf]) == [1.0, None, None]
    assert finite([inf, -inf, huge]) == [None, None, huge]
    assert finite([huge, huge, -huge]) == [huge, huge, -huge]  # finite, though their sum is not
    assert finite({1: (nan, "a"), "b": {"c": [[inf], 2]}}) == {"1": [None, "a"], "b": {"c": [[None], 2]}}


def test_files_appear_at_the_end(tmp_path):
    (tmp_path / "a").write_text("before")
    with together():
        write_text(tmp_path / "a", "1")
        write_text(tmp_path / "b", "2")
        write_text(tmp_path / "b", "3")
        assert (tmp_path / "a").read_text() == "before"
        assert not (tmp_path / "b").exists()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "1", "b": "3"}
    write_text(tmp_path / "a", "4")
    assert (tmp_path / "a").read_text() == "4"


def test_a_failure_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "a").write_text("before")

    def fail():
        with together():
            write_text(tmp_path / "a", "1")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}


def test_all_files_are_on_disk_before_the_first_is_replaced(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("fedme.core.atomic_files._sync", lambda path: events.append(("sync", path.name)))
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, target: events.append(("replace", target.name)))
    with together():
        for name in ("a", "b"):
            write_text(tmp_path / name, "1")
    assert sorted(events[:2]) == [("sync", ".a.partial"), ("sync", ".b.partial")]
    assert events[2:] == [("replace", "a"), ("replace", "b"), ("sync", tmp_path.name)]
