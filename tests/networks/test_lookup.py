"""What a user writes becomes an architecture, or an error that says what to write instead."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedme.core.data import Schema
from fedme.core.key import Key
from fedme.networks import ARCHS, ArchError, arch, check, describe, register


def task(*shape: int, classes: int = 10, vocabulary: int | None = None) -> Schema:
    return Schema(shape, tuple(str(label) for label in range(classes)), {}, vocabulary)


IMAGES = task(1, 28, 28)
VECTORS = task(6, classes=3)
TEXT = task(5, classes=3, vocabulary=9)
NETS = "fedme_test_user_networks"


@pytest.fixture(autouse=True)
def _users_code_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    before = dict(ARCHS)
    yield
    ARCHS.clear()
    ARCHS.update(before)
    sys.modules.pop(NETS, None)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("dnn-64", "dnn-64"),
        ({"name": "dnn-64-32"}, "dnn-64-32"),
        ({"name": "cnn-2", "width": 0.25}, "cnn-2(width=0.25)"),
        ({"name": "cnn-2", "width": 2}, "cnn-2(width=2.0)"),
        ({"name": "cnn-2", "width": 1, "conv_relu": True}, "cnn-2"),
        ({"name": "cnn-2", "width": 0.5, "conv_relu": False}, "cnn-2(conv_relu=False, width=0.5)"),
        ({"name": "cnn-2(width=0.25)", "conv_relu": False}, "cnn-2(conv_relu=False, width=0.25)"),
        ("cnn-1-linear(width=0.5)", "cnn-1-linear(width=0.5)"),
        (" mlr ", "mlr"),
    ],
)
def test_the_name_is_the_spec_and_what_is_not_default(spec: str | Mapping[str, Any], name: str) -> None:
    assert arch(spec, IMAGES).name == name


@pytest.mark.parametrize("classes", [10, 2])
@pytest.mark.parametrize("spec", ["mlr", "dnn-16", "cnn-1(width=0.1)", {"name": f"{NETS}:Gated", "width": 3}, f"{NETS}:Fixed"])
def test_a_name_reads_back_as_the_same_architecture(spec: str | Mapping[str, Any], classes: int) -> None:
    first = arch(spec, IMAGES, classes)
    again = arch(first.name, IMAGES, classes)
    assert again == first
    assert hash(again) == hash(first)
    assert arch(first.name, IMAGES) == first  # the name alone says how many classes


def test_another_number_of_classes_is_part_of_the_name() -> None:
    assert arch("dnn-8", IMAGES, 2).name == "dnn-8[classes=2]"
    assert arch("dnn-8", IMAGES, 10).name == "dnn-8"
    assert arch(f"{NETS}:Fixed", IMAGES, 2).name == f"{NETS}:Fixed"  # builds the same network for any number
    assert arch("cnn-1(width=0.1)", IMAGES, 2).name == "cnn-1(width=0.1)[classes=2]"
    check(arch("dnn-8[classes=2]", IMAGES), IMAGES, 2)
    with pytest.raises(ArchError, match="must have 5 classes, got 2"):
        arch("dnn-8[classes=2]", IMAGES, 5)
    with pytest.raises(ArchError, match="at least one class, got 0"):
        arch("dnn-8", IMAGES, 0)


def test_resolving_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    for spec in ("dnn-64", "vgg11"):
        check(arch({"name": spec, **({"width": 0.02} if spec == "vgg11" else {})}, task(3, 32, 32)), task(3, 32, 32))
    assert torch.equal(torch.get_rng_state(), before)


def test_resolving_is_quick_even_for_large_networks() -> None:
    program = """
import sys
from fedme.core.data import Schema
from fedme.networks import arch
arch("vgg19", Schema((3, 32, 32), ("a", "b")))
arch("lstm-4", Schema((80,), ("a", "b"), {}, 90))
assert "torch._dynamo" not in sys.modules, "torch's compiler takes a second to load"
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_a_users_network_is_given_what_its_signature_asks_for() -> None:
    gated = arch({"name": f"{NETS}:Gated", "width": 4}, VECTORS)
    assert gated.name == f"{NETS}:Gated(width=4)"
    assert dict(gated.options) == {"shape": (6,), "classes": 3, "width": 4}
    check(gated, VECTORS)
    assert arch({"name": f"{NETS}:Gated", "width": 8, "scale": 1}, VECTORS).name == f"{NETS}:Gated"
    assert dict(arch(f"{NETS}:Fixed", VECTORS).options) == {}
    assert dict(arch(f"{NETS}:Bag", TEXT).options) == {"vocabulary": 9, "classes": 3}
    check(arch(f"{NETS}:Bag", TEXT), TEXT)


