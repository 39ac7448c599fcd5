"""`make attack`: try all attacks, or those of the parts named; the exit code says whether every promise was kept.

python -m fedme_attacks [--out DIR] [PART ...]
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fedme_attacks import frame
from fedme_attacks.federation import Loopback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all by default: {', '.join(frame.PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("build/attacks"), help="where attacks.md and .json go")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(frame.PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(frame.PARTS)}")
    with Loopback() as federation:
        table = frame.results(asked.parts or frame.PARTS, federation, Console(stderr=True, soft_wrap=True), asked.out)
    print(frame.markdown(table))
    if broken := frame.failed(table):
        sys.exit("\n".join(f"broken: {name}" for name in broken))


if __name__ == "__main__":
    main()
