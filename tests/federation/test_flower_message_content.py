"""Received messages: size, text and arrays are checked before anything is built from them."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, strategies as st

from fedme.core.typed import TypedError
from fedme.federation.flower import requests
from fedme.federation.flower.internals import push_error
from fedme.federation.flower.message_content import BODY, TENSORS, MessageContent
from fedme.federation.flower.reply_limits import TEXT_BYTES, ReplyLimit
from fedme.federation.flower.requests import Failure, GridRequests


def message(text, **arrays):
    boxes = {name: Array("float32", (1,), "numpy.ndarray", data) for name, data in arrays.items()}
    return RecordDict({BODY: ConfigRecord({"json": text}), TENSORS: ArrayRecord(boxes)})


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def claiming(shape, dtype="<f4", data=b"\0" * 8):
    """An array file whose header claims more than the file holds."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (message("{}", a=claiming((10**12,))), "has 8 bytes"),
        (message("{}", a=claiming((3,))), "has 8 bytes"),
        (message("{}", a=claiming((-2,))), "message: cannot be read"),
        (message("{}", a=claiming((2**62, 2**62))), "has 8 bytes"),
        (message("{}", a=npy(np.array([print], dtype=object))), "message: cannot be read"),
        (message("{}", a=npy(np.array(["text"]))), "message: cannot be read"),
        (message("{}", a=npy(np.zeros(3, dtype="c16"))), "message: cannot be read"),
        (message("{}", a=b""), "message: cannot be read"),
        (message("{}", a=b"\x93NUMPY\x01\x00\xff\xff{}"), "message: cannot be read"),
        (message("[" * 100_000), "message: cannot be read"),
        (message("[]"), "must be a table"),
        (message("{"), "message: cannot be read"),
        (message("9" * 10_000), "message: cannot be read"),
        (RecordDict({}), "message: cannot be read"),
        (RecordDict({BODY: ConfigRecord({"json": 3})}), "message: cannot be read"),
    ],
)
def test_what_is_no_message_is_refused(content, words):
    with pytest.raises(TypedError, match=words):
        MessageContent.from_records(content)


def test_size_is_looked_at_first():
    big = message("{" * 1000, a=npy(np.zeros(1000)))
    with pytest.raises(TypedError, match="has 9128 bytes, expected at most 9000"):
        MessageContent.from_records(big, 9000)


@given(st.binary(max_size=300))
def test_any_bytes_for_an_array_are_refused_or_are_one(data):
    try:
        opened = MessageContent.from_records(message("{}", a=data))
    except TypedError:
        return
    assert isinstance(opened.tensors["a"], torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_what_is_sent_arrives_bit_by_bit(dtype):
    for tensor in (torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 3).to(dtype)):
        there = MessageContent.from_records(MessageContent.of(value=tensor, name="x").to_records())
        back = there.read("value", torch.Tensor)
        assert back.dtype == dtype
        assert torch.equal(back, tensor)
        assert there.read("name", str) == "x"


class TwoReplies:
    """A grid on which every message is answered twice, and once by a node that received no message."""

    def push_messages(self, messages):
        self.number = "m1"
        return [self.number]

    def pull_messages(self, numbers):
        def reply(about, text):
            metadata = SimpleNamespace(reply_to_message_id=about, src_node_id=1)
            return SimpleNamespace(metadata=metadata, has_error=lambda: False, content=message(json.dumps({"says": text})))

        return [reply("m0", "stranger"), reply("m1", "first"), reply("m1", "again")]


@pytest.fixture(autouse=True)
def outside_a_run(monkeypatch):
    """Flower creates messages only within a run."""
    monkeypatch.setattr(requests, "Message", lambda content, **about: SimpleNamespace(content=content))


def test_only_the_first_reply_to_a_message_is_looked_at():
    replies = GridRequests(TwoReplies(), 0.0).send("train", {"a": (1, MessageContent.of())})
    assert {client: reply.read("says", str) for client, reply in replies.items()} == {"a": "first"}


class Restarted(TwoReplies):
    """A grid whose server restarts while a message is pushed."""

    def __init__(self, times):
        self.pushes = times

    def push_messages(self, messages):
        self.pushes -= 1
        if self.pushes >= 0:
            raise push_error()("o", 1, "s")
        return super().push_messages(messages)


def test_a_server_that_is_started_again_in_between_is_asked_again():
    replies = GridRequests(Restarted(3), 0.0).send("train", {"a": (1, MessageContent.of())})
    assert replies["a"].read("says", str) == "first"
    with pytest.raises(push_error()):  # not for ever
        GridRequests(Restarted(1000), 0.0).send("train", {"a": (1, MessageContent.of())})


def test_a_reply_that_is_too_large_is_an_offence():
    replies = GridRequests(TwoReplies(), 0.0).send(
        "train", {"a": (1, MessageContent.of())}, limit=lambda client: ReplyLimit(-TEXT_BYTES + 5)
    )
    assert isinstance(replies["a"], Failure)
    assert replies["a"].offence
    assert "expected at most 5" in replies["a"].reason
