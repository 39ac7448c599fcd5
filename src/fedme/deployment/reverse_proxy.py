"""A reverse proxy for sites: it forwards requests for the fleet API to Flower's server and rejects all others.

Flower serves nodes, operators and server apps on one port and does not authenticate operators. So that port is open to this
machine only, and sites connect to this proxy. Flower's server reads whole bodies before it looks at a signature, and does not
compare the sender of a reply with the node that has signed. So the proxy checks first: who has signed, how large a body may be,
who sends, and how large the reply is that its objects add up to (`federation/flower/reply_limits.py`).
"""

import argparse
import asyncio
import datetime
import logging
import re
import ssl
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import uvicorn
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedme.core.foreign_text import one_line
from fedme.deployment import proxy_files
from fedme.federation.flower import internals
from fedme.federation.flower.internals import CHUNK_BYTES, Unreadable
from fedme.federation.flower.reply_limits import ReplyAccount, ReplyLimit, TooLarge

FLEET = re.compile(r"/v1/fleet/([a-z-]+)")
HOP_HEADERS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server"}
UPSTREAM = httpx.Limits(max_connections=None, max_keepalive_connections=20)
SMALL_BODY = 1 << 14  # bytes of a request without a valid signature, and of those that only ask
OBJECT_BODY = CHUNK_BYTES + (1 << 12)  # bytes of a request with an object
ANNOUNCEMENT = 1 << 16  # bytes of an announced reply, beside those of its objects' names
NAME_BYTES = 128  # of an object in an announcement
HEADER_BYTES = 1 << 14  # of a request
HEADER_SECONDS = 20.0  # until the headers of the first request on a connection must have come
BODY_SECONDS = 180.0  # until a body must have come
CONNECTIONS = 128  # of one address
WAITING = 32  # requests of one key, or of one address without a key, that wait at the same time
AT_WORK = 3  # of those, the ones whose bodies are read: a node pushes two objects at a time
RATE, BURST = 100.0, 1000.0  # requests per second of one address without a key, and how many may come at once
SIGNED_RATE, SIGNED_BURST = 1000.0, 20000.0  # of one key
OPEN_REPLIES = 4  # of a site, whose objects are still coming
KEYS_SECONDS = 2.0  # for which the files of keys and limits are not read again

log = logging.getLogger("fedme.proxy")


class Refused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Caller:
    """Requests of one key, or of one address without a key."""

    rate: float
    tokens: float
    last: float
    waiting: int = 0
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_WORK))

    def enter(self, now: float, burst: float) -> None:
        """Count a request, or refuse it."""
        self.tokens = min(burst, self.tokens + (now - self.last) * self.rate)
        self.last = now
        if self.tokens < 1 or self.waiting >= WAITING:
            raise Refused(429, "too many requests")
        self.tokens -= 1
        self.waiting += 1


@dataclass
class Announced:
    """A reply that a site has announced."""

    request: str  # the id of the server's message
    account: ReplyAccount


