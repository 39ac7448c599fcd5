"""The command line, as ``fedme`` and as ``python -m fedme``. Ctrl-C is quiet even while libraries are being loaded."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from fedme.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
