"""Results: show, verdict, compare."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedme.cli import completion
from fedme.cli.app import Folders, Imports, Json, Quiet, Style, all_runs, app, err, examples, next_step, out, quoted
from fedme.config.named_code import load_saved
from fedme.core.atomic_files import RunError, finite
from fedme.results import summary, verdicts, views
from fedme.running import fold_verdicts, local_baseline
from fedme.running.progress import Display


@app.command(epilog=examples("fedme show runs/first", "fedme show runs/first --clients --format csv"))
def show(
    folder: Annotated[Path, typer.Argument(help="A run directory, finished or not.", autocompletion=completion.runs)],
    clients: Annotated[bool, typer.Option("--clients", "-c", help="Show every client's personal model.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show all metrics, even in a narrow terminal.")] = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show the results of a run."""
    run_folder = quoted(folder)
    if clients:
        views.clients(folder, style, out, as_json)
        isolated = summary.config_of(folder)["method"]["name"] == "local"
        judge = f"`{verdicts.command(folder)}` tells which of them gained by joining"
        next_step(f"`fedme report {run_folder}` draws them" if isolated else judge)
    else:
        views.results(folder, style, out, as_json, everything)
        next_step(f"`fedme show {run_folder} --clients` lists every client, `fedme report {run_folder}` draws it")


@app.command(epilog=examples("fedme verdict runs/first", "fedme verdict runs/first --folds 5"))
def verdict(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="A finished run, or runs that differ only in their seed.", autocompletion=completion.runs
        ),
    ],
    folds: Annotated[
        int | None,
        typer.Option(min=2, help="Train the federation again for this many test parts: every sample is tested once."),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Points of accuracy (% of the RMSE alone) that do not matter.")
    ] = 100 * verdicts.MARGIN,
    imports: Imports = False,
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Does joining help? Compare every client's model with the best that it could train alone, on its own test samples.

    The first time, every client is trained alone, with every architecture of the federation.
    These models are kept in .local beside the run directory; runs on the same samples share them.
    The runs of --folds are kept in folds/ of the run directory; the same command continues them after an interruption.
    """
    families = summary.families({folder: summary.read(folder) for folder in folders})
    if len(families) > 1:
        raise RunError("the runs differ in more than their seed; ask for the verdict of one experiment at a time")
    if folds is not None and len(folders) > 1:
        raise RunError(f"--folds is for one run, got {len(folders)}; its verdict is over all samples of every client")
    runs = []
    with Display(err, quiet) as display:
        for folder in families[0].values():
            experiment = load_saved(folder / summary.CONFIG, imports)
            if experiment.method.isolated:
                raise RunError(f"{folder}: the clients trained alone, so there is nothing to compare with")
            if folds is None:
                runs.append(local_baseline.judge(folder, experiment, display))
            else:
                runs.append(fold_verdicts.judge(folder, experiment, folds, display))
    judged = [dataclasses.replace(v, margin=margin / 100) for v in verdicts.over_seeds(runs)]
    if as_json:
        overall = verdicts.overall(judged)
        about = dataclasses.asdict(overall) | {"measure": overall.measure.key, "words": overall.words()}
        print(json.dumps(finite({"overall": about, "clients": [verdicts.plain(v) for v in judged]}), indent=2))
        return
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else f", {folds} folds" if folds is not None else ""
    measure = judged[0].measure
    what = f"{measure.title} in %" if measure.percent else measure.title
    title = f"{folders[0]}{seeds}: test {what} of the federation's models, and of the best that each client could train alone"
    views.verdict_table(title, judged, style, out)
    more = f"`fedme verdict {quoted(folders[0])} --folds 5` tests every sample, " if folds is None and len(runs) == 1 else ""
    next_step(f"{more}`fedme report {all_runs(folders)}` draws it")


@app.command(epilog=examples("fedme compare runs/first runs/second", "fedme compare runs/* --format latex"))
def compare(
    folders: Folders,
    style: Style = "table",
    split: Annotated[Literal["test", "val"], typer.Option(help="Compare results on test or on validation data.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="Use the best round by validation instead of the last round.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs. Runs that differ only in their seed become one line: mean ± std (ddof = 1) over seeds."""
    selection = "best round by validation" if best else "last round"
    lines = summary.compare(folders, split, selection)
    if not lines:
        raise RunError(f"no results for {split}, {selection}: runs without validation data have only the last round")
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
    else:
        views.comparison(lines, style, out)
    few = min(len(line.seeds) for line in lines) == 1
    chance = "; runs with other seeds (--seed 1) tell chance from difference" if few else ""
    next_step(f"`fedme report {all_runs(folders)}` draws them{chance}")
