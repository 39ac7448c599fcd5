"""Tables and figures of the papers: reproduce."""

import json
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedme.cli.app import (
    Json,
    NoWait,
    OnRay,
    Quiet,
    ShardOption,
    Style,
    app,
    err,
    examples,
    next_step,
    out,
    print_note,
    print_plans,
    print_table,
)
from fedme.config.experiment import ConfigError
from fedme.core.processors import processors
from fedme.reproduction import (
    catalogue,
    claim_verdicts,
    comparison_tables,
    figures,
    findings,
    measured,
    planned_runs,
    power_plan,
    rate_search,
    results_page,
)
from fedme.reproduction.catalogue import Cell, Result, Scale
from fedme.reproduction.claim_verdicts import Verdict
from fedme.results.tables import Format, render
from fedme.running.progress import Display
from fedme.running.ray_jobs import on_ray
from fedme.running.run_queue import USER_ERRORS, Batch, Planned
from fedme.running.shards import Shard, parse_shard


@app.command(epilog=examples("fedme reproduce --list", "fedme reproduce pfml-table1 --scale smoke"))
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Results such as pfml-table1, or all.", autocompletion=lambda: [*catalogue.results(), "all"]
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List every table and figure with its cost, or the runs of those that are named.")
    ] = False,
    scale: Annotated[Scale, typer.Option(help="The paper's settings, smaller ones, or a smoke test.")] = "small",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds: 0, 1, ...; 1 by default, with --claim the planned number.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW/COLUMN", help="Only these cells (of a figure: CURVE/PANEL); either part may be empty."),
    ] = None,
    root: Annotated[Path, typer.Option("--runs", help="The parent of the run directories.")] = Path("runs/reproduce"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel runs; one per processor by default if faster.")] = None,
    no_runs: Annotated[bool, typer.Option("--no-runs", help="Run nothing; show finished results.")] = False,
    shard: ShardOption = None,
    ray: OnRay = None,
    no_wait: NoWait = False,
    claim: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, help="The planned runs of a claim, by its number on the page of verdicts."),
    ] = None,
    plan: Annotated[
        float | None,
        typer.Option(metavar="HOURS", min=0, help="Print the runs that decide most claims per hour, and their estimated time."),
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Search the learning rate of a run, such as femnist/fedavg, or of a family's runs."),
    ] = None,
    write_page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            help="Write a page with all finished results, and its files beside it. With NAME, --plan and --claim, runs that "
            "are archived there count as finished.",
        ),
    ] = None,
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run the experiments of the papers' tables and figures, and print our numbers beside theirs."""
    if show_list and not names and claim is None:
        return _list(style, as_json)
    if plan is not None:
        return _plan(plan, root, write_page, jobs, style, as_json)
    if rates:
        return _rates(rates, planned_runs.RunFolders(root, scale), jobs, not no_wait, quiet, style, as_json)
    if write_page is not None and claim is None and not names:
        return _page(write_page, root, quiet)
    wanted = catalogue.find(names or [])
    if not wanted and claim is None:
        raise ConfigError("no result named; `fedme reproduce --list` lists them, and `all` runs everything")
    folders = planned_runs.RunFolders(root, scale)
    chosen = {result.name: _chosen(result, only) for result in wanted}
    runs, count = _runs(wanted, chosen), seeds or 1
    if claim is not None:
        row = _planned_claim(claim, scale)
        runs, count = list(dict.fromkeys([*runs, *row.runs])), seeds or row.seeds
    failed: Sequence[str] = ()
    share, archive = parse_shard(shard), _archive(write_page, scale)
    archived = findings.gather(folders, runs, archive).runs if archive else {}
    if show_list:
        return print_plans(planned_runs.planned(runs, folders, range(count), 1, archived), share, style, as_json)
    if not no_runs:
        with Display(err, quiet) as display:
            batch = Batch(display, 1, measured.take, not no_wait, on_ray(ray) if ray is not None else None)
            failed = _run(runs, folders, range(count), archived, jobs, share, batch)
    if claim is not None and not wanted:
        _print_claim(claim, folders, archive, as_json)
        if write_page is not None:
            _page(write_page, root, quiet)
        return _report_errors(failed)
    finished = findings.gather(folders, archive=archive)
    sheets = [comparison_tables.sheet(result, finished, chosen[result.name]) for result in wanted]
    for sheet in sheets:
        # Files hold the complete result, also if only some cells are printed.
        files = comparison_tables.write(comparison_tables.sheet(sheet.result, finished), root / "tables")
        files += figures.draw(sheet.result, finished, root / "tables") if figures.possible() else []
        if not as_json:
            _print(sheet, style, files)
    if as_json:
        print(json.dumps([_plain(sheet) for sheet in sheets], indent=2))
    if not figures.possible() and any(sheet.result.panels or sheet.result.plot for sheet in sheets):
        print_note(figures.MISSING)
    if write_page is not None:
        _page(write_page, root, quiet)
    _report_errors(failed)
    next_step("`--scale full` runs the papers' settings, `--seeds 3` adds intervals, `--page FILE` writes a page")


