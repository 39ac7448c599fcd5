"""Replies from Flower's server: each is fetched, measured and read by itself; a bad one is only its sender's failure."""

import json
import tracemalloc
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedme.federation.flower.internals import CHUNK_BYTES, FlowerObject, Unreadable
from fedme.federation.flower.message_content import BODY, TENSORS, MessageContent
from fedme.federation.flower.reply_limits import ReplyAccount, ReplyLimit, TooLarge
from fedme.federation.flower.requests import Failure, GridRequests

SMALL = ReplyLimit(1 << 16, 16)


class Server(HttpGrid):
    """Flower's server as its grid sees it: replies are handed out once, objects one by one, some of them never."""

    def __init__(self, answer):
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        super().__init__(token="token")
        self.set_run(Run.create_empty(1))
        self.answer, self.waiting, self.objects, self.confirmed, self.withheld = answer, {}, {}, [], set()
        self._client = self

    def push_messages(self, messages):
        for message in messages:
            number = message.object_id
            message.metadata.__dict__.update(_message_id=number, _src_node_id=1)
            self.waiting[number] = self.answer(message)
        return [message.metadata.message_id for message in messages]

    def PullMessages(self, request):
        answer = runtime_pb2.PullAppMessagesResponse()
        for number in request.message_ids:
            arrived = self.waiting.pop(number, None)
            if isinstance(arrived, Exception):
                raise arrived
            if arrived is not None:
                tree, objects, root = arrived
                self.objects.update(objects)
                metadata = message_pb2.Metadata(message_id=root, reply_to_message_id=number)
                answer.messages_list.append(message_pb2.Message(metadata=metadata))
                answer.message_object_trees.append(tree)
        return answer

    def PullObject(self, request):
        name = request.object_id
        found, there = name in self.objects, name not in self.withheld
        return message_pb2.PullObjectResponse(
            object_found=found, object_available=there, object_content=self.objects.get(name, b"") if there else b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


def sent(message):
    """What a node sends of a message."""
    objects = {name: value.deflate() for name, value in get_all_nested_objects(message).items()}
    return get_object_tree(message), objects, message.object_id


def good(message, node=None, x=None, **values):
    reply = Message(MessageContent.of(says="good", x=np_tensor() if x is None else x, **values).to_records(), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id if node is None else node
    return reply


def np_tensor():
    return torch.arange(6.0)


def spoilt(message, find, change, x=None):
    """A reply one of whose objects is replaced, under the hash of its new content, all the way up."""
    tree, objects, _ = sent(good(message, x=x))
    old = next(name for name, content in objects.items() if content.startswith(find))
    names = {old: None}

    def renew(node):
        for child in node.children:
            renew(child)
        content = objects.pop(node.object_id)
        content = change(content) if node.object_id == old else content
        for before, after in names.items():
            content = content.replace(before.encode(), (after or before).encode())
        names[node.object_id] = get_object_id(content)
        node.object_id = names[node.object_id]
        objects[node.object_id] = content

    renew(tree)
    return tree, objects, tree.object_id


def with_body(content, body):
    head = content[: content.index(b"\0")].decode().split(" ")
    return f"{head[0]} {head[1]} {len(body)}".encode() + b"\0" + body


def many_chunks(content, times=10**6):
    about = {"dtype": "float32", "shape": [6], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}
    return with_body(content, json.dumps(about).encode())


def request():
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    message = Message(MessageContent.of().to_records(), dst_node_id=11, message_type="train")
    message.metadata.__dict__.update(_message_id=message.object_id, _src_node_id=1)
    return message


def of_records(message, records):
    return sent(_from(message, Message(RecordDict(records), reply_to=message)))


PICKLED = ArrayRecord({"x": Array("object", (1,), "numpy.ndarray", b"\x80\x04.")})
BAD = {
    "no protobuf": lambda m: spoilt(m, b"ConfigRecord", lambda c: with_body(c, b"\xff" * 30)),
    "no JSON": lambda m: spoilt(m, b"RecordDict", lambda c: with_body(c, b"{")),
    "deep JSON": lambda m: spoilt(m, b"Array ", lambda c: with_body(c, b"[" * 5000)),
    "no head": lambda m: spoilt(m, b"ArrayChunk", lambda c: b"junk"),
    "unknown type": lambda m: spoilt(m, b"ConfigRecord", lambda c: b"Surprise" + c[12:]),
    "metrics": lambda m: of_records(m, {BODY: MetricRecord({"json": 3})}),
    "wrong records": lambda m: of_records(m, {BODY: ArrayRecord([np.ones(2)]), TENSORS: ConfigRecord()}),
    "no index": lambda m: spoilt(m, b"Array ", lambda c: with_body(c, b'{"arraychunk_ids": [7]}')),
    "one chunk a million times": lambda m: spoilt(m, b"Array ", many_chunks),
    "too large": lambda m: sent(good(m, y=np_tensor().repeat(10**6))),
    "too many": lambda m: sent(good(m, **{f"x{i}": np_tensor() + i for i in range(40)})),
    "too deep": lambda m: (nested(40), {}, "a" * 64),
    "not a message": lambda m: sent(good(m).content),
    "pickled": lambda m: of_records(m, {BODY: ConfigRecord({"json": "{}"}), TENSORS: PICKLED}),
}  # fmt: skip


def nested(depth):
    tree = message_pb2.ObjectTree(object_id=f"{depth:064x}")
    if depth:
        tree.children.append(nested(depth - 1))
    return tree


def _from(message, reply):
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


def ask(answer, timeout=0.5, **about):
    server = Server(answer)
    requests = GridRequests(server, 0.0, timeout, **about)
    clients = {name: (node, MessageContent.of(to=name)) for node, name in enumerate("abc", 11)}
    return server, requests.send("train", clients, limit=lambda client: SMALL)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("bad", [11, 12])
def test_a_bad_reply_is_its_senders_failure(kind, bad):
    """It arrives in the same poll as two good ones, before or between them."""
    server, replies = ask(lambda m: BAD[kind](m) if m.metadata.dst_node_id == bad else sent(good(m)))
    name = "abc"[bad - 11]
    assert isinstance(replies[name], Failure)
    assert replies[name].offence, replies[name]
    assert replies[name].reason.startswith("refused: ")
    assert len(replies[name].reason) < 1100
    for other in set("abc") - {name}:
        assert replies[other].read("says", str) == "good"
    assert len(server.confirmed) == 3  # Flower's server may delete them all


def test_a_reply_whose_parts_are_withheld_does_not_hold_up_the_others():
    def answer(message):
        tree, objects, root = sent(good(message))
        if message.metadata.dst_node_id == 11:
            server.withheld.add(next(name for name, content in objects.items() if content.startswith(b"ArrayChunk")))
        return tree, objects, root

    server = Server(answer)
    clients = {name: (node, MessageContent.of(to=name)) for node, name in enumerate("abc", 11)}
    order = []
    replies = GridRequests(server, 0.01, 0.3).send("train", clients, order.append)
    assert order in (["b", "c"], ["c", "b"]) or order == []
    assert isinstance(replies["a"], Failure)
    assert "no reply of the whole message within 0.3 s" in replies["a"].reason


def test_a_part_that_comes_later_completes_the_reply():
    polls = []

    def later():
        polls.append(1)
        if len(polls) == 3:
            server.withheld.clear()

    def answer(message):
        tree, objects, root = sent(good(message))
        server.withheld |= {name for name, content in objects.items() if content.startswith(b"Message")}
        return tree, objects, root

    server = Server(answer)
    replies = GridRequests(server, 0.0, 30.0, later).send("train", {"a": (11, MessageContent.of())})
    assert replies["a"].read("says", str) == "good"
    assert len(polls) >= 3


def test_a_reply_in_anothers_name_is_nobodys():
    _, replies = ask(lambda m: sent(good(m, node=12)))
    assert replies["a"] == Failure("refused: it was sent by node 12, not by the one that was asked")
    assert not replies["a"].offence  # the site that was asked has not sent it
    assert replies["b"].read("says", str) == "good"


def test_an_error_reply_is_one_line_of_safe_text():
    text = "\x1b[2J\x1b]0;owned\x07 \u202egood\u2066\nround 3: all is well" + "x" * 20_000_000
    _, replies = ask(lambda m: sent(_from(m, Message(Error(2, text if m.metadata.dst_node_id == 11 else "e"), reply_to=m))))
    assert replies["b"].reason == "e"
    assert replies["a"].reason.startswith("refused: the reply has at least 2")  # 20 MB

    def shorter(m):
        return sent(_from(m, Message(Error(2, text[:90_000]), reply_to=m)))

    _, replies = ask(shorter)
    assert replies["a"].reason.isprintable()
    assert len(replies["a"].reason) < 1100
    assert "\\x1b[2J" in replies["a"].reason


def test_trouble_of_the_server_with_one_reply_is_not_that_of_the_others():
    error = httpx.HTTPStatusError("500", request=httpx.Request("POST", "http://x"), response=httpx.Response(500))
    _, replies = ask(lambda m: error if m.metadata.dst_node_id == 12 else sent(good(m)))
    assert [isinstance(replies[name], Failure) for name in "abc"] == [False, True, False]
    assert not replies["b"].offence


def test_what_the_proxy_has_refused_is_not_waited_for():
    refused = {}

    def answer(message):
        if message.metadata.dst_node_id != 12:
            return sent(good(message))
        refused[message.metadata.message_id] = "the reply has 9 bytes, expected at most 8"
        return None

    _, replies = ask(answer, timeout=60.0, refusals=lambda: refused)
    assert replies["b"] == Failure("refused: the reply has 9 bytes, expected at most 8", offence=True)
    assert replies["c"].read("says", str) == "good"


def test_nothing_is_put_together_before_it_is_measured():
    """One chunk of 1 MB that an array names 2,000 times would take 2 GB."""
    answers = [spoilt(message, b"Array ", lambda c: many_chunks(c, 2000), torch.zeros(1 << 18)) for message in [request()]]
    tracemalloc.start()
    server = Server(lambda message: answers[0])
    limit = ReplyLimit(1 << 21, 16)
    replies = GridRequests(server, 0.0, 5.0).send("train", {"a": (11, MessageContent.of())}, limit=lambda client: limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "expected at most 6291456" in replies["a"].reason
    assert peak < 20e6


def test_the_account_does_not_depend_on_the_order():
    chunk = b"ArrayChunk  1000\0" + bytes(1000)
    name = get_object_id(chunk)
    body = json.dumps({"arraychunk_ids": [0] * 50}).encode()
    array = f"Array {name} {len(body)}".encode() + b"\0" + body
    for order in ((("array", array), (name, chunk)), ((name, chunk), ("array", array))):
        account = ReplyAccount(ReplyLimit(100_000, 4))
        for key, content in order:
            account.add(key, content)
        assert account.arrays == 50_000
        account = ReplyAccount(SimpleNamespace(bytes=40_000))
        account.add(*order[0])
        with pytest.raises(TooLarge, match="at least"):
            account.add(*order[1])


def test_objects_that_nobody_refers_to_count():
    account, chunk = ReplyAccount(ReplyLimit(0, 4)), b"ArrayChunk  1000000\0" + bytes(1_000_000)
    for i in range(4):
        account.add(str(i), chunk)
    with pytest.raises(TooLarge):
        account.add("4", chunk)
    with pytest.raises(TooLarge):
        ReplyAccount(ReplyLimit()).add("x", f"ArrayChunk  {CHUNK_BYTES + 1}".encode() + b"\0" + bytes(CHUNK_BYTES + 1))
    with pytest.raises(Unreadable):
        FlowerObject.read(b"Array  2\0{}")