def test_a_users_factory_may_take_any_option_and_lists_of_integers() -> None:
    check(arch({"name": f"{NETS}:anything", "outputs": 3}, VECTORS), VECTORS)
    listed = arch({"name": f"{NETS}:layers", "sizes": [6, 4, 3]}, VECTORS)
    assert listed.name == f"{NETS}:layers(sizes=(6, 4, 3))"
    assert arch(listed.name, VECTORS) == listed
    check(listed, VECTORS)


def test_inputs_of_several_tensors_are_checked_with_a_batch_of_them() -> None:
    two = arch(f"{NETS}:TwoInputs", VECTORS)
    check(two, VECTORS, inputs={"left": torch.zeros(2, 2), "right": torch.zeros(2, 3)})
    with pytest.raises(ArchError, match=r"fails on two samples of shape \{'left': \(2, 2\)\}: TypeError"):
        check(two, VECTORS, inputs={"left": torch.zeros(2, 2)})


def test_a_registered_name_works_like_a_built_in_one() -> None:
    def tiny(shape: tuple[int, ...], classes: int, bias: bool = True) -> nn.Module:
        return nn.Linear(shape[0], classes, bias)

    register("tiny", tiny, "one layer", "a test")
    register("tiny", tiny)
    recipe = arch({"name": "tiny", "bias": False}, VECTORS)
    assert recipe.name == "tiny(bias=False)"
    assert recipe.parameters == 18
    assert ("tiny", "one layer", "a test", "bias=True") in describe()
    with pytest.raises(ArchError, match="already registered as 'tiny'"):
        register("tiny", nn.Linear)
    with pytest.raises(ArchError, match="already registered as 'mlr'"):
        register("mlr", tiny)


@pytest.mark.parametrize("name", ["", "dnn-7", "a b", "a:b", "a(1)", "a[1]"])
def test_names_that_would_read_as_something_else_cannot_be_registered(name: str) -> None:
    with pytest.raises(ArchError, match="invalid architecture name"):
        register(name, nn.Linear)


@pytest.mark.parametrize(
    ("spec", "schema", "message"),
    [
        ("cnn2", IMAGES, r"unknown architecture 'cnn2'\. Did you mean cnn-2 .*Available: mlr, dnn-<hidden>"),
        ("dnn", IMAGES, "Did you mean dnn-<hidden>"),
        ("dnn-<hidden>", IMAGES, "Did you mean dnn-<hidden>"),
        ("dnn-0", IMAGES, "unknown architecture 'dnn-0'"),
        ("xyzzy", IMAGES, r"unknown architecture 'xyzzy'\. Available: mlr"),
        ("mypkg.nets.Net", IMAGES, "import path of a user-defined network, 'module:Name'"),
        ("cnn-2(", IMAGES, "invalid architecture"),
        ("", IMAGES, "invalid architecture"),
        ("cnn-2(0.25)", IMAGES, "invalid options"),
        ("cnn-2(width=print())", IMAGES, "invalid options"),
        ({"width": 0.5}, IMAGES, "an architecture needs a name"),
        (
            {"name": "cnn-1", "widht": 0.5},
            IMAGES,
            "'widht' is not an option of architecture 'cnn-1'; its options: conv_relu, width",
        ),
        ({"name": "cnn-1-linear", "conv_relu": True}, IMAGES, "'conv_relu' is not an option .* its options: width"),
        ({"name": "mlr", "classes": 3}, IMAGES, "'classes' is set by the task .*its options: none"),
        (
            {"name": "cnn-1", "width": "wide"},
            IMAGES,
            "'width' of architecture 'cnn-1' must be of type float, got 'wide'",
        ),
        ({"name": "cnn-1", "conv_relu": 1}, IMAGES, "must be of type bool, got 1"),
        ({"name": "cnn-1", "width": {}}, IMAGES, "must be a number, a string, true, false or a list of integers"),
        ({"name": "cnn-1", "width": -1.0}, IMAGES, r"architecture 'cnn-1\(width=-1\.0\)' needs width > 0"),
        ({"name": "fml-cnn2", "channels": 0}, IMAGES, "needs channels > 0, got 0"),
        ({"name": "dnn-8", "dropout": 1.0}, IMAGES, "needs 0 <= dropout < 1"),
        ("vgg11", task(1, 8, 8), r"'vgg11' needs images .*at least 32 x 32, got \(1, 8, 8\)"),
        ("cnn-4", task(1, 9, 28), r"'cnn-4' needs images .*at least 10 x 10"),
        ("cnn-small", task(64), r"needs images of shape \(channels, height, width\).* got \(64,\)"),
        ("lenet5", task(28, 28), "needs images of shape"),
        ("lstm-1", task(80), "'lstm-1' needs sequences of symbols, but the inputs have no vocabulary"),
        ("lstm-1", task(8, 10, vocabulary=9), r"'lstm-1' needs sequences of symbols of shape \(length,\)"),
        ("mlr", TEXT, "'mlr' takes numbers, but the inputs are symbols"),
        ("no_such_package.nets:Net", IMAGES, "cannot import the module 'no_such_package.nets': ModuleNotFoundError"),
        (f"{NETS}:Gate", IMAGES, f"module '{NETS}' has no 'Gate'; did you mean Gated"),
        (f"{NETS}:", IMAGES, f"module '{NETS}' has no ''"),
        (f"{NETS}:number", IMAGES, "must be an nn.Module class or a function that returns one, got int"),
        (f"{NETS}:NotANetwork", IMAGES, "got the class NotANetwork"),
        (f"{NETS}:Bag", IMAGES, "needs sequences of symbols"),
        (f"{NETS}:anything.inner", IMAGES, "has no 'anything.inner'"),
        (f"{NETS}:layers", IMAGES, "needs a value for its option 'sizes'"),
        (f"{NETS}:needs_more(width=3)", IMAGES, "'width' is not an option"),
        (f"{NETS}:needs_more", IMAGES, "needs a value for its option 'width'"),
    ],
)
def test_errors_say_what_is_wrong_and_what_would_do(spec: Any, schema: Schema, message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch(spec, schema)


def test_code_that_fails_on_import_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_nets.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArchError, match="cannot import the module 'broken_nets': RuntimeError: no licence"):
        arch("broken_nets:Net", IMAGES)


