"""The papers' tables and figures, made again: reproduce."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedme.cli.app import Json, Quiet, Style, app, err, out
from fedme.config.experiment import ConfigError
from fedme.core.processors import processors
from fedme.reproduction import catalogue, comparison_tables, figures, findings, measured, planned_runs, results_page
from fedme.reproduction.catalogue import Cell, Result, Scale
from fedme.results.tables import Format, render
from fedme.running.progress import Display
from fedme.running.run_queue import USER_ERRORS, Batch, Planned


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Results, as pfml-table1; or all.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show every table and figure, and what it costs.")] = False,
    scale: Annotated[
        Scale, typer.Option(help="The paper's setting, a smaller one, or one that only shows that it runs.")
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, ...")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW/COLUMN", help="Only such cells, or CURVE/PANEL of a figure; either may be left out."),
    ] = None,
    root: Annotated[Path, typer.Option("--runs", help="Where the run directories are.")] = Path("runs/reproduce"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; one a processor by default, if that pays.")] = None,
    no_runs: Annotated[bool, typer.Option("--no-runs", help="Run nothing: show what is finished.")] = False,
    write_page: Annotated[
        Path | None, typer.Option("--page", help="Write a page with everything finished at any scale, and its files beside it.")
    ] = None,
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run the experiments behind the papers' tables and figures, and put our numbers beside theirs."""
    if show_list:
        return _list(style, as_json)
    if write_page is not None:
        return _page(write_page, root, quiet)
    wanted = catalogue.find(names or [])
    if not wanted:
        raise ConfigError("name a result, or all; `fedme reproduce --list` shows them")
    folders = planned_runs.RunFolders(root, scale)
    chosen = {result.name: _chosen(result, only) for result in wanted}
    failed: Sequence[str] = ()
    if not no_runs:
        failed = _run(wanted, chosen, folders, range(seeds), jobs, quiet)
    told = findings.gather(folders)
    sheets = [comparison_tables.sheet(result, told, chosen[result.name]) for result in wanted]
    for each in sheets:
        files = comparison_tables.write(
            comparison_tables.sheet(each.result, told), root / "tables"
        )  # the whole result, whatever was chosen now
        files += figures.draw(each.result, told, root / "tables") if figures.possible() else []
        if not as_json:
            _print(each, style, files)
    if as_json:
        print(json.dumps([_plain(each) for each in sheets], indent=2))
    if not figures.possible() and any(each.result.panels or each.result.plot for each in sheets):
        err.print(f"note: {figures.MISSING}", markup=False, highlight=False)
    for line in failed:
        err.print(f"not run: {line}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _chosen(result: Result, only: Sequence[str] | None) -> list[Cell] | None:
    """The cells that `--only` names, as ROW/COLUMN, ROW/ or /COLUMN; of a figure, its curves and panels."""
    if not only:
        return None
    found = []
    for word in only:
        row, slash, column = word.rpartition("/")  # rows may have a slash of their own
        row, column = (row, column) if slash else (word, "")
        mine = [cell for cell in result.cells if row in ("", cell.row) and column in ("", cell.column)]
        if not mine:
            rows = ", ".join(dict.fromkeys(f"'{cell.row}'" for cell in result.cells))
            columns = ", ".join(dict.fromkeys(f"'{cell.column}'" for cell in result.cells))
            kinds = ("rows", "columns") if result.rows else ("curves", "panels")
            raise ConfigError(f"--only: {result.name} has no '{word}'; its {kinds[0]} are {rows}, its {kinds[1]} {columns}")
        found += [cell for cell in mine if cell not in found]
    return found


def _run(
    wanted: Sequence[Result],
    chosen: dict[str, list[Cell] | None],
    folders: planned_runs.RunFolders,
    seeds: Sequence[int],
    jobs: int | None,
    quiet: bool,
) -> list[str]:
    """Run what is missing; why what could not be run could not."""
    names: dict[str, None] = {}
    for result in wanted:
        picked = chosen[result.name]
        names |= dict.fromkeys(result.runs if picked is None else (cell.run for cell in picked))
    minutes = catalogue.minutes(names, folders.scale) * len(seeds)
    at_once = planned_runs.jobs_for(minutes, len(names) * len(seeds), jobs)
    plans = planned_runs.planned(list(names), folders, seeds, at_once)
    with Display(err, quiet) as display:
        if minutes > 2:
            display.note(
                f"{len(plans)} runs, about {catalogue.cost(minutes / at_once)} in all ({folders.root / folders.scale})"
            )
        looks = [plan for plan in plans if plan.folder.name.endswith("-data-s0")]
        problems = [_look(plan) for plan in looks]
        outcomes = Batch(display, at_once, measured.take).run([plan for plan in plans if plan not in looks])
    return [each for each in problems if each] + [f"{each.planned.name}: {each.error}" for each in outcomes if each.error]


def _look(plan: Planned) -> str:
    try:
        measured.count_samples(plan.config, plan.folder)
    except USER_ERRORS as error:
        return f"{plan.name}: {error}"
    return ""


def _print(sheet: comparison_tables.Sheet, style: Format, files: Sequence[Path]) -> None:
    render(f"{sheet.result.source}: {sheet.result.title}", sheet.header, sheet.rows, style, out)
    if style != "table":
        return
    for note in sheet.notes:
        out.print(note, markup=False, highlight=False)
    for verdict in sheet.verdicts:
        out.print(
            comparison_tables.claim_lines(verdict).replace("`", "").replace("**", ""), end="", markup=False, highlight=False
        )
    out.print(f"Written: {', '.join(str(path) for path in files)}\n", markup=False, highlight=False)


def _plain(sheet: comparison_tables.Sheet) -> dict[str, object]:
    rows = [dict(zip(sheet.header, row, strict=True)) for row in sheet.rows]
    verdicts = [
        {"claim": each.claim.text, "says": each.says, "comparisons": [asdict(c) for c in each.comparisons]}
        for each in sheet.verdicts
    ]
    return {"name": sheet.result.name, "scale": sheet.scale, "rows": rows, "notes": list(sheet.notes), "claims": verdicts}


def _list(style: Format, as_json: bool) -> None:
    cores = processors()
    header = ("name", "source", "about", "runs", "full", "small", "smoke")
    rows = []
    for result in catalogue.results().values():
        costs = [catalogue.cost(catalogue.minutes(result.runs, scale) / cores) for scale in ("full", "small", "smoke")]
        rows.append((result.name, result.source, result.title, str(len(result.runs)), *costs))
    if as_json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
        return
    render(f"results, and about how long one seed takes with {cores} processors", header, rows, style, out)


def _page(path: Path, root: Path, quiet: bool) -> None:
    with Display(err, quiet) as display:
        for written in results_page.write(path, root):
            display.note(f"wrote {written}")
