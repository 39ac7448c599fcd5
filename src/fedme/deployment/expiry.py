"""Name certificates that expire soon: once a day in the logs of server and site, and in `fedme deploy status`."""

import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

WARN_DAYS = 30
DAY = 86400.0  # seconds
RENEW = "`fedme deploy renew` makes a new one"  # the remedy at the server
ASK = "ask the operator for the new one (`fedme deploy renew` at the server)"  # and at a site


def days_left(path: Path) -> int | None:
    """Days until a certificate expires; None without one."""
    from cryptography import x509  # here: supervisors of sites stay small

    if not path.exists():
        return None
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def warnings(days: Mapping[str, int | None], remedy: str) -> list[str]:
    """A sentence for every certificate that expires within 30 days or has expired."""
    return [
        f"{name} expires in {left} days; {remedy}" if left >= 0 else f"{name} has expired; {remedy}"
        for name, left in days.items()
        if left is not None and left < WARN_DAYS
    ]


class Reminder:
    """Logs the warnings once a day. Called again and again."""

    def __init__(self, files: Iterable[Path], remedy: str, log: Callable[[str], None]) -> None:
        self.command = [sys.executable, "-m", __name__, remedy, *map(str, files)]
        self.log, self.next_time = log, 0.0

    def __call__(self) -> None:
        if time.monotonic() < self.next_time:
            return
        self.next_time = time.monotonic() + DAY
        # In another process, because this one may rest for months, and what reads certificates takes memory.
        done = subprocess.run(self.command, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            self.log(f"warning: {line}")


def main() -> None:
    """Print the warnings about some files: `python -m fedme.deployment.expiry REMEDY FILE ...`."""
    remedy, *names = sys.argv[1:]
    for line in warnings({Path(name).name: days_left(Path(name)) for name in names}, remedy):
        print(line)


if __name__ == "__main__":
    main()
