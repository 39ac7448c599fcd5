"""The proxy in front of Flower's server: a real process with TLS and keys, and a server behind it that counts what it gets."""

import asyncio
import base64
import contextlib
import datetime
import http.client
import http.server
import json
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, recorddict_pb2
from flwr.supercore.inflatable.inflatable_object import get_object_id

from fedme.deployment import provisioning, proxy_files, reverse_proxy
from fedme.deployment.operator_folder import Federation, Settings
from fedme.federation.flower.internals import CHUNK_BYTES
from fedme.federation.flower.reply_limits import TEXT_BYTES, ReplyLimit
from fedme_test_deployment import EXPERIMENT, free_port, wait_for

NODES = {"a": 11, "b": 12}


class Upstream(http.server.BaseHTTPRequestHandler):
    """Answers everything, as Flower's server would, and counts bytes."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.received.append((self.path, len(body)))
        self.send_response(self.server.status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *words):
        pass


class Gate:
    """A federation's proxy, and requests to it."""

    def __init__(self, folder):
        (folder / "experiment.toml").write_text(EXPERIMENT)
        self.federation = folder / "federation"
        self.port, control = free_port(), free_port()
        provisioning.write(
            self.federation, folder / "experiment.toml", list(NODES), Settings(port=self.port, control_port=control)
        )
        for name, node in NODES.items():
            (self.federation / "server" / "nodes" / f"{name}.json").write_text(json.dumps({"node-id": str(node)}))
        self.upstream = http.server.ThreadingHTTPServer(("127.0.0.1", control), Upstream)
        self.upstream.received, self.upstream.status = [], 200
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.federation / "server" / "server.crt", self.federation / "server" / "server.key")
        self.upstream.socket = tls.wrap_socket(self.upstream.socket, server_side=True)
        threading.Thread(target=self.upstream.serve_forever, daemon=True).start()
        self.trust = ssl.create_default_context(cafile=self.federation / "server" / "ca.crt")
        self.log = folder / "proxy.log"
        with self.log.open("w") as output:
            command = Federation.read(self.federation).reverse_proxy()
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_for(self.listens, "the proxy", 120)

    def listens(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def end(self):
        self.process.terminate()
        self.process.wait(30)
        self.upstream.shutdown()
        self.upstream.server_close()

    def memory(self):
        """The largest resident memory so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    def headers(self, site, age=0.0):
        key = serialization.load_ssh_private_key((self.federation / "sites" / site / "key").read_bytes(), None)
        when = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        signature = key.sign(when.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "flwr-public-key": base64.b64encode(public).decode(),
            "flwr-signature": base64.b64encode(signature).decode(),
            "flwr-timestamp": when,
        }

    def post(self, action, body=b"", site=None, headers=None, **about):
        with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.trust)) as line:
            signed = self.headers(site) if site else {}
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):  # it answers before it has read all
                line.request("POST", f"/v1/fleet/{action}", body, {**signed, **(headers or {})}, **about)
            try:
                answer = line.getresponse()
                return answer.status, answer.read().decode()
            except (ConnectionError, http.client.BadStatusLine):
                return 0, "closed"

    def announce(self, site, ids=("a" * 64,), node=None, source=None, reply_to="b" * 64):
        node = NODES[site] if node is None else node
        tree = message_pb2.ObjectTree(object_id=ids[0], children=[message_pb2.ObjectTree(object_id=name) for name in ids[1:]])
        about = message_pb2.Metadata(
            src_node_id=node if source is None else source, reply_to_message_id=reply_to, message_id=ids[0]
        )
        return self.post(
            "push-messages",
            fleet_pb2.PushMessagesRequest(
                node=node_pb2.Node(node_id=node),
                messages_list=[message_pb2.Message(metadata=about, content=recorddict_pb2.RecordDict())],
                message_object_trees=[tree],
            ).SerializeToString(),
            site,
        )

    def push(self, site, content, node=None):
        node = NODES[site] if node is None else node
        request = message_pb2.PushObjectRequest(
            node=node_pb2.Node(node_id=node), object_id=get_object_id(content), object_content=content
        )
        return self.post("push-object", request.SerializeToString(), site)

    def refused(self):
        path = self.federation / "server" / proxy_files.REFUSED
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    made = Gate(tmp_path_factory.mktemp("gate"))
    yield made
    made.end()


def chunk(size, fill=b"\0"):
    return f"ArrayChunk  {size}".encode() + b"\0" + fill * size


def array(name, times):
    body = json.dumps({"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}).encode()
    return f"Array {name} {len(body)}".encode() + b"\0" + body


def test_what_nodes_send_passes(gate):
    gate.upstream.received.clear()
    assert gate.announce("a")[0] == 200
    assert gate.push("a", chunk(100))[0] == 200
    assert (
        gate.post("pull-messages", fleet_pb2.PullMessagesRequest(node=node_pb2.Node(node_id=11)).SerializeToString(), "a")[0]
        == 200
    )
    assert [path.rpartition("/")[2] for path, _ in gate.upstream.received] == ["push-messages", "push-object", "pull-messages"]


def test_a_failing_server_is_one_to_try_again(gate):
    # With a full disk Flower's server answers 500, after which a node's heartbeat ends for good.
    heartbeat = heartbeat_pb2.SendNodeHeartbeatRequest(node=node_pb2.Node(node_id=11)).SerializeToString()
    gate.upstream.status = 500
    try:
        assert gate.post("send-node-heartbeat", heartbeat, "a") == (503, "ok")
    finally:
        gate.upstream.status = 200
    assert "the server failed at /v1/fleet/send-node-heartbeat; see superlink.log" in gate.log.read_text()


def test_a_body_without_a_signature_is_cut(gate):
    gate.upstream.received.clear()
    before = gate.memory()
    big = 300 << 20
    status, text = gate.post("push-object", iter([b"x" * (1 << 20)] * 300), headers={"content-length": str(big)})
    assert (status, "expected at most 16384" in text) == (413, True)
    status, _ = gate.post(
        "push-object", iter([b"x" * (1 << 20)] * 300), encode_chunked=True, headers={"transfer-encoding": "chunked"}
    )
    assert status in (413, 0)
    old = gate.headers("a", age=400)
    assert gate.post("push-object", b"x" * 20_000, headers=old)[0] == 413
    assert gate.upstream.received == []
    assert gate.memory() - before < 30e6
    assert "refused a message of 127.0.0.1: a request has 314572800 bytes" in gate.log.read_text()
    assert gate.post("pull-messages", b"")[0] == 200  # small: Flower's server says that it is not signed


def test_the_sender_is_the_one_who_signed(gate):
    gate.upstream.received.clear()
    assert gate.announce("a", node=12)[0] == 400
    status, text = gate.announce("a", source=12, reply_to="c" * 64)
    assert (status, "says that it is from node 12, but was sent by node 11" in text) == (400, True)
    assert gate.push("a", chunk(10), node=12)[0] == 400
    assert gate.announce("a", reply_to="")[0] == 400
    assert gate.upstream.received == []
    assert gate.refused()[-1]["site"] == "a"
    assert "refused a message of a: says that it is node 12, but has the key of a" in gate.log.read_text()


def test_a_reply_larger_than_any_legal_one_is_refused_and_named(gate):
    gate.upstream.received.clear()
    proxy_files.announce_limit(gate.federation / "server", "run", ReplyLimit(1 << 20, 4))
    parts = [chunk(1 << 20, bytes([i])) for i in range(9)]
    ids = ["d" * 64, *map(get_object_id, parts)]
    assert gate.announce("a", ids, reply_to="e" * 64)[0] == 200
    statuses = [gate.push("a", part)[0] for part in parts]
    assert statuses == [200] * 5 + [413] * 4  # 1 MB of arrays, and 4 MB of text
    assert gate.refused()[-1] == {"request": "e" * 64, "site": "a", "reason": gate.refused()[-1]["reason"]}
    assert f"expected at most {(1 << 20) + TEXT_BYTES}" in gate.refused()[-1]["reason"]
    assert proxy_files.Refusals(gate.federation / "server")()["e" * 64] == gate.refused()[-1]["reason"]
    assert gate.announce("b", reply_to="f" * 64)[0] == 200  # nobody else is concerned
    assert gate.push("b", chunk(1 << 20))[0] == 200


def test_one_chunk_named_many_times_is_refused_before_it_is_put_together(gate):
    part = chunk(1 << 18)
    name = get_object_id(part)
    bomb = array(name, 8000)  # 2 GB
    for order in ((part, bomb), (bomb, part)):
        assert gate.announce("b", ("1" * 64, name, get_object_id(bomb)), reply_to="2" * 64)[0] == 200
        assert [gate.push("b", content)[0] for content in order] == [200, 413]
    assert gate.refused()[-1]["site"] == "b"


def test_too_many_too_deep_or_unreadable_objects_are_refused(gate):
    proxy_files.announce_limit(gate.federation / "server", "run", ReplyLimit(1 << 20, 4))
    assert gate.announce("a", ["3" * 64, *(f"{i:064x}" for i in range(100))])[0] == 413
    node = message_pb2.ObjectTree(object_id="4" * 64)
    for _ in range(20):
        node = message_pb2.ObjectTree(object_id="4" * 64, children=[node])
    about = message_pb2.Metadata(src_node_id=11, reply_to_message_id="5" * 64)
    request = fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=11), messages_list=[message_pb2.Message(metadata=about)], message_object_trees=[node]
    )
    assert gate.post("push-messages", request.SerializeToString(), "a")[0] == 413
    assert gate.post("push-messages", b"\xff" * 100, "a")[0] == 400
    assert gate.push("a", b"no object")[0] == 400
    assert gate.push("a", chunk(CHUNK_BYTES + 100_000))[0] == 413
    assert gate.post("send-node-heartbeat", b"x" * 100_000, "a")[0] == 413
    assert gate.post("no-such-action", b"", "a")[0] == 404


def test_slow_headers_and_endless_headers_are_cut(gate, monkeypatch):
    def connect():
        return gate.trust.wrap_socket(socket.create_connection(("127.0.0.1", gate.port)), server_hostname="127.0.0.1")

    with connect() as line:  # one header after another, for ever
        line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for i in range(20_000):
                line.sendall(f"x-{i}: {'y' * 100}\r\n".encode())
        line.settimeout(30)
        with contextlib.suppress(OSError):
            assert line.recv(100)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")
    with connect() as line:
        line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: ")
        line.settimeout(reverse_proxy.HEADER_SECONDS * 3)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            assert line.recv(100) == b""
        assert time.monotonic() - began < reverse_proxy.HEADER_SECONDS * 2.5


def test_connections_of_an_address_are_limited(monkeypatch):
    monkeypatch.setattr(reverse_proxy, "HEADER_SECONDS", 3600.0)  # which closes silent connections too
    config = uvicorn.Config(lambda *_: None, http=reverse_proxy.Connection, ws="none", lifespan="off")
    config.load()

    async def is_closed(reader):
        try:
            return await asyncio.wait_for(reader.read(1), 0.2) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    async def try_it():
        server = await asyncio.get_running_loop().create_server(
            lambda: reverse_proxy.Connection(config, uvicorn.server.ServerState(), {}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()
        lines = [await asyncio.open_connection(*address) for _ in range(reverse_proxy.CONNECTIONS + 5)]
        await asyncio.sleep(0.2)
        closed = await asyncio.gather(*(is_closed(reader) for reader, _ in lines))
        assert closed == [False] * reverse_proxy.CONNECTIONS + [True] * 5
        lines[0][1].close()
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection(*address)  # there is a free place again
        assert not await is_closed(reader)
        for _, line in [*lines, (reader, writer)]:
            line.close()
        server.close()
        await asyncio.sleep(0.2)
        assert not reverse_proxy.Connection.open

    asyncio.run(try_it())


def test_requests_without_a_key_are_limited():
    clock = [0.0]
    inspector = reverse_proxy.Inspector(None, True, lambda: clock[0])
    callers = [inspector.caller("1.2.3.4", None) for _ in range(reverse_proxy.WAITING)]
    with pytest.raises(reverse_proxy.Refused, match="too many"):
        inspector.caller("1.2.3.4", None)
    inspector.caller("1.2.3.5", None)  # another address
    inspector.caller("1.2.3.4", ("a", 11))  # a site behind the same address
    callers[0].waiting, callers[0].tokens = 0, 0.5
    with pytest.raises(reverse_proxy.Refused, match="too many"):
        inspector.caller("1.2.3.4", None)
    clock[0] += 10
    inspector.caller("1.2.3.4", None)


def test_requests_of_a_site_are_limited():
    inspector = reverse_proxy.Inspector(None, True, lambda: 0.0)
    for address in range(reverse_proxy.WAITING):
        inspector.caller(str(address), ("a", 11))  # wherever they come from
    with pytest.raises(reverse_proxy.Refused, match="too many"):
        inspector.caller("somewhere else", ("a", 11))
    inspector.caller("somewhere else", ("b", 12))


def test_a_slow_body_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(reverse_proxy, "BODY_SECONDS", 0.2)
    inspector = reverse_proxy.Inspector(tmp_path, authenticated=True)
    app = reverse_proxy.proxy("http://127.0.0.1:1", False, inspector)
    parts, sent = [b"x", b"y"], []

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # the rest never comes
        return {"type": "http.request", "body": parts.pop(), "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/fleet/push-object", "headers": [], "client": ("1.2.3.4", 5)}

    async def one_request():
        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(one_request())
    assert sent[0]["status"] == 408
    assert inspector.callers["1.2.3.4"].waiting == 0  # its place is free


def test_the_proxy_is_small(gate):
    assert gate.memory() < 250e6