def _report_errors(errors: Sequence[str]) -> None:
    for line in errors:
        err.print(f"not run: {line}", markup=False, highlight=False, soft_wrap=True)
    if errors:
        raise typer.Exit(1)


def _planned_claim(number: int, scale: Scale) -> power_plan.Row:
    if (row := power_plan.of_claim(number, scale)) is None:
        planned = sorted({known[0] for known in power_plan.numbered().values() if power_plan.of_claim(known[0], scale)})
        raise ConfigError(
            f"--claim {number}: nothing is planned for it at scale {scale}, but for {', '.join(map(str, planned))}"
        )
    return row


def _print_claim(number: int, folders: planned_runs.RunFolders, archive: Path | None, as_json: bool) -> None:
    claim = next(claim for n, claim in power_plan.numbered().values() if n == number)
    verdict = claim_verdicts.of_claim(claim, findings.gather(folders, list(claim.runs), archive))
    if as_json:
        print(json.dumps(_plain_verdict(verdict), indent=2))
    else:
        lines = comparison_tables.claim_lines(verdict).replace("`", "").replace("**", "")
        out.print(lines, end="", markup=False, highlight=False)


def _archive(page: Path | None, scale: Scale) -> Path | None:
    """The measurements beside a page."""
    return page.with_suffix("") / f"{scale}.jsonl" if page else None


def _plan(hours: float, root: Path, page: Path | None, jobs: int | None, style: Format, as_json: bool) -> None:
    """Print the steps of the plan; runs that are archived beside a page count as finished."""
    cores = jobs or processors()
    finished = {
        scale: findings.gather(planned_runs.RunFolders(root, scale), archive=_archive(page, scale))
        for scale in results_page.SCALES
    }
    header = ("claim", "scale", "seeds", "runs", "hours", "chance to decide", "needed for the margin", "command")
    rows, total = [], 0.0
    for step in power_plan.order(finished, hours, cores):
        total += step.minutes / cores / 60
        cells = (step.row.scale, str(step.row.seeds), str(len(step.missing)), f"{total:.1f}")
        if isinstance(step.row, power_plan.Background):
            rows.append((step.row.result, *cells, "", "", step.command))
            continue
        needed = step.row.needed()
        command = f"{step.command} --page {shlex.quote(str(page))}" if page else step.command
        rows.append((str(step.number), *cells, f"{step.chance:.2f}", f"{needed} seeds" if needed else "", command))
    print_table(f"what decides most per hour, with {cores} processors (hours add up)", header, rows, style, as_json)


def _rates(
    names: Sequence[str],
    folders: planned_runs.RunFolders,
    jobs: int | None,
    wait: bool,
    quiet: bool,
    style: Format,
    as_json: bool,
) -> None:
    """Make searches of learning rates, and print what they found."""
    wanted = rate_search.find(names)
    minutes = catalogue.minutes([search.run for search in wanted for _ in search.rates], folders.scale)
    with Display(err, quiet) as display:
        count = planned_runs.jobs_for(minutes, sum(len(search.rates) for search in wanted), jobs)
        points = [point for search in wanted for point in rate_search.points(search, folders, 1 if count > 1 else None)]
        outcomes = Batch(display, count, wait=wait).run([run for point in points for run in point.runs])
    searches = [rate_search.made(search, folders) for search in wanted]
    print_table("validation accuracy in %, mean over clients, seed 0", *rate_search.table(searches), style, as_json)
    _report_errors([f"{outcome.planned.name}: {outcome.error}" for outcome in outcomes if outcome.error])


