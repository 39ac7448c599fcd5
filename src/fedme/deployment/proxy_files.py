"""What the server app and the proxy tell each other, as files of the server: how large replies may be, what was refused.

The proxy reads nothing else of FedMe: it starts quickly and stays small.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fedme.federation.flower.internals import key_bytes, public_key
from fedme.federation.flower.reply_limits import SMALLEST, ReplyLimit

LIMITS = "reply_limits"  # a folder with a file per run
REFUSED = "refused.jsonl"
MOST_BYTES = 1 << 20  # of the file of refusals, after which it starts again


def announce_limit(server: Path, run: str, limit: ReplyLimit) -> None:
    """Tell the proxy how large replies of a run may be. The limit only grows: replies may be on their way."""
    path = server / LIMITS / f"{run}.json"
    known = _limit(path)
    if known | limit != known or not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(known | limit)))
        partial.replace(path)


def withdraw_limit(server: Path, run: str) -> None:
    """Forget the limit of a run that has ended."""
    (server / LIMITS / f"{run}.json").unlink(missing_ok=True)


def announced_limit(server: Path) -> ReplyLimit:
    """The largest limit of all runs."""
    limit = SMALLEST
    for path in server.glob(f"{LIMITS}/*.json"):
        limit |= _limit(path)
    return limit


def _limit(path: Path) -> ReplyLimit:
    with suppress(OSError, ValueError, TypeError):
        return ReplyLimit(**json.loads(path.read_text()))
    return SMALLEST


def refuse(server: Path, request: str, site: str, reason: str) -> None:
    """Write down that a site's reply to this request of the server was refused."""
    path = server / REFUSED
    if path.exists() and path.stat().st_size > MOST_BYTES:
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(json.dumps({"request": request, "site": site, "reason": reason}) + "\n")


class Refusals:
    """Why the proxy has refused replies, by request; the file is read again only when it has grown."""

    def __init__(self, server: Path) -> None:
        self.path, self.size = server / REFUSED, -1
        self.reasons: dict[str, str] = {}

    def __call__(self) -> dict[str, str]:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.size:
            self.size, self.reasons = size, dict(self._read()) if size else {}
        return self.reasons

    def _read(self) -> Iterator[tuple[str, str]]:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError):  # the last line may be incomplete
                row = json.loads(line)
                yield row["request"], row["reason"]


def registered_keys(folder: Path) -> dict[bytes, tuple[str, int]]:
    """The name and the node of every site whose key is registered, by key."""
    known = {}
    for path in folder.glob("server/nodes/*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # being written, or Flower refused the key
            node = int(json.loads(path.read_text())["node-id"])
            key = public_key((folder / "sites" / path.stem / "key.pub").read_bytes())
            known[key_bytes(key)] = path.stem, node
    return known
