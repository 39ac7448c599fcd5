"""Reports and live curves: report, watch."""

from pathlib import Path
from typing import Annotated

import typer

from fedme import report as reports
from fedme.cli import completion
from fedme.cli.app import Folders, Quiet, app, err, examples, next_step, out, quoted
from fedme.report import chart_files, watch as watching
from fedme.running.progress import Display


@app.command(epilog=examples("fedme report runs/first", "fedme report runs/first runs/second --output report.html"))
def report(
    folders: Folders,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; RUN/report.html, or report.html for several runs.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", help="Also save every chart in this directory, as SVG, PNG, PDF and CSV.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file with the results of runs, in text and charts. Several runs are compared; seeds become bands."""
    target = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    with Display(err, quiet) as display:
        display.note(f"reading {len(folders)} run{'s' * (len(folders) > 1)} ...")
        reports.write(folders, target)
        out.print(str(target), highlight=False, markup=False, soft_wrap=True)
        if pictures is not None:
            display.note("drawing pictures ...")
            files = chart_files.save_charts(target, pictures)
            display.note(f"{len(files)} pictures in {pictures}")
    next_step(f"open {target.resolve().as_uri()} in a browser; it is one file and needs no network")


@app.command(epilog=examples("fedme watch runs/first", "fedme watch runs/first --once"))
def watch(
    folder: Annotated[
        Path, typer.Argument(help="A run directory; the run may be in progress.", autocompletion=completion.runs)
    ],
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Draw the current state and exit.")] = False,
) -> None:
    """Show the curves of a running experiment until it is finished. Without a terminal, print one line per round."""
    watching.watch(folder, out, every, once)
    next_step(f"`fedme show {quoted(folder)}` prints the results, `fedme report {quoted(folder)}` draws them")
