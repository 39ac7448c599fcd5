"""The command line. One file per family of commands; importing a file adds its commands to the application."""

import importlib
import sys
from pathlib import Path

from fedme import zoo
from fedme.cli.app import app, err, literal
from fedme.core.method import TaskError
from fedme.core.typed import TypedError
from fedme.datasets.errors import DataError, PartitionError
from fedme.engines.flower import EngineError
from fedme.experiment.config import ConfigError
from fedme.experiment.files import RunError
from fedme.experiment.run import Interrupted

for family in ("runs", "results", "lists", "demo", "deploy"):  # in the order of `fedme --help`
    importlib.import_module(f"fedme.cli.{family}")

ERRORS = (ConfigError, RunError, TaskError, DataError, PartitionError, TypedError, zoo.ArchError, EngineError)


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    # Networks, methods and functions of one's own are found where the command is given, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except ERRORS as error:
        err.print(f"[bold red]error:[/] {literal(error)}", highlight=False, soft_wrap=True)
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
