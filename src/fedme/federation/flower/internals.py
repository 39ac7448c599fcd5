"""All that the server's side knows of Flower's insides, as read in flwr 1.41.0.

Nothing else at the server imports a non-public module of Flower. `tests/federation/test_flower_internals.py` fails when the
source of what is used here changes: read the new source, mend this file, then update the test.

A message is a tree of objects: Message, RecordDict, records, arrays and chunks of arrays. An object is named by the SHA-256
of its content: a head (type, ids of its children, length of the body), a zero byte, the body. A node announces the tree of a
reply, then pushes the objects that Flower's server does not have. A reply is handed out once, complete or not.
"""

import base64
import binascii
import datetime
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2, runtime_pb2
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from flwr.app import Message

CHUNK_BYTES = 5 << 20  # of an array, in one object; FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
DEPTH = 5  # Message, RecordDict, ArrayRecord, Array, ArrayChunk
TYPES = ("Message", "RecordDict", "ConfigRecord", "ArrayRecord", "Array", "ArrayChunk")  # of the objects of our replies
CLOCKS = 5.0  # seconds that a node's clock may be ahead
AGE = 305.0  # seconds that a signature is valid
REQUESTS = {  # by the last part of the path
    "register-node": fleet_pb2.RegisterNodeFleetRequest,
    "activate-node": fleet_pb2.ActivateNodeRequest,
    "deactivate-node": fleet_pb2.DeactivateNodeRequest,
    "unregister-node": fleet_pb2.UnregisterNodeFleetRequest,
    "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "pull-messages": fleet_pb2.PullMessagesRequest,
    "push-messages": fleet_pb2.PushMessagesRequest,
    "get-run": run_pb2.GetRunRequest,
    "get-fab": fab_pb2.GetFabRequest,
    "push-object": message_pb2.PushObjectRequest,
    "pull-object": message_pb2.PullObjectRequest,
    "confirm-message-received": message_pb2.ConfirmMessageReceivedRequest,
}


class Unreadable(ValueError):
    """What a node sent is not what Flower's nodes send; the text says why."""


@dataclass(frozen=True)
class FlowerObject:
    """An object of a message. For an array `chunks` has the ids of its chunks in order, which may repeat."""

    type: str
    children: tuple[str, ...]
    chunks: tuple[str, ...]
    size: int  # bytes of the body

    @classmethod
    def read(cls, content: bytes) -> "FlowerObject":
        """Read an object without building what it describes."""
        end = content.find(b"\0")
        try:
            kind, names, length = content[:end].decode().split(" ")
            children = tuple(names.split(",")) if names else ()
            size = len(content) - end - 1
            if end < 0 or int(length) != size or kind not in TYPES:
                raise ValueError("its head is wrong")
            if kind != "Array":
                return cls(kind, children, (), size)
            return cls(
                kind, children, tuple(children[index] for index in json.loads(content[end + 1 :])["arraychunk_ids"]), size
            )
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise Unreadable(f"an object cannot be read: {error}") from error


def request_of(action: str, body: bytes) -> Any:
    """The request in the body of a call of the fleet API."""
    request = REQUESTS[action]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise Unreadable("the request cannot be read") from error
    return request


def node_of(request: Any) -> int | None:
    """The node that a request says it is from; None for those that name a key instead."""
    if hasattr(request, "node"):
        return int(request.node.node_id)
    return int(request.node_id) if hasattr(request, "node_id") else None


def tree_ids(tree: Any, most: int) -> list[str]:
    """The ids of all objects of an announced reply; more than `most`, or too deep, is refused."""
    ids: list[str] = []
    level = [tree]
    for _ in range(DEPTH):
        ids += [node.object_id for node in level]
        level = [child for node in level for child in node.children]
        if len(ids) + len(level) > most:
            raise Unreadable(f"has more than {most} objects")
        if not level:
            return ids
    raise Unreadable(f"its objects are nested more than {DEPTH} deep")


