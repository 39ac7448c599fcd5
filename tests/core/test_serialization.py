"""What methods keep and send survives the trip to plain data and tensors; what is damaged is refused."""

import copy
import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.methods.fedme.fedme import Server
from fedme.methods.shared_model import SharedModel
from fedme_test_support import ARCHS, DENSE, LINEAR, NORMALISED, WIDE, clients, federate, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.05, momentum=0.9)


def equal(a: Any, b: Any) -> bool:
    """The same values of the same types, bit for bit."""
    if type(a) is not type(b) and not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Arch):
        return a == b
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if dataclasses.is_dataclass(a):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


class Listening(InProcessEngine):
    """Keeps every message."""

    def exchange(self, downs, when):
        self.heard = getattr(self, "heard", [])
        answers = super().exchange(downs, when)
        self.heard += [("down", down) for down in downs.values()] + [("up", answer.up) for answer in answers.values()]
        return answers


def kinds(method) -> dict[str, Any]:
    """The types a method declares for its states and messages."""
    hints = typing.get_type_hints(method.client_round)
    answer = typing.get_args(typing.get_args(hints["return"])[2])
    server = typing.get_type_hints(method.init_server)["return"]
    assert answer[0] == hints["state"]
    return {"server": server, "state": hints["state"], "down": hints["down"], "up": answer[1]}


@functools.cache
def played(name: str):
    """Every value of two rounds, with the type that it is declared to have."""
    method = METHODS[name](train=TRAIN)
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    archs = (DENSE, WIDE, NORMALISED) if mixed else (NORMALISED,) * 3
    setting = task(archs, shared=NORMALISED, public=8, unlabeled=split(6, Key(9)))
    root = Key(0)
    engine = Listening(method, setting, clients((5, 8, 1), public=8), root)
    server = method.init_server(setting, root.at("init"))
    values = [("server", server)]
    for t in range(2):
        server = run_round(method, setting, engine, server, t, 2, root).server
        values.append(("server", server))
    values += engine.heard + [("state", state) for state in engine.states.values()]
    values += [("down", method.deliver(setting, server, client)) for client in setting.members]
    declared = kinds(method)
    return [(declared[what], what, value) for what, value in values]


@pytest.mark.parametrize("name", METHODS)
def test_everything_a_method_keeps_or_sends_comes_back_bit_for_bit(name):
    values = played(name)
    assert {what for _, what, _ in values} == {"server", "state", "down", "up"}
    for kind, what, value in values:
        tensors: dict[str, Tensor] = {}
        plain = json.loads(json.dumps(pack(value, tensors, what)))
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
        assert equal(unpack(kind, plain, tensors, ARCHS, what), value)


@pytest.mark.parametrize("name", METHODS)
def test_all_states_of_a_run_share_one_table_of_tensors(name):
    tensors: dict[str, Tensor] = {}
    values = played(name)
    plain = [json.loads(json.dumps(pack(value, tensors, str(i)))) for i, (_, _, value) in enumerate(values)]
    assert len({id(tensor) for tensor in tensors.values()}) == len(tensors)
    for (kind, _, value), skeleton in zip(values, plain, strict=True):
        assert equal(unpack(kind, skeleton, tensors, ARCHS), value)


def test_the_declared_types_are_the_ones_that_occur():
    for name in METHODS:
        assert all(isinstance(value, kind) for kind, _, value in played(name))


def test_one_tensor_in_several_places_is_stored_once_and_named_by_its_first_place():
    model = Model.init(LINEAR, Key(0))
    tensors: dict[str, Tensor] = {}
    plain = pack(Server({"a": model, "b": model}), tensors, "server")
    assert list(tensors) == ["server/models/a/params/0.weight", "server/models/a/params/0.bias"]
    assert plain["models"]["a"] == plain["models"]["b"]
    back = unpack(Server, plain, tensors, ARCHS)
    assert back.models["a"].params["0.weight"] is back.models["b"].params["0.weight"]
    equal_but_another = Model.init(LINEAR, Key(0))
    assert len(tensors) == 2
    pack(SharedModel(equal_but_another), tensors, "again")
    assert len(tensors) == 4
    pack(SharedModel(model), tensors, "known")  # found in a table that was filled before
    assert len(tensors) == 4


def test_names_of_places_never_meet():
    value = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)}  # clients may be called anything
    tensors: dict[str, Tensor] = {}
    plain = pack(value, tensors)
    assert len(tensors) == 2
    assert unpack(dict[str, dict[str, Tensor] | Tensor], plain, tensors, {}) == value


def skeleton() -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return pack(SharedModel(Model.init(NORMALISED, Key(0))), tensors, "s"), tensors


def test_an_unknown_architecture_is_refused_by_name():
    plain, tensors = skeleton()
    with pytest.raises(TypedError, match=r"^s\.model\.arch: unknown architecture 'normalised'; known: linear$"):
        unpack(SharedModel, plain, tensors, {"linear": LINEAR}, "s")


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        None,
        True,
        pytest.param(["normalised"]),
        pytest.param({}),
    ],
)
def test_what_is_no_name_is_no_architecture(wrong):
    plain, tensors = skeleton()
    plain["model"]["arch"] = wrong
    with pytest.raises(TypedError, match=r"^s\.model\.arch: "):
        unpack(SharedModel, plain, tensors, ARCHS, "s")


