"""The application that commands are added to, and what they share: options, consoles, words."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import fedme
from fedme.results.tables import Format, wide

app = typer.Typer(
    help="Personalised federated learning where every client keeps its own model, of its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[str | None, typer.Argument(metavar="FILE", help="A TOML file, or the name of a preset.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the file's.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only notes that bear on the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Style = Annotated[Format, typer.Option("--format", "-f", help="How to print the table.")]

out = wide()
err = Console(stderr=True)


def literal(text: object) -> str:
    """Text that is printed as it is, brackets and all."""
    return str(text).replace("[", "\\[")


def source(file: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """The file, if the first word names one, and the settings."""
    words = overrides or []
    if file is not None and "=" in file and not Path(file).exists():
        return None, [file, *words]
    return file, words


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalised federated learning where every client keeps its own model, of its own architecture."""
    if version:
        print(fedme.__version__)
        raise typer.Exit
