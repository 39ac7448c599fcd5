"""Sites and outsiders against the server: replies that cannot be read, are withheld, too large, or in another's name.

The bad site is a program of ours with the key of site c: it does what a node does, and replies with what it likes. It takes the
place of site c's honest node at the first of these attacks, and stays until the federation ends.
"""

import base64
import datetime
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.proto import error_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, recorddict_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedme.deployment import site_app
from fedme.federation.flower.internals import tree_ids
from fedme.results import records
from fedme_attacks.federation import Loopback
from fedme_attacks.frame import attack
from fedme_test_deployment import Deployment, wait_for
from fedme_test_grid import context

Spoil = Callable[["HostileSite", Message, Message], None]  # (site, request, the honest reply)
BAD = "c"


class HostileSite:
    """A node with a site's key. Its handshake is honest; `spoil` sends the replies to everything else."""

    def __init__(self, deployment: Deployment, name: str, spoil: Spoil) -> None:
        self.deployment, self.name, self.spoil = deployment, name, spoil
        self.folder = deployment.site(name)
        trust = ssl.create_default_context(cafile=self.folder / "ca.crt")
        self.line = httpx.Client(base_url=f"https://127.0.0.1:{deployment.port}", verify=trust, timeout=60)
        self.key = serialization.load_ssh_private_key((self.folder / "key").read_bytes(), None)
        self.stopped = threading.Event()
        self.statuses: list[int] = []
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "HostileSite":
        public = self.key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.public = public
        made = None
        for _ in range(60):  # until the server has noticed that the honest node of this key is gone
            answer = self.call("activate-node", fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30.0))
            if answer.status_code == 200:
                made = fleet_pb2.ActivateNodeResponse.FromString(answer.content)
                break
            time.sleep(2)
        assert made is not None, "the hostile node was not activated"
        self.node = node_pb2.Node(node_id=made.node_id)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join(60)
        self.call("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id))
        self.line.close()

    def call(self, action: str, request: Any) -> httpx.Response:
        when = datetime.datetime.now(datetime.UTC).isoformat()
        headers = {
            "content-type": "application/protobuf",
            "flwr-public-key": base64.b64encode(self.public).decode(),
            "flwr-signature": base64.b64encode(self.key.sign(when.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
            "flwr-timestamp": when,
        }
        body = request.SerializeToString() if hasattr(request, "SerializeToString") else request
        try:
            answer = self.line.post(f"/v1/fleet/{action}", content=body, headers=headers)
        except httpx.TransportError:  # it answers before it has read everything
            answer = httpx.Response(0)
        self.statuses.append(answer.status_code)
        return answer

    def send(self, request: Message, tree: Any, objects: dict[str, bytes], error: Error | None = None, **about: Any) -> None:
        """Announce a reply, as a node does, and push those of its objects that are given."""
        now = time.time()
        metadata = message_pb2.Metadata(
            run_id=request.metadata.run_id,
            message_id=tree.object_id,
            src_node_id=self.node.node_id,
            dst_node_id=1,
            reply_to_message_id=request.metadata.message_id,
            group_id=request.metadata.group_id,
            ttl=request.metadata.created_at + request.metadata.ttl - now,
            message_type=request.metadata.message_type,
            created_at=now,
        )
        for name, value in about.items():
            setattr(metadata, name, value)
        if error is None:
            message = message_pb2.Message(metadata=metadata, content=recorddict_pb2.RecordDict())
        else:
            message = message_pb2.Message(metadata=metadata, error=error_pb2.Error(code=error.code, reason=error.reason))
        made = fleet_pb2.PushMessagesRequest(node=self.node, messages_list=[message], message_object_trees=[tree])
        answer = self.call("push-messages", made)
        if answer.status_code == 200:
            session = fleet_pb2.PushMessagesResponse.FromString(answer.content)
            for name in session.objects_to_push:
                if name in objects:
                    pushed = message_pb2.PushObjectRequest(
                        node=self.node,
                        run_id=request.metadata.run_id,
                        object_id=name,
                        object_content=objects[name],
                        session_id=session.session_id,
                    )
                    self.call("push-object", pushed)

    def fail(self, request: Message, reason: str) -> None:
        """Reply with an error."""
        error = Error(2, reason)
        self.send(request, *packed(Message(error, reply_to=request)), error=error)

    def _work(self) -> None:
        beat = 0.0
        while not self.stopped.is_set():
            if time.monotonic() > beat:
                self.call(
                    "send-node-heartbeat", heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30.0)
                )
                beat = time.monotonic() + 10
            answer = self.call("pull-messages", fleet_pb2.PullMessagesRequest(node=self.node))
            got = fleet_pb2.PullMessagesResponse.FromString(answer.content) if answer.status_code == 200 else None
            for message, tree in zip(got.messages_list, got.message_object_trees, strict=True) if got else ():
                self._answer(message, tree)
            self.stopped.wait(0.5)

    def _pulled(self, pull: Any) -> bytes:
        answer = self.call("pull-object", pull)
        return message_pb2.PullObjectResponse.FromString(answer.content).object_content if answer.status_code == 200 else b""

    def _answer(self, message: Any, tree: Any) -> None:
        contents = {}
        for name in set(tree_ids(tree, 10_000)):
            pull = message_pb2.PullObjectRequest(node=self.node, run_id=message.metadata.run_id, object_id=name)
            while not (content := self._pulled(pull)):  # the server may not have got it yet
                if self.stopped.wait(0.2):
                    return
            contents[name] = content
        request = inflate_object_from_contents(tree.object_id, contents)
        request.metadata.__dict__["_message_id"] = tree.object_id
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = message.metadata.run_id, 1, self.node.node_id
        try:
            honest = site_app.app(request, context(self.node.node_id, site=str(self.folder / "site.toml")))
        except Exception as error:  # as a node does
            return self.fail(request, f"{type(error)}:<'{error}'>")
        if request.metadata.message_type == "query.handshake":
            self.send(request, *packed(honest))
        else:
            self.spoil(self, request, honest)


def packed(message: Message) -> tuple[Any, dict[str, bytes]]:
    """The tree and the objects of a message."""
    return get_object_tree(message), {name: value.deflate() for name, value in get_all_nested_objects(message).items()}


def unreadable(site: HostileSite, request: Message, honest: Message) -> None:
    """The record of values is not one: Flower's code raises when it builds it."""
    tree, objects = packed(honest)
    old = next(name for name, content in objects.items() if content.startswith(b"ConfigRecord"))
    body = b"\xff" * 40
    _replace(tree, objects, old, f"ConfigRecord  {len(body)}".encode() + b"\0" + body)
    site.send(request, tree, objects)


def withheld(site: HostileSite, request: Message, honest: Message) -> None:
    """The reply is announced and its message sent, but not what it consists of."""
    tree, objects = packed(honest)
    site.send(request, tree, {name: content for name, content in objects.items() if content.startswith(b"Message")})


def forged(site: HostileSite, request: Message, honest: Message) -> None:
    """The reply claims to be from site a."""
    tree, objects = packed(honest)
    nodes = json.loads((site.deployment.federation / "server" / "nodes" / "a.json").read_text())
    site.send(request, tree, objects, src_node_id=int(nodes["node-id"]))


def bomb(site: HostileSite, request: Message, honest: Message) -> None:
    """One chunk of 1 MB that an array names 2000 times: 2 GB once it is put together."""
    big = Message(RecordDict({"tensors": ArrayRecord({"x": Array(np.zeros(260_000, np.float32))})}), reply_to=request)
    tree, objects = packed(big)
    array = next(name for name, content in objects.items() if content.startswith(b"Array "))
    head = objects[array].partition(b"\0")[0].decode().split(" ")
    body = json.dumps({"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 2000}).encode()
    _replace(tree, objects, array, f"Array {head[1]} {len(body)}".encode() + b"\0" + body)
    site.send(request, tree, objects)


def endless(site: HostileSite, request: Message, honest: Message) -> None:
    """The reply is announced; then comes a body that does not end."""
    tree, _ = packed(honest)
    site.send(request, tree, {})
    site.call("push-object", (b"x" * (1 << 20) for _ in range(1 << 20)))


def long_error(site: HostileSite, request: Message, honest: Message) -> None:
    """An error text with codes for a terminal, marks that turn text around, and a line of a log."""
    text = "\x1b[2J\x1b]0;owned\x07\u202egood\nround 9: all is well " + "x" * 40_000
    site.fail(request, text)


def _replace(tree: Any, objects: dict[str, bytes], old: str, content: bytes) -> None:
    """Replace an object, under the hash of its new content, all the way up."""
    names: dict[str, str] = {}

    def renew(node: Any) -> None:
        for child in node.children:
            renew(child)
        now = content if node.object_id == old else objects[node.object_id]
        for before, after in names.items():
            now = now.replace(before.encode(), after.encode())
        names[node.object_id] = get_object_id(now)
        node.object_id = names[node.object_id]
        objects[node.object_id] = now

    renew(tree)


def memory(deployment: Deployment) -> dict[str, int]:
    """The largest resident memory of the server's programs so far, in MB."""
    peaks = {}
    for program in ("flower-superlink", "reverse_proxy", "flwr-serverapp"):
        sizes = [0]
        for pid in deployment.pids(program):
            try:
                sizes.append(int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
            except (OSError, IndexError):
                continue
        peaks[program] = max(sizes)
    return peaks


HOSTILE: dict[Path, HostileSite] = {}  # by the folder of the federation


def hostile_site(federation: Loopback) -> HostileSite:
    """The bad site, in the place of the honest one with this name."""
    if federation.folder not in HOSTILE:
        federation.deployment.stop(BAD)
        HOSTILE[federation.folder] = federation.cleanup.enter_context(HostileSite(federation.deployment, BAD, unreadable))
    return HOSTILE[federation.folder]


def run_with(federation: Loopback, name: str, spoil: Spoil | None) -> tuple[list[dict[str, Any]], str, dict[str, int]]:
    """A run in which site c is hostile: its records, the server's log and the largest memory of the server's programs."""
    deployment = federation.deployment
    deployment.settings(timeout=45.0, min_sites=3, min_replies=2)
    deployment.agree(name=name, rounds=1, evaluate_every=1)
    if spoil is not None:
        hostile_site(federation).spoil = spoil
    peaks: dict[str, int] = {}
    submit = deployment.submit()
    until = time.monotonic() + 420
    while submit.poll() is None and time.monotonic() < until:
        for program, size in memory(deployment).items():
            peaks[program] = max(peaks.get(program, 0), size)
        time.sleep(0.5)
    assert submit.poll() == 0, deployment.output_of("submit").read_text()[-2000:]
    folder = deployment.federation / "runs" / name
    return list(records.read(folder)), deployment.log(name), peaks


QUIET: dict[str, int] = {}


def quiet(federation: Loopback) -> dict[str, int]:
    """The memory of the server's programs in a run without an attack."""
    if not QUIET:
        QUIET.update(run_with(federation, "quiet", None)[2])
        Loopback.wait_until_connected(federation.deployment)
    return QUIET


def only_c_is_missing(rows: list[dict[str, Any]], words: str) -> str:
    """That in every round the replies of a and b counted, and c's did not, for this reason."""
    missing = {(row["round"], row["client"]): row["notes"]["missing"] for row in rows if row.get("notes", {}).get("missing")}
    assert {client for _, client in missing} == {BAD}, missing
    assert all(words in str(reason) for reason in missing.values()), missing
    return next(iter(missing.values()))


def tried(federation: Loopback, name: str, spoil: Spoil, words: str) -> str:
    """Run with a hostile site; the others' replies count, it is named, and no program takes twice its quiet memory."""
    calm = quiet(federation)
    rows, log, peaks = run_with(federation, name, spoil)
    reason = only_c_is_missing(rows, words)
    assert BAD in log
    assert not {"\x1b", "\u202e", "\x07"} & set(log)
    for program, size in peaks.items():
        assert size < 2 * calm[program], f"{program}: {size} MB, quiet {calm[program]} MB"
    Loopback.wait_until_connected(federation.deployment)
    shown = ", ".join(f"{program} {size} MB (quiet {calm[program]})" for program, size in peaks.items())
    return f"c: {reason[:120]}; {shown}"


@attack(by="site", promise="a reply that cannot be read is its sender's failure; the others' count")
def a_reply_that_cannot_be_read(federation: Loopback) -> str:
    """Operator's list, 3."""
    return tried(federation, "unreadable", unreadable, "refused")


@attack(by="site", promise="a reply whose parts are withheld does not hold up the others")
def a_reply_whose_parts_are_withheld(federation: Loopback) -> str:
    """Operator's list, 3."""
    return tried(federation, "withheld", withheld, "no reply")


@attack(by="site", promise="nobody can reply in another site's name")
def a_reply_in_the_name_of_another_site(federation: Loopback) -> str:
    """Operator's list, 3."""
    return tried(federation, "forged", forged, "refused")


@attack(by="site", promise="sizes are checked before memory is spent: less than twice the memory of a quiet run")
def a_reply_that_inflates_to_2_GB(federation: Loopback) -> str:
    """Operator's list, 4."""
    return tried(federation, "bomb", bomb, "expected at most")


@attack(by="site", promise="a body that does not end is cut at the largest that a part of a reply may have")
def a_reply_that_does_not_end(federation: Loopback) -> str:
    """Operator's list, 3."""
    return tried(federation, "endless", endless, "a request has more than")


@attack(by="site", promise="text of a site is data: it cannot move a cursor or write a line of the log")
def an_error_text_with_codes_for_a_terminal(federation: Loopback) -> str:
    """Operator's list, 7."""
    return tried(federation, "error", long_error, "\\x1b[2J")


@attack(by="outsider", promise="a body without a valid signature is cut at 16 kB")
def a_large_body_without_a_key(federation: Loopback) -> str:
    """Operator's list, 5."""
    deployment = federation.deployment
    before = memory(deployment)
    trust = ssl.create_default_context(cafile=deployment.federation / "server" / "ca.crt")
    statuses = []
    with httpx.Client(base_url=f"https://127.0.0.1:{deployment.port}", verify=trust, timeout=120) as line:
        for _ in range(4):
            try:
                body = (b"x" * (1 << 20) for _ in range(1200))
                statuses.append(line.post("/v1/fleet/push-object", content=body).status_code)
            except httpx.TransportError:
                statuses.append(0)
    after = memory(deployment)
    assert set(statuses) <= {413, 0}, statuses
    wait_for(
        lambda: "refused a message of 127.0.0.1" in (deployment.federation / "server/log/proxy.log").read_text(), "the log"
    )
    for program in ("flower-superlink", "reverse_proxy"):
        assert after[program] < 1.5 * before[program], (program, before, after)
    return f"1.2 GB, 4 times: refused; superlink {before['flower-superlink']} to {after['flower-superlink']} MB, " + (
        f"proxy {before['reverse_proxy']} to {after['reverse_proxy']} MB"
    )