def signed_by(headers: Mapping[str, str], now: datetime.datetime) -> bytes | None:
    """The public key, as DER, that has signed the headers of a request; None without a valid signature."""
    try:
        key = public_key(base64.b64decode(headers["flwr-public-key"], validate=True))
        timestamp = headers["flwr-timestamp"]
        age = (now - datetime.datetime.fromisoformat(timestamp)).total_seconds()
        if not -CLOCKS < age < AGE:
            return None
        key.verify(
            base64.b64decode(headers["flwr-signature"], validate=True), timestamp.encode("ascii"), ec.ECDSA(hashes.SHA256())
        )
    except (KeyError, ValueError, TypeError, binascii.Error, InvalidSignature, UnsupportedAlgorithm):
        return None
    return key_bytes(key)


def public_key(text: bytes) -> ec.EllipticCurvePublicKey:
    """A key as nodes send it (PEM) or as their file has it (OpenSSH)."""
    read = serialization.load_ssh_public_key if text.startswith(b"ecdsa-") else serialization.load_pem_public_key
    key = read(text)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise TypeError("not an elliptic-curve key")
    return key


def key_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """One form of a key, to compare keys."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def registered_node(database: Path, key: bytes) -> int | None:
    """The node that Flower's server has registered for a public key; None if there is none, or not any more."""
    encoding = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pem = public_key(key).public_bytes(*encoding)
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        query = "SELECT node_id FROM node WHERE public_key = ? AND status != 'unregistered'"
        row = connection.execute(query, (pem,)).fetchone()
    return None if row is None else int(row[0]) % 2**64  # SQLite's integers have a sign


def push_error() -> type[Exception]:
    """What a grid raises when Flower's server has forgotten the first part of a message."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    error: type[Exception] = ObjectPushError
    return error


class Incoming:
    """Replies as they arrive. Each is claimed, fetched and built by itself, and nothing waits for what is withheld."""

    def __init__(self, grid: Any) -> None:
        from flwr.superlink.grid.http_grid import HttpGrid

        self.grid, self.remote = grid, isinstance(grid, HttpGrid)
        self.claimed: dict[str, tuple[Any, list[str], dict[str, bytes]]] = {}  # by request: message, ids, objects so far

    def claim(self, request: str, most: int) -> bool:
        """Whether a reply to this request has come; `most` is how many objects it may have."""
        if request not in self.claimed:
            answer = self._call("PullMessages", runtime_pb2.PullAppMessagesRequest(message_ids=[request]))
            for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=False) if answer else ():
                if message.metadata.reply_to_message_id == request:
                    self.claimed[request] = message, [], {}
                    self.claimed[request] = message, tree_ids(tree, most), {}
        return request in self.claimed

    def fetch(self, request: str) -> Iterable[tuple[str, bytes]]:
        """The objects of a claimed reply that are there and were not fetched before."""
        _, ids, objects = self.claimed[request]
        for name in ids:  # the message itself is the first: nodes send it last
            if name in objects:
                continue
            call = message_pb2.PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=name)
            answer = self._call("PullObject", call)
            if answer is None:
                return
            if not answer.object_found:
                raise Unreadable("a part of the reply was not sent in time")
            if not answer.object_available:
                return
            objects[name] = answer.object_content
            yield name, answer.object_content

    def complete(self, request: str) -> bool:
        """Whether all objects of a claimed reply were fetched."""
        _, ids, objects = self.claimed[request]
        return len(objects) == len(set(ids))

    def build(self, request: str) -> "Message":
        """The reply, from its objects."""
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        message, _, objects = self.claimed[request]
        try:
            reply = inflate_object_from_contents(message.metadata.message_id, dict(objects))
        except Exception as error:  # whatever Flower's code raises on what it did not expect
            raise Unreadable(f"the reply cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(reply, Message) or not (reply.has_error() or reply.has_content()):
            raise Unreadable("the reply has neither content nor an error")
        return reply

    def forget(self, request: str) -> None:
        """Let Flower's server delete the reply."""
        message, _, _ = self.claimed.pop(request, (None, [], {}))
        if message is not None:
            received = message_pb2.ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=message.metadata.message_id
            )
            self._call("ConfirmMessageReceived", received)

    def _call(self, name: str, request: Any) -> Any:
        """The answer of Flower's server; None if it has trouble with this message, which must not be that of the others."""
        try:
            return getattr(self.grid._runtime_client, name)(request)
        except httpx.HTTPStatusError:
            return None
