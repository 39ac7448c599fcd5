"""Chromium without a window, driven over a pipe by its DevTools protocol: for pictures, and for trying the page."""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Self

from fedme.core.atomic_files import RunError

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = "Chromium is needed for this; install it (on Debian and Ubuntu: apt-get install chromium)"


def find() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser, as a context manager. `said` collects errors and messages of the console."""

    def __init__(self, width: int = 1280, height: int = 900, scale: float = 1, phone: bool = False) -> None:
        program = find()
        if program is None:
            raise RunError(INSTALL)
        self.folder = tempfile.TemporaryDirectory(prefix="fedme-browser-", ignore_cleanup_errors=True)
        to_read, self.to_write = os.pipe()
        self.to_hear, to_say = os.pipe()
        flags = ["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars"]
        # The page is our own file, and containers often cannot nest another sandbox.
        flags += ["--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={self.folder.name}"]
        # Chromium listens at descriptor 3 and answers at 4; high copies cannot be overwritten by putting them there.
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (to_read, to_say)]
        places = [(os.POSIX_SPAWN_DUP2, each, place) for each, place in zip(high, (3, 4), strict=True)]
        silent = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_WRONLY, 0) for each in (1, 2)]
        self.process = os.posix_spawn(program, [program, *flags, "about:blank"], os.environ, file_actions=[*places, *silent])
        for each in (to_read, to_say, *high):
            os.close(each)
        self.buffer, self.number, self.session = b"", 0, ""
        self.events: deque[dict[str, Any]] = deque()
        self.said: list[str] = []
        self.size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **self.size)

    def __exit__(self, *_: object) -> None:
        os.kill(self.process, signal.SIGTERM)
        os.waitpid(self.process, 0)
        os.close(self.to_write)
        os.close(self.to_hear)
        self.folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol; its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        _write(self.to_write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        if "error" in answer:
            raise RunError(f"the browser refused {method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Show a file, or a page given as text, and wait until it is loaded."""
        if isinstance(page, str):
            file = Path(self.folder.name) / "page.html"
            file.write_text(page, encoding="utf-8")
            page = file
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._note(self._next())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RunError(f"the page failed: {answer['exceptionDetails']['exception'].get('description', script)}")
        return answer["result"].get("value")

    def screenshot(self, whole: bool = False) -> bytes:
        """The visible part, or the whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self, **options: Any) -> bytes:
        """The page in print."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, **options)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not (more := os.read(self.to_hear, 1 << 20)):
                raise RunError("the browser ended unexpectedly")
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        elif event.get("method") == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(each.get("value", each)) for each in params["args"]))


def _write(pipe: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        raise RunError("the browser ended unexpectedly") from None
