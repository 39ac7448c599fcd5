"""A reverse proxy for sites: it forwards requests for the fleet API to Flower's server and rejects all others.

Flower serves nodes, operators and server apps on one port and does not authenticate operators. So that port is open to this
machine only, and sites connect to this proxy. Nodes sign their requests, and Flower's server verifies the signatures.
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
HOP_HEADERS = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}  # valid for one connection
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


def proxy(server: str, trust: ssl.SSLContext | bool) -> ASGIApp:
    """Create an app that forwards requests for the fleet API to the server at this address."""
    upstream = httpx.AsyncClient(base_url=server, verify=trust, timeout=60, limits=LIMITS, trust_env=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            response = await forward(Request(scope, receive))
            await response(scope, receive, send)

    async def forward(request: Request) -> Response:
        path = request.scope["path"]
        if request.method != "POST" or not FLEET.fullmatch(path):
            return PlainTextResponse("only the fleet API is available here\n", 404)
        headers = [(name, value) for name, value in request.headers.raw if name not in HOP_HEADERS]
        forwarded = upstream.build_request("POST", path, headers=headers, content=request.stream())
        try:
            received = await upstream.send(forwarded, stream=True)
        except httpx.TransportError:
            return PlainTextResponse("the server is not running\n", 503)  # nodes try again
        response = StreamingResponse(received.aiter_raw(), received.status_code, background=BackgroundTask(received.aclose))
        lowered = [(name.lower(), value) for name, value in received.headers.raw]
        response.raw_headers = [(name, value) for name, value in lowered if name not in HOP_HEADERS]
        return response

    return app


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(prog="fedme.deployment.reverse_proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int, help="port to listen on")
    parser.add_argument("--server", required=True, help="address of Flower's server, as host:port")
    parser.add_argument("--authority", help="certificate of the authority; without it nothing is encrypted")
    parser.add_argument("--certificate", help="the server's certificate")
    parser.add_argument("--key", help="the server's private key")
    options = parser.parse_args()
    trust = ssl.create_default_context(cafile=options.authority) if options.authority is not None else False
    uvicorn.run(
        proxy(f"{'https' if trust else 'http'}://{options.server}", trust),
        host=options.host,
        port=options.port,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
