"""The command line. Importing a file of this package adds its commands to the application."""

import importlib
import sys
from pathlib import Path

from rich.text import Text

from fedme.cli.app import app, err
from fedme.core.foreign_text import one_line
from fedme.results.tables import print_prose, wrapped
from fedme.running.round_loop import Interrupted
from fedme.running.run_queue import USER_ERRORS

# In the order of the help.
MODULES = (
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
)
for module in MODULES:
    importlib.import_module(f"fedme.cli.{module}")


def main() -> None:
    """Entry point. Errors that a user can fix are printed as one line, without a traceback."""
    # User-defined networks, methods and functions are imported from the working directory, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except USER_ERRORS as error:
        _fail(one_line(str(error)))
    except Interrupted as interrupted:
        print_prose([f"{interrupted}; everything finished is saved"], err)
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("stopped immediately; the last checkpoint is intact")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output closed it
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk, or a folder without write permission
        if error.strerror is None:
            raise
        _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)


def _fail(message: str) -> None:
    text = wrapped(f"error: {message}", err).removeprefix("error:")
    err.print(Text.assemble(("error:", "bold red"), text), highlight=False, soft_wrap=True)
    sys.exit(2)