class Inspector:
    """Checks the requests of sites. `folder` is the operator's; without authentication nodes are taken at their word."""

    def __init__(self, folder: Path, authenticated: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.authenticated, self.clock = folder, authenticated, clock
        self.keys: dict[bytes, tuple[str, int]] = {}
        self.limit = ReplyLimit(0, 0)
        self.read_at = -KEYS_SECONDS
        self.callers: dict[Any, Caller] = {}
        self.replies: dict[int, deque[Announced]] = defaultdict(lambda: deque(maxlen=OPEN_REPLIES))
        self.loose: dict[int, ReplyAccount] = {}  # objects of replies that were announced before this process started

    def refresh(self, now: bool = False) -> None:
        """Read the files of keys and limits again, unless that was just done."""
        if now or self.clock() - self.read_at >= KEYS_SECONDS:
            self.keys = proxy_files.registered_keys(self.folder) if self.authenticated else {}
            self.limit = proxy_files.announced_limit(self.folder / "server")
            self.read_at = self.clock()

    def site(self, headers: Any) -> tuple[str, int] | None:
        """The name and node of the site that has signed a request, None if nobody that is known has."""
        signer = internals.signed_by(headers, datetime.datetime.now(datetime.UTC)) if self.authenticated else None
        if signer is not None and signer not in self.keys:
            self.refresh()
        return self.keys.get(signer) if signer is not None else None

    def caller(self, address: str, site: tuple[str, int] | None) -> Caller:
        """The account of requests of this site, or of this address."""
        now = self.clock()
        if len(self.callers) > 4096:  # of addresses that came once
            self.callers = {name: caller for name, caller in self.callers.items() if caller.waiting or now - caller.last < 60}
        signed = site is not None
        made = Caller(SIGNED_RATE if signed else RATE, SIGNED_BURST if signed else BURST, now)
        caller = self.callers.setdefault(site if signed else address, made)
        caller.enter(now, SIGNED_BURST if signed else BURST)
        return caller

    def longest(self, action: str, site: tuple[str, int] | None) -> int:
        """The most bytes of the body of a request."""
        self.refresh(now=action == "push-messages")
        if site is None and self.authenticated:
            return SMALL_BODY
        if action == "push-messages":
            return ANNOUNCEMENT + NAME_BYTES * self.limit.objects
        return OBJECT_BODY if action == "push-object" else SMALL_BODY

    def check(self, action: str, body: bytes, site: tuple[str, int] | None) -> None:
        """Refuse a request whose body is not what a node of FedMe sends."""
        if action not in internals.REQUESTS:
            raise Refused(404, "no such action")
        if self.authenticated and site is None:
            return  # small, and Flower's server refuses it
        name, request = "", ""
        try:
            parsed = internals.request_of(action, body)
            node = internals.node_of(parsed)
            name = site[0] if site is not None else f"node {node}"
            if site is not None and node not in (None, site[1]):
                raise Unreadable(f"says that it is node {node}, but has the key of {name}")
            if action == "push-messages" and node is not None:
                request = self._announce(parsed, node)
            elif action == "push-object" and node is not None:
                self._object(parsed, node)
        except Unreadable as error:
            self.refuse(name, getattr(error, "request", request), str(error))
            raise Refused(413 if isinstance(error, TooLarge) else 400, str(error)) from error

    def refuse(self, name: str, request: str, reason: str) -> None:
        """Write down who was refused."""
        log.warning("refused a message of %s: %s", one_line(name), one_line(reason))
        if request:
            proxy_files.refuse(self.folder / "server", request, name, one_line(reason))

    def refuse_body(self, site: tuple[str, int] | None, address: str, reason: str) -> None:
        """Write down whose body was refused unread; it belongs to the last reply that the site has announced."""
        replies = self.replies.get(site[1]) if site is not None else None
        self.refuse(site[0] if site is not None else address, replies[-1].request if replies else "", reason)

    def _announce(self, parsed: Any, node: int) -> str:
        if len(parsed.messages_list) != 1 or len(parsed.message_object_trees) != 1:
            raise Unreadable("must announce one message")
        about = parsed.messages_list[0].metadata
        request = one_line(about.reply_to_message_id, 100)
        with naming(request):
            if about.src_node_id != node:
                raise Unreadable(f"says that it is from node {about.src_node_id}, but was sent by node {node}")
            if not about.reply_to_message_id:
                raise Unreadable("is not a reply")
            if parsed.messages_list[0].content.items:  # nodes send an empty one
                raise Unreadable("has its content in the announcement")
            try:
                ids = internals.tree_ids(parsed.message_object_trees[0], self.limit.objects)
            except Unreadable as error:
                raise TooLarge(str(error)) from error
        self.replies[node].append(Announced(request, ReplyAccount(self.limit, ids)))
        self.loose.pop(node, None)
        return request

    def _object(self, parsed: Any, node: int) -> None:
        for reply in reversed(self.replies[node]):
            if parsed.object_id in reply.account.ids:
                with naming(reply.request):
                    return reply.account.add(parsed.object_id, parsed.object_content)
        self.loose.setdefault(node, ReplyAccount(self.limit)).add(parsed.object_id, parsed.object_content)
        return None


class naming:
    """Let an Unreadable say to which request of the server it belongs."""

    def __init__(self, request: str) -> None:
        self.request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Unreadable):
            error.request = self.request  # type: ignore[attr-defined]


def address(request: Request) -> str:
    """The address that a request comes from."""
    return request.client.host if request.client else ""


