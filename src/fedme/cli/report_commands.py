"""Looking at runs: report, watch."""

from pathlib import Path
from typing import Annotated

import typer

from fedme import report as reports
from fedme.cli.app import Quiet, app, err, out
from fedme.report import chart_files
from fedme.report import watch as watching
from fedme.running.progress import Display


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, finished or not.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; RUN/report.html, or report.html.")] = None,
    to: Annotated[
        Path | None, typer.Option("--pictures", help="Also save every chart in this directory, as SVG, PNG and PDF.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file that tells and shows what runs came to; several are compared, seeds become bands."""
    target = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    with Display(err, quiet) as display:
        display.note(f"reading {len(folders)} run{'s' * (len(folders) > 1)} ...")
        reports.write(folders, target)
        out.print(str(target), highlight=False, markup=False, soft_wrap=True)
        if to is not None:
            display.note("drawing pictures ...")
            made = chart_files.save_charts(target, to)
            display.note(f"{len(made)} pictures in {to}")


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="A run directory; the run may be going on.")],
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Draw what there is, and end.")] = False,
) -> None:
    """Show the curves of a running experiment, until it is finished. Without a terminal: a line a round."""
    watching.watch(folder, out, every, once)
