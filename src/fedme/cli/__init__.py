"""The command line. One file per family of commands; importing a file adds its commands to the application."""

import importlib
import sys
from pathlib import Path

from fedme.cli.app import app, err, literal
from fedme.core.typed import one_line
from fedme.running.round_loop import Interrupted
from fedme.running.run_queue import USER_ERRORS

FAMILIES = (
    "run_commands",
    "sweep_command",
    "result_commands",
    "audit_command",
    "model_commands",
    "report_commands",
    "list_commands",
    "reproduce_command",
    "demo_command",
    "deploy_commands",
)  # as in the help
for family in FAMILIES:
    importlib.import_module(f"fedme.cli.{family}")


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    # Networks, methods and functions of one's own are found where the command is given, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except USER_ERRORS as error:
        err.print(f"[bold red]error:[/] {literal(one_line(str(error)))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted as stopped:
        err.print(f"{stopped}; everything finished is saved", markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("stopped at once; the last checkpoint is whole")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk, a folder that may not be written to
        if error.strerror is None:
            raise
        err.print(f"[bold red]error:[/] {literal(_told(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _told(error: OSError) -> str:
    """What the system says, and about which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
