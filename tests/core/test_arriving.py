"""Tables whose entries come one after another, and dataclasses that are quick to make."""

import dataclasses

import pytest

from fedme.core.arriving import Arriving
from fedme.core.value_class import value_class


def arriving(seen):
    def entries():
        for key in "abc":
            seen.append(key)
            yield key, key.upper()

    return Arriving(entries())


def test_an_entry_comes_when_it_is_read_and_the_others_later():
    seen = []
    table = arriving(seen)
    assert seen == []
    assert table["a"] == "A"
    assert seen == ["a"]
    assert "b" in table
    assert seen == ["a", "b"]
    assert len(table) == 3


@pytest.mark.parametrize("first", ["", "a", "b", "c"])
def test_all_entries_come_in_order_whatever_was_read_before(first):
    expected = {"a": "A", "b": "B", "c": "C"}
    for read in (dict, lambda table: dict(table.items()), lambda table: {key: table[key] for key in table}):
        table = arriving([])
        assert not first or first in table
        assert list(read(table).items()) == list(expected.items())
        assert list(read(table).items()) == list(expected.items())  # again
    assert arriving([]) == expected


def test_items_are_seen_as_they_come():
    seen = []
    assert [(key, list(seen)) for key, _ in arriving(seen).items()] == [("a", ["a"]), ("b", ["a", "b"]), ("c", ["a", "b", "c"])]


def test_a_key_that_does_not_come_is_missing():
    table = arriving([])
    with pytest.raises(KeyError, match="z"):
        table["z"]
    assert "z" not in table
    assert dict(table) == {"a": "A", "b": "B", "c": "C"}


def test_an_error_while_entries_come_is_raised_where_they_are_read():
    def entries():
        yield "a", 1
        raise KeyError("of b")

    table = Arriving(entries())
    assert table["a"] == 1
    for read in (lambda: table["b"], lambda: table.get("b"), lambda: len(table), lambda: dict(table), lambda: "b" in table):
        with pytest.raises(KeyError, match="of b"):
            read()
    assert table["a"] == 1


def test_several_readers_have_all_entries():
    table = arriving([])
    assert [(key, "c" in table) for key in table] == [("a", True), ("b", True), ("c", True)]
    table = arriving([])
    assert list(zip(table, table.values(), strict=True)) == [("a", "A"), ("b", "B"), ("c", "C")]
    table = arriving([])
    assert [(key, value, len(table)) for key, value in table.items()] == [("a", "A", 3), ("b", "B", 3), ("c", "C", 3)]
    assert (table.get("a"), table.get("z"), table.get("z", 1)) == ("A", None, 1)


def test_value_classes_are_dataclasses_with_equality_and_a_hash():
    @value_class
    class Pair:
        a: int
        b: str = "x"

    assert Pair(1) == Pair(1, "x") != Pair(2)
    assert hash(Pair(1)) == hash(Pair(1, "x"))
    assert dataclasses.replace(Pair(1), b="y") == Pair(1, "y")
    assert [field.name for field in dataclasses.fields(Pair)] == ["a", "b"]