@pytest.mark.parametrize("wrong", ["s/nothing", 5, None, ["s/model/params/0.weight"]])
def test_a_missing_tensor_is_refused_by_place(wrong):
    plain, tensors = skeleton()
    plain["model"]["params"]["0.weight"] = wrong
    with pytest.raises(TypedError, match=r"^s\.model\.params\.0\.weight: names a tensor that is not there"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")
    plain, tensors = skeleton()
    del tensors["s/model/buffers/1.running_mean"]
    with pytest.raises(TypedError, match=r"^s\.model\.buffers\.1\.running_mean: .*'s/model/buffers/1.running_mean'"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")


def test_weights_of_another_network_are_refused_by_name():
    plain, tensors = skeleton()
    tensors["s/model/params/0.weight"] = torch.zeros(6, 4)
    with pytest.raises(
        TypedError, match=r"^s\.model\.0\.weight: does not fit normalised: shape \(6, 3\) expected, shape \(6, 4\) given$"
    ):
        unpack(SharedModel, plain, tensors, ARCHS, "s")
    plain, tensors = skeleton()
    del plain["model"]["params"]["3.bias"]
    with pytest.raises(TypedError, match=r"^s\.model\.3\.bias: does not fit normalised: shape \(4,\) expected, nothing given$"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")
    plain, tensors = skeleton()
    plain["model"]["buffers"]["more"] = "s/model/params/0.weight"
    with pytest.raises(TypedError, match=r"^s\.model\.more: does not fit normalised: nothing expected"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")
    plain, tensors = skeleton()
    plain["model"]["arch"] = "linear"
    with pytest.raises(TypedError, match="does not fit linear"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")


def test_a_weight_among_the_buffers_is_refused():
    plain, tensors = skeleton()
    plain["model"]["buffers"]["0.weight"] = plain["model"]["params"].pop("0.weight")  # it would never be trained again
    with pytest.raises(TypedError, match=r"0\.weight"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")


def test_weights_that_are_no_numbers_with_a_fraction_are_refused():
    plain, tensors = skeleton()
    tensors["s/model/params/0.weight"] = torch.zeros(6, 3, dtype=torch.int64)
    with pytest.raises(TypedError, match=r"0\.weight"):
        unpack(SharedModel, plain, tensors, ARCHS, "s")


def test_what_cannot_be_written_is_refused_by_place():
    @dataclass
    class Odd:
        what: Any

    with pytest.raises(TypeError, match=r"^s/what/0: cannot be written \(a complex\)$"):
        pack(Odd([1j]), {}, "s")


def places(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of nested plain data."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


# Lists and tables as the name of an architecture are tried above, by themselves.
JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["none", "linear"])
NESTED = JUNK | st.lists(JUNK, max_size=3) | st.dictionaries(st.text(max_size=3), JUNK, max_size=3)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.data())
def test_damaged_skeletons_give_a_typed_error_or_a_value_of_the_type(data):
    kind, what, value = data.draw(st.sampled_from([entry for name in METHODS for entry in played(name)[-6:]]))
    tensors: dict[str, Tensor] = {}
    plain = {"top": copy.deepcopy(pack(value, tensors, what))}
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from([place for place in places(plain) if place]))
        parent = functools.reduce(lambda inner, key: inner[key], path, plain)
        change = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "remove" and path:
            parent.pop(last)
        elif change == "add" and isinstance(parent, dict) and path:
            parent[data.draw(st.text(max_size=3))] = data.draw(NESTED)
        else:
            parent[last] = data.draw(JUNK if last == "arch" else NESTED)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2)) if tensors else ():
        tensors.pop(name, None)
    try:
        back = unpack(kind, plain["top"], tensors, ARCHS, what)
    except TypedError as error:
        assert str(error).startswith(what)
    else:
        assert isinstance(back, kind)


def test_a_run_goes_on_from_what_was_read():
    """Two rounds, then a trip of all states, then one more round: the same bits as three rounds."""
    for name in ("fml", "fedme", "pfml"):
        method = METHODS[name](train=TRAIN)
        setting, data, root = task((DENSE, WIDE, LINEAR)), clients(), Key(0)
        expected, whole = federate(method, setting, data, rounds=3)
        server = method.init_server(setting, root.at("init"))
        engine = InProcessEngine(method, setting, data, root)
        for t in range(3):
            server_kind, state_kind, tensors = kinds(method)["server"], kinds(method)["state"], {}
            plain = json.loads(json.dumps([pack(server, tensors, "server"), pack(engine.states, tensors, "clients")]))
            server = unpack(server_kind, plain[0], tensors, ARCHS)
            engine.states = unpack(dict[str, state_kind], plain[1], tensors, ARCHS)
            server = run_round(method, setting, engine, server, t, 3, root).server
        assert equal(server, expected)
        assert equal(engine.states, whole.states)
