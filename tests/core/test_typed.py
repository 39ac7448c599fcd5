"""Plain data becomes typed values strictly; every error names the place, and nothing but a TypedError comes out."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings, strategies as st

from fedme.core.serialization import pack
from fedme.core.typed import TypedError, build, nearest
from fedme.learning.training_settings import Training
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fml import FML


@dataclass(frozen=True)
class Inner:
    width: int
    rate: float = 0.5
    size: Literal["small", "large"] = "small"


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=lambda: Inner(1))
    rows: Sequence[Inner] = ()
    table: Mapping[str, Inner] = field(default_factory=dict)
    steps: int | None = None
    counter: int = field(default=0, init=False)


@dataclass(frozen=True)
class Positive:
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: must be >= 1, got {self.size}")


@dataclass(frozen=True)
class Holder:
    box: Positive
    extra: Positive | None = None


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Any, {"a": [1]}, {"a": [1]}),
        (None, None, None),
        (type(None), None, None),
        (bool, True, True),
        (int, 3, 3),
        (float, 2.5, 2.5),
        (float, 3, 3.0),
        (str, "x", "x"),
        (Literal["a", "b"], "b", "b"),
        (int | None, None, None),
        (int | None, "none", None),
        (int | str, "none", "none"),
        (str | None, "none", "none"),
        (float | tuple[float, float], 1, 1.0),
        (float | tuple[float, float], [1, 2], (1.0, 2.0)),
        (int | float, 1, 1),
        (tuple[int, ...], [], ()),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple[int, str], (1, "a"), (1, "a")),
        (list[int], (1, 2), [1, 2]),
        (Sequence[float], [1, 2], [1.0, 2.0]),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Mapping[int, int], {"0": 1, "-15": 2, 7: 3}, {0: 1, -15: 2, 7: 3}),
        (Mapping[str, Mapping[str, float]], {"a": {"b": 1}}, {"a": {"b": 1.0}}),
        (Inner, {"width": 2}, Inner(2)),
        (Inner, {"width": 2, "rate": 1, "size": "large"}, Inner(2, 1.0, "large")),
        (
            Outer,
            {"name": "o", "inner": {"width": 2}, "rows": [{"width": 3}], "table": {"t": {"width": 4}}, "steps": "none"},
            Outer("o", Inner(2), [Inner(3)], {"t": Inner(4)}),
        ),
        (Inner | Positive, {"size": 3}, Positive(3)),
    ],
)
def test_what_fits(annotation, value, expected):
    built = build(annotation, value)
    assert built == expected
    assert type(built) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (bool, 1, "here: must be true or false, got 1"),
        (int, True, "here: must be an integer, got true"),
        (int, 1.0, "here: must be an integer, got 1.0"),
        (int, "1", "here: must be an integer, got '1'"),
        (float, True, "here: must be a number, got true"),
        (float, "0.1", "here: must be a number, got '0.1'"),
        (str, 5, "here: must be a string, got 5"),
        (str, None, "here: must be a string, got None"),
        (None, 5, "here: must be none, got 5"),
        (Literal["mae", "kl"], "mea", "here: must be one of mae, kl, got 'mea'; did you mean 'mae'?"),
        (Literal["mae", "kl"], 7, "here: must be one of mae, kl, got 7"),
        (int | None, "x", "here: must be an integer or none, got 'x'"),
        (int | Mapping[int, int], {"0": "x"}, "here.0: must be an integer, got 'x'"),
        (float | tuple[float, float], [1.0, "x"], "here[1]: must be a number, got 'x'"),
        (float | tuple[float, float], [1.0], "here: must be a number, got [1.0] or must have 2 values, got 1"),
        (tuple[int, int], [1], "here: must have 2 values, got 1"),
        (tuple[int, int], 1, "here: must be a list, got 1"),
        (tuple[int, ...], [1, "x"], "here[1]: must be an integer, got 'x'"),
        (list[int], "abc", "here: must be a list, got 'abc'"),
        (list[Inner], [{"width": 1}, {"width": "x"}], "here[1].width: must be an integer, got 'x'"),
        (Mapping[str, int], [1], "here: must be a table, got [1]"),
        (Mapping[str, int], {"a": "x"}, "here.a: must be an integer, got 'x'"),
        (Mapping[str, int], {1: 1}, "here: must be a string, got 1"),
        (Mapping[int, int], {"a": 1}, "here.a: this key must be an integer"),
        (Mapping[int, int], {"-": 1}, "here.-: this key must be an integer"),
        (Mapping[int, int], {"1.5": 1}, "here.1.5: this key must be an integer"),
        (Mapping[int, int], {True: 1}, "here: must be an integer, got true"),
        (Inner, [1], "here: must be a table, got [1]"),
        (Inner, {}, "here.width: is missing"),
        (Inner, {"width": 1, "rat": 2}, "here.rat: unknown key; did you mean 'rate'?"),
        (Inner, {"width": 1, "zzz": 2}, "here.zzz: unknown key; known: width, rate, size"),
        (Inner, {"width": 1, 5: 2}, "here.5: unknown key; known: width, rate, size"),
        (Outer, {"name": "o", "counter": 2}, "here.counter: unknown key"),
        (
            Outer,
            {"name": "o", "table": {"t": {"width": 1, "size": "larg"}}},
            "here.table.t.size: must be one of small, large, got 'larg'",
        ),
        (Outer, {"name": "o", "rows": [{"width": True}]}, "here.rows[0].width: must be an integer, got true"),
        (Holder, {"box": {"size": 0}}, "here.box.size: must be >= 1, got 0"),
        (Holder, {"box": {"size": 1}, "extra": {"size": 0}}, "here.extra.size: must be >= 1, got 0"),
        (Positive, {"size": 0}, "here.size: must be >= 1, got 0"),
        (Training, {"lr": 0}, "here.lr: must be"),
        (set[int], [1], "here: unsupported type set"),
        (list, [1], "here: unsupported type list"),
        (object, 1, "here: unsupported type object"),
    ],
)
def test_what_does_not_fit_is_refused_by_place(annotation, value, message):
    with pytest.raises(TypedError, match="^" + re.escape(message)):
        build(annotation, value, "here")


def test_at_the_top_there_is_no_place_to_name():
    with pytest.raises(TypedError, match="^must be an integer"):
        build(int, "x")
    with pytest.raises(TypedError, match=r"^width: is missing$") as raised:
        build(Inner, {})
    assert raised.value.at == "width"
    with pytest.raises(TypedError, match=r"^lr: must be"):
        build(Training, {"lr": 0.0})


def test_long_values_are_shortened_in_errors():
    with pytest.raises(TypedError) as raised:
        build(int, "x" * 500)
    assert str(raised.value) == "must be an integer, got '" + "x" * 36 + "..."


def test_an_error_that_is_no_check_of_the_class_is_not_hidden():
    @dataclass
    class Broken:
        size: int

        def __post_init__(self) -> None:
            raise ZeroDivisionError("a programming mistake")

    with pytest.raises(ZeroDivisionError):
        build(Broken, {"size": 1})


def test_an_inner_error_keeps_its_place():
    @dataclass
    class Checked:
        size: int

        def __post_init__(self) -> None:
            raise TypedError("size", "is odd")

    with pytest.raises(TypedError, match=r"^size: is odd$"):
        build(Checked, {"size": 1}, "here")


def test_a_leaf_takes_over_additional_types_anywhere():
    def leaf(annotation, value, at):
        return f"{at}={value}" if annotation is complex else NotImplemented

    assert build(complex, 1, "top", leaf) == "top=1"
    assert build(list[complex], [1, 2], "", leaf) == ["[0]=1", "[1]=2"]
    assert build(dict[str, complex | None], {"a": 1}, "d", leaf) == {"a": "d.a=1"}
    assert build(tuple[int, complex], [1, 2], "t", leaf) == (1, "t[1]=2")


def test_nearest_suggests_one_word_or_lists_all():
    assert nearest("fedvag", ["fedavg", "local"]) == "; did you mean 'fedavg'?"
    assert nearest("zzz", ["fedavg", "local"]) == "; known: fedavg, local"
    assert nearest("zzz", []) == ""
    assert nearest("lcl", iter(["local"])) == "; did you mean 'local'?"


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        pytest.param(Mapping[int, int], {"--5": 1}),
        pytest.param(Mapping[int, int], {"9" * 5000: 1}),
        pytest.param(Mapping[int, int], {"1": 1, "01": 2}),  # two keys that mean one: the first would be lost
        pytest.param(float, 10**400),
        pytest.param(Literal[1, 2], True),
        pytest.param(Literal[True], 1),
    ],
    ids=["two signs", "endless key", "key given twice", "endless number", "true is not 1", "1 is not true"],
)
def test_odd_values_are_refused(annotation, value):
    with pytest.raises(TypedError):
        build(annotation, value, "here")


ANNOTATIONS = [
    Inner,
    Outer,
    Holder,
    Training,
    FedMe,
    FML,
    Mapping[int, int],
    Mapping[str, Outer],
    tuple[int, float],
    list[Inner | None],
    int | Mapping[int, int],
    Literal["a", 1],
    float | tuple[float, float] | None,
]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["none", "small", "-3"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["width", "rate", "name", "inner", "rows", "table", "box", "extra", "size", "lr", "train"])
            | st.text(max_size=3)
            | st.integers(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(PLAIN)
def test_any_plain_data_gives_a_value_or_a_typed_error(value):
    for annotation in ANNOTATIONS:
        try:
            built = build(annotation, value, "here")
        except TypedError as error:
            assert str(error).startswith("here")
        else:
            if dataclasses.is_dataclass(annotation):
                assert isinstance(built, annotation)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Training)]), PLAIN, max_size=3), PLAIN)
def test_damaged_settings_give_a_value_or_a_typed_error(fields, clusters):
    for value in (fields, {"train": fields}, {"train": fields, "clusters": clusters}):
        for annotation in (Training, FedMe):
            try:
                built = build(annotation, value, "here")
            except TypedError as error:
                assert str(error).startswith("here")
            else:
                assert isinstance(built, annotation)


NUMBER = st.floats(allow_nan=False)
INNERS = st.builds(Inner, st.integers(), NUMBER, st.sampled_from(["small", "large"]))
OUTERS = st.builds(
    lambda name, inner, rows, table, steps: Outer(name, inner, rows, table, steps),
    st.text(),
    INNERS,
    st.lists(INNERS, max_size=3),
    st.dictionaries(st.text(), INNERS, max_size=3),
    st.none() | st.integers(),
)
TRAININGS = st.builds(
    Training,
    epochs=st.integers(1, 9),
    steps=st.none() | st.integers(1, 9),
    lr=st.floats(1e-6, 10),
    clip=st.none() | st.floats(1e-3, 100),
    lr_schedule=st.just("step"),
    lr_decay_at=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3).map(tuple),
    cohort=st.none() | st.integers(1, 9),
)
FEDMES = st.builds(
    FedMe,
    train=TRAININGS,
    clusters=st.integers(1, 9) | st.dictionaries(st.integers(0, 99), st.integers(1, 9), max_size=3),
    adopt=st.sampled_from(["loss", "accuracy", "loss+size"]),
    adopt_by=st.dictionaries(st.text(), st.sampled_from(["loss", "size"]), max_size=2),
)
FMLS = st.builds(
    FML,
    train=TRAININGS,
    alpha=st.floats(0, 1) | st.tuples(st.floats(0, 1), st.floats(0, 1)),
    shared=st.text(),
    loss=st.sampled_from(["convex", "sum"]),
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(INNERS | OUTERS | TRAININGS | FEDMES | FMLS)
def test_a_value_as_plain_data_builds_the_same_value(value):
    plain = pack(value, {})
    plain.pop("counter", None)  # not an argument of its class
    assert build(type(value), plain) == value


def test_numbers_that_are_not_finite_pass_as_numbers():
    assert build(float, math.inf) == math.inf
    assert math.isnan(build(float, math.nan))