def proxy(server: str, trust: ssl.SSLContext | bool, inspector: Inspector) -> ASGIApp:
    """Create an app that forwards requests for the fleet API to the server at this address."""
    upstream = httpx.AsyncClient(base_url=server, verify=trust, timeout=60, limits=UPSTREAM, trust_env=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            path = FLEET.fullmatch(request.scope["path"])
            if request.method != "POST" or not path:
                raise Refused(404, "only the fleet API is available here")
            site = inspector.site(request.headers)
            caller = inspector.caller(address(request), site)
            try:
                async with caller.places:
                    body = await read(request, inspector.longest(path[1], site), site)
                    inspector.check(path[1], body, site)
                    response = await forward(request, body)
                    del body
                    async with asyncio.timeout(BODY_SECONDS):  # a slow reader must not keep its place for ever
                        await response(scope, receive, send)
            finally:
                caller.waiting -= 1
        except Refused as error:
            # The rest of the body is not read, so the connection cannot be used again.
            await PlainTextResponse(f"{error}\n", error.status, {"connection": "close"})(scope, receive, send)
        except ClientDisconnect:
            return

    async def read(request: Request, most: int, site: tuple[str, int] | None) -> bytes:
        """The body, unless it is too long or takes too long."""
        said = request.headers.get("content-length", "0")
        body = bytearray()
        try:
            if not said.isdecimal() or int(said[:20]) > most:
                raise TooLarge(f"a request has {said[:20]} bytes, expected at most {most}")
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise TooLarge(f"a request has more than {most} bytes")
        except TooLarge as error:
            inspector.refuse_body(site, address(request), str(error))
            raise Refused(413, str(error)) from error
        except TimeoutError as error:
            raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} s") from error
        return bytes(body)

    async def forward(request: Request, body: bytes) -> Response:
        headers = [(name, value) for name, value in request.headers.raw if name not in HOP_HEADERS]
        forwarded = upstream.build_request("POST", request.scope["path"], headers=headers, content=body)
        try:
            received = await upstream.send(forwarded, stream=True)
        except httpx.TransportError:
            return PlainTextResponse("the server is not running\n", 503)  # nodes try again
        status = received.status_code
        if status == 500:  # a full disk, for example; nodes try again after 503, but after 500 their heartbeat ends for good
            log.warning("the server failed at %s; see superlink.log", one_line(request.scope["path"]))
            status = 503
        response = StreamingResponse(received.aiter_raw(), status, background=BackgroundTask(received.aclose))
        lowered = [(name.lower(), value) for name, value in received.headers.raw]
        response.raw_headers = [(name, value) for name, value in lowered if name not in HOP_HEADERS - {b"content-length"}]
        return response

    return app


class Connection(H11Protocol):
    """A connection that must send its headers in time; an address may have a limited number of them.

    This protocol of uvicorn limits the bytes of headers (`h11_max_incomplete_event_size`), the faster one does not.
    """

    open: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: Any) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        Connection.open[self.address] += 1
        self.headers_began: float | None = self.loop.time()
        self.headers_due = self.loop.call_later(HEADER_SECONDS, self._give_up)
        if Connection.open[self.address] > CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Note when headers begin, and that they are complete."""
        if self.headers_began is None and (self.cycle is None or self.cycle.response_complete):
            self.headers_began = self.loop.time()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.headers_began = None

    def _give_up(self) -> None:
        if self.headers_began is not None and self.loop.time() - self.headers_began >= HEADER_SECONDS:
            self.transport.abort()
        else:
            self.headers_due = self.loop.call_later(HEADER_SECONDS / 4, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting it."""
        self.headers_due.cancel()
        Connection.open[self.address] -= 1
        if Connection.open[self.address] <= 0:
            del Connection.open[self.address]
        super().connection_lost(exc)


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(prog="fedme.deployment.reverse_proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int, help="port to listen on")
    parser.add_argument("--server", required=True, help="address of Flower's server, as host:port")
    parser.add_argument("--federation", required=True, type=Path, help="the operator's folder")
    parser.add_argument("--authority", help="certificate of the authority; without it nothing is encrypted")
    parser.add_argument("--certificate", help="the server's certificate")
    parser.add_argument("--key", help="the server's private key")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    trust = ssl.create_default_context(cafile=options.authority) if options.authority is not None else False
    inspector = Inspector(options.federation, authenticated=bool(trust))
    uvicorn.run(
        proxy(f"{'https' if trust else 'http'}://{options.server}", trust, inspector),
        host=options.host,
        port=options.port,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=HEADER_BYTES,
        proxy_headers=False,  # nobody is in front of this proxy whose word on addresses counts
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