def _chosen(result: Result, only: Sequence[str] | None) -> list[Cell] | None:
    """The cells that `--only` names as ROW/COLUMN, ROW/ or /COLUMN; of a figure, CURVE/PANEL."""
    if not only:
        return None
    chosen: dict[Cell, None] = {}
    for word in only:
        row, slash, column = word.rpartition("/")  # names of rows may contain a slash
        row, column = (row, column) if slash else (word, "")
        matching = [cell for cell in result.cells if row in ("", cell.row) and column in ("", cell.column)]
        if not matching:
            rows = ", ".join(dict.fromkeys(f"'{cell.row}'" for cell in result.cells))
            columns = ", ".join(dict.fromkeys(f"'{cell.column}'" for cell in result.cells))
            parts = ("rows", "columns") if result.rows else ("curves", "panels")
            raise ConfigError(f"--only: {result.name} has no '{word}'; its {parts[0]} are {rows}, its {parts[1]} {columns}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _runs(wanted: Sequence[Result], chosen: dict[str, list[Cell] | None]) -> list[str]:
    """The names of the runs of some results, or of the chosen cells."""
    names: dict[str, None] = {}
    for result in wanted:
        picked = chosen[result.name]
        names |= dict.fromkeys(result.runs if picked is None else (cell.run for cell in picked))
    return list(names)


def _run(
    names: Sequence[str],
    folders: planned_runs.RunFolders,
    seeds: Sequence[int],
    archived: Mapping[str, Container[int]],
    jobs: int | None,
    share: Shard,
    batch: Batch,
) -> list[str]:
    """Run what is missing, and return the errors."""
    left = [run for run in names for seed in seeds if seed not in archived.get(run, ())]
    minutes = catalogue.minutes(left, folders.scale) / share.count
    batch.jobs = planned_runs.jobs_for(minutes, len(left), jobs)
    plans = share.of(planned_runs.planned(names, folders, seeds, 2 if batch.launch else batch.jobs, archived))
    if minutes > 2 and batch.launch is None:
        batch.display.note(
            f"{len(plans)} runs, about {catalogue.cost(minutes / batch.jobs)} in total ({folders.root / folders.scale})"
        )
    data_plans = [plan for plan in plans if plan.folder.name.endswith("-data-s0")]
    problems = [_inspect_data(plan) for plan in data_plans]
    outcomes = batch.run([plan for plan in plans if plan not in data_plans])
    errors = [f"{outcome.planned.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    return [problem for problem in problems if problem] + errors


def _inspect_data(plan: Planned) -> str:
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
    verdicts = [_plain_verdict(verdict) for verdict in sheet.verdicts]
    return {"name": sheet.result.name, "scale": sheet.scale, "rows": rows, "notes": list(sheet.notes), "claims": verdicts}


def _plain_verdict(verdict: Verdict) -> dict[str, object]:
    return {"claim": verdict.claim.text, "says": verdict.says, "comparisons": [asdict(c) for c in verdict.comparisons]}


def _list(style: Format, as_json: bool) -> None:
    cores = processors()
    header = ("name", "source", "about", "runs", "full", "small", "smoke")
    rows = []
    for result in catalogue.results().values():
        costs = [catalogue.cost(catalogue.minutes(result.runs, scale) / cores) for scale in ("full", "small", "smoke")]
        rows.append((result.name, result.source, result.title, str(len(result.runs)), *costs))
    print_table(f"results, and the approximate time of one seed with {cores} processors", header, rows, style, as_json)
    next_step("`fedme reproduce NAME` runs one of them")


def _page(path: Path, root: Path, quiet: bool) -> None:
    with Display(err, quiet) as display:
        for written in results_page.write(path, root):
            display.note(f"wrote {written}")
