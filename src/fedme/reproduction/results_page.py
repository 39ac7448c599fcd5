"""The page with all finished results: tables, curves and claims, and the commands that make them.

Measurements are archived beside the page, so that a later call can extend it without the earlier run directories.
"""

import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from fedme.core.atomic_files import write_text
from fedme.reproduction import catalogue, claim_verdicts, comparison_tables, figures, findings
from fedme.reproduction.catalogue import Scale
from fedme.reproduction.comparison_tables import Sheet
from fedme.reproduction.findings import Findings
from fedme.reproduction.planned_runs import RunFolders
from fedme.results.tables import text

SCALES: tuple[Scale, ...] = ("full", "small")
HEAD = importlib.resources.files("fedme") / "reproduction" / "data" / "head.md"


def write(path: Path, root: Path) -> list[Path]:
    """Write the page and, in a directory of its name, measurements, tables and curves; returns the files written."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [file for suffix in ("csv", "tex", *figures.FORMATS) for file in folder.glob(f"*.{suffix}")]:
        old.unlink()
    written, by_scale = [], dict[Scale, Findings]()
    for scale in SCALES:
        archive = folder / f"{scale}.jsonl"
        by_scale[scale] = findings.gather(RunFolders(root, scale), archive=archive)
        findings.write_archive(by_scale[scale], archive)
        written.append(archive)
    parts = [HEAD.read_text(encoding="utf-8"), _claims(by_scale), _known_issues()]
    missing = []
    # Seconds depend on the load of the machine, so they are not on the page.
    for result in (result for result in catalogue.results().values() if result.unit != "seconds"):
        sheets = [comparison_tables.sheet(result, by_scale[scale]) for scale in SCALES]
        shown = [sheet for sheet in sheets if sheet.finished]
        if not shown:
            missing.append(f"`{result.name}`")
        for sheet in shown:
            written += comparison_tables.write(sheet, folder, ("csv", "latex"))
            written += figures.draw(result, by_scale[sheet.scale], folder)
        parts += [_section(shown, folder)] if shown else []
    parts.append(_missing(missing))
    write_text(path, "\n".join(parts))
    return [*written, path]


def _section(sheets: Sequence[Sheet], folder: Path) -> str:
    result = sheets[0].result
    parts = [f"## {result.source}: {result.title}\n"]
    for sheet in sheets:
        parts.append("\n".join(["```", *comparison_tables.commands(sheet), "```\n"]))
        parts.append(f"{sheet.notes[0]}\n")
        if (folder / f"{result.name}-{sheet.scale}.png").exists():
            parts.append(f"![{result.title}]({folder.name}/{result.name}-{sheet.scale}.png)\n")
        parts.append(_finished(sheet))
    parts += [f"{note}\n" for note in result.notes]
    return "\n".join(parts)


def _finished(sheet: Sheet) -> str:
    """The table of the finished cells, and the number of the others."""
    left = len(sheet.rows) - len(sheet.finished)
    table = text(sheet.header, sheet.finished, "markdown")
    return f"{table}\n{left} of {len(sheet.rows)} cells have not been run at this scale.\n" if left else table


def _claims(by_scale: dict[Scale, Findings]) -> str:
    lines = [
        "## Claims\n",
        "The claims of the papers, and the verdicts of our runs. The comparisons behind each verdict follow the table.\n",
    ]
    rows, details = [], []
    for number, claim in enumerate((claim for claim in catalogue.claims() if claim.kind != "slower"), 1):
        judged = {scale: claim_verdicts.of_claim(claim, by_scale[scale]) for scale in SCALES}
        rows.append((str(number), claim.text, claim.source, *(verdict.says for verdict in judged.values())))
        for scale, verdict in judged.items():
            if verdict.says != "not run":
                details.append(f"**{number}**, scale {scale}:\n\n{comparison_tables.claim_lines(verdict)}")
    lines.append(text(("", "claim", "source", *(f"{scale} scale" for scale in SCALES)), rows, "markdown"))
    return "\n".join([*lines, *details])


def _known_issues() -> str:
    lines = [f"* {issue.text} ({issue.source})\n" for issue in catalogue.known_issues()]
    return "## What the papers' own numbers show\n\n" + "".join(lines)


def _missing(names: Sequence[str]) -> str:
    seconds = [f"`fedme reproduce {result.name}`" for result in catalogue.results().values() if result.unit == "seconds"]
    lines = [f"Nothing is finished for {', '.join(names)}. `fedme reproduce NAME` runs them.\n"] if names else []
    lines.append(f"Seconds depend on the machine and its load: {', '.join(seconds)} measures them on yours.\n")
    return "## Not on this page\n\n" + "\n".join(lines)
