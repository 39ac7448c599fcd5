"""Experiments: run, resume, config."""

from pathlib import Path
from typing import Annotated

import typer

from fedme.cli import completion
from fedme.cli.app import (
    FileArgument,
    Imports,
    Json,
    Output,
    Overrides,
    Quiet,
    Rounds,
    Seed,
    app,
    err,
    examples,
    next_step,
    out,
    print_note,
    quoted,
    source,
)
from fedme.config.experiment import ConfigError, load, to_toml
from fedme.config.hints import hints
from fedme.results import views
from fedme.running import run
from fedme.running.progress import Display


@app.command(
    "run", epilog=examples("fedme run digits-fedme --rounds 5 --output runs/first", "fedme run my.toml train.lr=0.05 --seed 1")
)
def run_command(
    file: FileArgument = None,
    overrides: Overrides = None,
    rounds: Rounds = None,
    seed: Seed = None,
    output: Output = None,
    quiet: Quiet = False,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option("--explain-engine", help="Print how operations were run, and why.")] = False,
) -> None:
    """Run an experiment. Without a file: FedMe with four architectures on the bundled digits."""
    experiment, notes = load(*source(file, overrides, rounds=rounds, seed=seed, output=output))
    notes += hints(experiment)
    with Display(err, quiet) as display:
        for note in notes:
            display.note(f"note: {note}", always=True)
        folder = run.start(experiment, display, notes)
    if explain:
        err.print((folder / run.ENGINE).read_text(), end="", markup=False, highlight=False)
    views.results(folder, "table", out, as_json)
    after_run(folder)


def after_run(folder: Path) -> None:
    """Say what to do with a finished run."""
    run_folder = quoted(folder)
    next_step(f"`fedme report {run_folder}` draws it, `fedme show {run_folder} --clients` lists every client")


@app.command(epilog=examples("fedme resume runs/first", "fedme resume runs/first --rounds 60"))
def resume(
    folder: Annotated[Path, typer.Argument(help="A run directory.", autocompletion=completion.runs)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="rounds=N for more rounds; engine.workers, memory, address or device."),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="More rounds than before; the same as rounds=N.")] = None,
    imports: Imports = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, or give a finished one more rounds. The models are those of an uninterrupted run.

    More rounds are refused where the rounds so far depend on their number, as with a cosine schedule or a privacy budget.
    """
    wanted, machine = _rounds_and_machine(source(None, overrides, rounds=rounds)[1])
    with Display(err, quiet) as display:
        if not run.resume(folder, display, imports=imports, rounds=wanted, overrides=machine):
            more = f"; `fedme resume {quoted(folder)} rounds=N` gives it more rounds" if wanted is None else ""
            display.note(f"{folder}: already finished{more}", always=True)
    views.results(folder, "table", out, as_json)
    after_run(folder)


def _rounds_and_machine(words: list[str]) -> tuple[int | None, list[str]]:
    """The number of rounds that `resume` is given, and the other settings."""
    number, others = None, []
    for word in words:
        key, _, text = word.partition("=")
        if key != "rounds":
            others.append(word)
            continue
        if not text.isdecimal():
            raise ConfigError(f"rounds: must be an integer, got '{text}'")
        number = int(text)
    return number, others


@app.command(epilog=examples("fedme config digits-fedme", "fedme config digits-fedme method.name=fml --rounds 50 > my.toml"))
def config(
    file: FileArgument = None, overrides: Overrides = None, rounds: Rounds = None, seed: Seed = None, output: Output = None
) -> None:
    """Check an experiment and print it as TOML with all defaults. Nothing is run."""
    experiment, notes = load(*source(file, overrides, rounds=rounds, seed=seed, output=output))
    for note in [*notes, *hints(experiment)]:
        print_note(note)
    print(to_toml(experiment.plain()), end="")
    next_step("write it to a file with `> my.toml`, edit the file, and `fedme run my.toml`")
