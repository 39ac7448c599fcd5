"""A read-only page with the status of a federation, on loopback: `/`, `/status.json` and, for Prometheus, `/metrics`."""

import html
import http.server
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.deployment import status

REFRESH = 5  # seconds
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 2rem; display: block; overflow-x: auto }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8885; white-space: nowrap }
.warning { border-left: .3rem solid #b45309; padding-left: .7rem }
"""


class Source:
    """The status, computed at most once per refresh: a question to Flower's server costs a second of processor time."""

    def __init__(self, compute: Callable[[], dict[str, Any]]) -> None:
        self.compute, self.lock = compute, threading.Lock()
        self.value: dict[str, Any] = {}
        self.until = 0.0

    def __call__(self) -> dict[str, Any]:
        with self.lock:
            if time.monotonic() >= self.until:
                self.value = self.compute()
                self.until = time.monotonic() + REFRESH
            return self.value


def server(compute: Callable[[], dict[str, Any]], port: int) -> http.server.ThreadingHTTPServer:
    """A server of the page on this machine's loopback interface."""
    handler = type("Handler", (Handler,), {"source": Source(compute)})
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET requests only."""

    source: ClassVar[Any]
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, JSON, or metrics."""
        answers = {
            "/": ("text/html", page),
            "/status.json": ("application/json", as_json),
            "/metrics": ("text/plain", status.prometheus),
        }
        if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            self._send(403, "text/plain", "only for this machine\n")  # another site's page that names this address
        elif self.path not in answers:
            self._send(404, "text/plain", "not found\n")
        else:
            content_type, write = answers[self.path]
            try:
                state = self.source()
            except (RunError, ConfigError, OSError) as error:  # a damaged file, for instance: the page says so and stays
                self._send(503, "text/plain", f"{error}\n", {"Refresh": str(REFRESH)})
            else:
                self._send(200, content_type, write(state))

    def _send(self, code: int, content_type: str, text: str, also: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        for name, value in (also or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def as_json(state: Mapping[str, Any]) -> str:
    """The status as JSON."""
    return json.dumps(state, indent=2) + "\n"


def page(state: Mapping[str, Any]) -> str:
    """The status as a page."""
    title = f"Federation at {state['address']}" if "sites" in state else f"Site {state['site']}"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f'<p class="warning">{html.escape(text)}</p>' for text in status.warnings(state)]
    parts.append(_table(("", "value"), [(name, text) for name, text in status.facts(state)]))
    if "sites" in state:
        parts += ["<h2>Sites</h2>", _table(*status.site_table(state)), "<h2>Runs</h2>", _table(*status.run_table(state))]
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH}"><title>{html.escape(title)}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
