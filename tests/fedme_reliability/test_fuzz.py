"""A few hundred damaged inputs of every family; `make fuzz` tries more than ten thousand."""

import json
import random

import pytest

from fedme.core.atomic_files import RunError
from fedme_reliability import fuzz, mutate

CASES = {"config": 60, "data": 120, "run": 96, "message": 60, "site": 30}


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_damaged_inputs_are_refused_or_valid(family):
    tally = fuzz.fuzz(family, CASES[family])
    assert not tally.problems
    assert tally.tried == CASES[family]
    assert tally.refused > tally.tried / 4, "the damage is not worth the name"


def target(path, act):
    path.write_text("{}")
    return fuzz.Target("mine", path, act)


def tried(path, act):
    tally = fuzz.Tally()
    fuzz.attempt(target(path, act), b"{}", 0, tally)
    assert path.read_bytes() == b"{}", "the original is put back"
    return tally.problems


def test_the_fuzzer_notices_what_it_is_looking_for(tmp_path, monkeypatch):
    path = tmp_path / "file.json"

    def fails(error):
        def act():
            raise error

        return act

    assert tried(path, lambda: None) == []
    assert tried(path, fails(RunError(f"{path}: damaged"))) == []
    assert "KeyError" in tried(path, fails(KeyError("x")))[0]
    assert "does not name the file" in tried(path, fails(RunError("damaged")))[0]
    assert "says nothing" in tried(path, fails(RunError("")))[0]
    assert "believed" in tried(path, lambda: fuzz.believe(False, "too good"))[0]
    monkeypatch.setattr(fuzz, "SECONDS", 1)

    def forever():
        while True:
            pass

    assert tried(path, forever) == ["mine #0: hangs"]


def test_damage_is_the_same_every_time_and_hits_every_place():
    plain = {"a": [1, 2, {"b": "c"}], "d": 1.5, "e": None}
    data = json.dumps(plain).encode()
    assert [mutate.of_json(data, random.Random(i)) for i in range(50)] == [
        mutate.of_json(data, random.Random(i)) for i in range(50)
    ]
    assert len({mutate.of_json(data, random.Random(i)) for i in range(200)}) > 100
    assert set(mutate.places(plain)) == {("a",), ("a", 0), ("a", 1), ("a", 2), ("a", 2, "b"), ("d",), ("e",)}
