"""The page that shows everything finished: tables, curves and claims, each with the command that makes it.

Measurements are kept beside the page, so a later call extends it without the run directories of the earlier ones.
"""

import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from fedme.core.atomic_files import write_text
from fedme.reproduction import catalogue, comparison_tables, figures, findings, verdicts
from fedme.reproduction.catalogue import Claim, Scale
from fedme.reproduction.comparison_tables import Sheet
from fedme.reproduction.findings import Findings
from fedme.reproduction.planned_runs import Spot
from fedme.results.tables import text

SCALES: tuple[Scale, ...] = ("full", "small")
HEAD = importlib.resources.files("fedme") / "reproduction" / "data" / "head.md"


def write(path: Path, root: Path) -> list[Path]:
    """Write the page and, in a directory of its name, the measurements, tables and curves; the files written."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [file for suffix in ("csv", "tex", *figures.FORMATS) for file in folder.glob(f"*.{suffix}")]:
        old.unlink()  # what is finished is written anew
    written, told = [], dict[Scale, Findings]()
    for scale in SCALES:
        archive = folder / f"{scale}.jsonl"
        told[scale] = findings.gather(Spot(root, scale), archive=archive)
        findings.write_archive(told[scale], archive)
        written.append(archive)
    parts = [HEAD.read_text(encoding="utf-8"), _claims(told), _known()]
    missing = []
    # Seconds depend on what else the machine did: they are not for a page.
    for result in (each for each in catalogue.results().values() if each.unit != "seconds"):
        sheets = [comparison_tables.sheet(result, told[scale]) for scale in SCALES]
        shown = [each for each in sheets if each.finished]
        if not shown:
            missing.append(f"`{result.name}`")
        for each in shown:
            files = comparison_tables.write(each, folder, ("csv", "latex"))
            files += figures.draw(result, told[each.scale], folder)
            written += files
        parts += [_section(shown, folder)] if shown else []
    parts.append(_missing(missing))
    write_text(path, "\n".join(parts))
    return [*written, path]


def _section(sheets: Sequence[Sheet], folder: Path) -> str:
    result = sheets[0].result
    parts = [f"## {result.source}: {result.title}\n"]
    for each in sheets:
        parts.append("\n".join(["```", *comparison_tables.commands(each), "```\n"]))
        parts.append(f"{each.notes[0]}\n")
        if (folder / f"{result.name}-{each.scale}.png").exists():
            parts.append(f"![{result.title}]({folder.name}/{result.name}-{each.scale}.png)\n")
        parts.append(_finished(each))
    parts += [f"{note}\n" for note in result.notes]
    return "\n".join(parts)


def _finished(sheet: Sheet) -> str:
    """The table without what has not been run, and how much that is."""
    left = len(sheet.rows) - len(sheet.finished)
    table = text(sheet.header, sheet.finished, "markdown")
    return f"{table}\n{left} of {len(sheet.rows)} places are not run at this scale.\n" if left else table


def _claims(told: dict[Scale, Findings]) -> str:
    lines = [
        "## Claims\n",
        "What the papers say, and what the runs say. The comparisons behind each verdict follow the table.\n",
    ]
    rows, details = [], []
    for number, claim in enumerate((each for each in catalogue.claims() if each.kind != "slower"), 1):
        found = {scale: verdicts.of_claim(claim, told[scale]) for scale in SCALES}
        rows.append((str(number), claim.text, claim.source, *(found[scale].says for scale in SCALES)))
        details += [_detail(number, claim, scale, found[scale]) for scale in SCALES if found[scale].says != "not run"]
    lines.append(text(("", "claim", "source", *(f"{scale} scale" for scale in SCALES)), rows, "markdown"))
    return "\n".join([*lines, *details])


def _detail(number: int, claim: Claim, scale: Scale, verdict: verdicts.Verdict) -> str:
    return f"**{number}**, scale {scale}:\n\n" + comparison_tables.claim_lines(verdict)


def _known() -> str:
    lines = [f"* {each.text} ({each.source})\n" for each in catalogue.known()]
    return "## What the papers' own numbers show\n\n" + "".join(lines)


def _missing(names: Sequence[str]) -> str:
    seconds = [f"`fedme reproduce {each.name}`" for each in catalogue.results().values() if each.unit == "seconds"]
    told = [f"Nothing is finished for {', '.join(names)}. `fedme reproduce NAME` runs them.\n"] if names else []
    told.append(f"Seconds depend on the machine and on what else it does: {', '.join(seconds)} prints those of yours.\n")
    return "## Not on this page\n\n" + "\n".join(told)
