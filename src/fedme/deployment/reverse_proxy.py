"""The door for sites: hands on to Flower's server what nodes ask of its fleet API, and nothing else.

Flower serves nodes, operators and server apps on one port, and does not ask operators who they are. So that port is for this
machine alone, and this program listens where sites connect. Nodes sign what they ask, which the server checks as before.
"""

import argparse
import re
import ssl

import httpx
import uvicorn
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

FLEET = re.compile(r"/v1/fleet/[a-z-]+")
OWN = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}  # headers of one connection
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


def gate(server: str, trust: ssl.SSLContext | bool) -> ASGIApp:
    """What hands on requests for the fleet API to the server at this address."""
    inside = httpx.AsyncClient(base_url=server, verify=trust, timeout=60, limits=LIMITS, trust_env=False)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope, receive)
            await (await handed_on(request))(scope, receive, send)

    async def handed_on(request: Request) -> Response:
        path = request.scope["path"]
        if request.method != "POST" or not FLEET.fullmatch(path):
            return PlainTextResponse("only sites are served here\n", 404)
        headers = [(name, value) for name, value in request.headers.raw if name not in OWN]
        asked = inside.build_request("POST", path, headers=headers, content=request.stream())
        try:
            got = await inside.send(asked, stream=True)
        except httpx.TransportError:
            return PlainTextResponse("the server is not up\n", 503)  # nodes try again
        answer = StreamingResponse(got.aiter_raw(), got.status_code, background=BackgroundTask(got.aclose))
        answer.raw_headers = [(name.lower(), value) for name, value in got.headers.raw if name.lower() not in OWN]
        return answer

    return answer


def main() -> None:
    """Listen until told to end."""
    parser = argparse.ArgumentParser(prog="fedme.deployment.reverse_proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", required=True, help="where to listen")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--server", required=True, help="Flower's server, as host:port")
    parser.add_argument(
        "--authority", help="the certificate that the server's is signed with; without one nothing is encrypted"
    )
    parser.add_argument("--certificate", help="the server's certificate")
    parser.add_argument("--key", help="its private key")
    asked = parser.parse_args()
    secure = asked.authority is not None
    app = gate(
        f"{'https' if secure else 'http'}://{asked.server}",
        ssl.create_default_context(cafile=asked.authority) if secure else False,
    )
    uvicorn.run(
        app,
        host=asked.host,
        port=asked.port,
        ssl_certfile=asked.certificate,
        ssl_keyfile=asked.key,
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