def test_names_from_elsewhere_never_import() -> None:
    with pytest.raises(ArchError, match="only in a local configuration"):
        arch(f"{NETS}:Fixed", VECTORS, imports=False)
    assert NETS not in sys.modules
    assert arch("dnn-8", VECTORS, imports=False).name == "dnn-8"


@pytest.mark.parametrize(
    ("spec", "classes", "message"),
    [
        (
            f"{NETS}:Fixed",
            4,
            rf"'{NETS}:Fixed' must return shape \(2, 4\), .* for inputs of shape \(2, 6\), got \(2, 3\)",
        ),
        (f"{NETS}:no_module", 3, "must return an nn.Module, got dict"),
        (f"{NETS}:two_results", 3, r"must return a tensor.*two samples by 3 classes, got tuple"),
        (f"{NETS}:choice", 3, "must return floating-point logits, got torch.int64"),
        (f"{NETS}:breaks(depth=2)", 3, "cannot be built: KeyError: 'no weights for depth 2'"),
        ("torch.nn:Linear(in_features=5, out_features=3)", 3, r"fails on two samples of shape \(2, 6\): RuntimeError"),
    ],
)
def test_check_finds_networks_that_do_not_fit(spec: str, classes: int, message: str) -> None:
    with pytest.raises(ArchError, match=message):
        check(arch(spec, VECTORS), VECTORS, classes)


def test_a_network_of_one_type_is_refused_with_another() -> None:
    check(arch(f"{NETS}:Gated", VECTORS), VECTORS, dtype=torch.float64)
    single = arch(f"{NETS}:SinglePrecision", VECTORS)
    check(single, VECTORS)
    with pytest.raises(
        ArchError, match=r"SinglePrecision' fails with engine.dtype = 'float64': RuntimeError: .*Double.*x.dtype"
    ):
        check(single, VECTORS, dtype=torch.float64)


def test_the_list_describes_every_architecture_in_one_line() -> None:
    listed = describe()
    assert [row.name for row in listed] == list(ARCHS)
    assert all(row.about and row.source and "\n" not in row.about for row in listed)
    assert next(row.options for row in listed if row.name == "cnn-3") == "conv_relu=True, width=1.0"
    assert next(row.options for row in listed if row.name == "dnn-<hidden>") == "dropout=0.0"


def test_a_resolved_architecture_builds_reproducibly() -> None:
    first, again = (arch("dnn-8", VECTORS).build(Key(4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
