"""A server that lies: it passes a site's requests on to the real one, and changes the answers."""

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fedme_test_deployment import free_port

Lies = dict[str, Callable[[bytes], bytes]]  # by the last part of the path: the answer that the site gets instead
KEPT = ("content-type", "x-flwr")  # headers of an answer


class HostileProxy:
    """Serves sites on `port`, with the certificate of the federation, in a thread."""

    def __init__(self, control: str, server: Path, lies: Lies) -> None:
        self.lies, self.port = lies, free_port()
        self.requests: list[str] = []  # the last parts of their paths
        trust = ssl.create_default_context(cafile=str(server / "ca.crt"))
        self._upstream = {"base_url": f"https://{control}", "verify": trust, "timeout": 60, "trust_env": False}
        files = {"ssl_certfile": str(server / "server.crt"), "ssl_keyfile": str(server / "server.key")}
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, "127.0.0.1", self.port, interface="asgi3", lifespan="off", log_level="error", ws="none", **files
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "HostileProxy":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the lying server did not start"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = request.url.path.rpartition("/")[2]
        self.requests.append(name)
        skipped = ("host", "connection", "content-length", "accept-encoding")
        headers = [(key, value) for key, value in request.headers.items() if key not in skipped]
        async with httpx.AsyncClient(**self._upstream) as line:
            answer = await line.post(request.url.path, headers=headers, content=await request.body())
        body = answer.content
        if answer.status_code == 200 and name in self.lies:
            body = self.lies[name](body)
        kept = {key: value for key, value in answer.headers.items() if key.startswith(KEPT)}
        await Response(body, answer.status_code, kept)(scope, receive, send)
