"""`make reliability`: run all parts, or those named; the exit code says whether everything held.

python -m fedme_reliability [--quick] [--out DIR] [PART ...]
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fedme_reliability import frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all by default: {', '.join(frame.PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a few tries of everything")
    parser.add_argument("--out", type=Path, default=Path("build/reliability"), help="where reliability.md and .json go")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(frame.PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(frame.PARTS)}")
    table = frame.results(asked.parts or frame.PARTS, asked.quick, Console(stderr=True), asked.out)
    print(frame.markdown(table))
    if broken := frame.failed(table):
        sys.exit("\n".join(f"failed: {row['part']}: {row['what']}" for row in broken))


if __name__ == "__main__":
    main()
