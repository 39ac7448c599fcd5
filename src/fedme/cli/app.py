"""The application that commands are added to, and their common options and output."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console
from typer.core import TyperGroup

import fedme
from fedme.cli import completion
from fedme.config.experiment import ConfigError
from fedme.core.foreign_text import one_line
from fedme.results.tables import Format, print_prose, render, wide
from fedme.running.run_queue import Planned
from fedme.running.shards import Shard, state


class Commands(TyperGroup):
    """A group of commands. For a wrong name, both click and typer suggest a command: the second one is left out."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if "Did you mean" in error.message and getattr(error, "possibilities", None):
                error.possibilities = None  # type: ignore[attr-defined]
            raise


def examples(*commands: str) -> str:
    """Examples at the end of a command's help."""
    return "\n\n".join(["Examples:", *(command.replace("[", "\\[") for command in commands)])


app = typer.Typer(
    cls=Commands,
    epilog=examples("fedme demo", "fedme run digits-fedme --rounds 5 --output runs/first"),
    help="Personalised federated learning where every client keeps its own model, of its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[
    str | None,
    typer.Argument(metavar="FILE", help="A TOML file, or the name of a preset.", autocompletion=completion.experiments),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE...", help="Settings that override those of the file.", autocompletion=completion.settings
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed; the same as seed=N.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="The number of rounds; the same as rounds=N.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="The run directory; the same as output=DIR.")]
Folders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", autocompletion=completion.runs)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, only notes that affect the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Imports = Annotated[bool, typer.Option("--imports", help="Import code that the folder names; only for folders you trust.")]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only this share of the runs, the I-th of N; the same in every call."),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for runs that other processes work on.")]
OnRay = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Run on the Ray cluster at this address.")]
Style = Annotated[Format, typer.Option("--format", "-f", help="Format of the table.")]

out = wide()
err = Console(stderr=True)


def literal(text: object) -> str:
    """Make text safe to print, and escape brackets, which rich would read as markup."""
    return one_line(str(text), 4000).replace("[", "\\[")


def print_note(text: str) -> None:
    """Print a note to standard error."""
    print_prose([f"note: {text}"], err)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], style: Format, as_json: bool) -> None:
    """Print a table, or its rows as JSON objects."""
    if as_json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
    else:
        render(title, header, rows, style, out)


def print_plans(plans: Sequence[Planned], shard: Shard, style: Format, as_json: bool) -> None:
    """Print runs, numbered as in a job array of one run per job, with their directories and how far they are."""
    numbers = {planned.folder: str(number) for number, planned in enumerate(plans, 1)}
    rows = [(numbers[planned.folder], planned.name, str(planned.folder), state(planned)) for planned in shard.of(plans)]
    print_table(f"{len(rows)} of {len(plans)} runs", ("number", "run", "directory", "state"), rows, style, as_json)


def next_step(text: str) -> None:
    """Say what to do next, on a terminal only: pipes and logs stay clean."""
    if err.is_terminal:
        print_prose([f"Next: {text}"], err, style="dim")


def quoted(*paths: Path | str) -> str:
    """Paths as words of a command."""
    return " ".join(shlex.quote(str(path)) for path in paths)


def all_runs(folders: Sequence[Path]) -> str:
    """Run directories as words of a command: DIR/* if they are all that a directory has."""
    parents = {folder.parent for folder in folders}
    if len(folders) > 3 and len(parents) == 1 and (parent := parents.pop()).is_dir():
        visible = {entry for entry in parent.iterdir() if not entry.name.startswith(".")}
        if visible == set(folders):
            return f"{quoted(parent)}/*"
    return quoted(*folders)


def source(file: str | None, overrides: list[str] | None, **options: object) -> tuple[str | None, list[str]]:
    """Separate the file, if the first argument is one, from the settings; `options` are settings given as options."""
    settings = list(overrides or [])
    if file is not None and "=" in file and not Path(file).exists():
        settings, file = [file, *settings], None
    for key, value in options.items():
        if value is None:
            continue
        if any(word.startswith(f"{key}=") for word in settings):
            raise ConfigError(f"{key} is given twice, as {key}= and as --{key}; give it once")
        settings.append(f"{key}={value}")
    return file, settings


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version, and which compiled code is active.")] = False,
) -> None:
    """Personalised federated learning where every client keeps its own model, of its own architecture."""
    if version:
        from fedme.execution.compiled_library import active, library  # imports torch

        print(f"fedme {fedme.__version__}\n{active(library())}")
        raise typer.Exit
