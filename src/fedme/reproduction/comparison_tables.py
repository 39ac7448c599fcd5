"""Tables with one line per cell: the paper's number, ours, the difference and a verdict; as Markdown, CSV or LaTeX."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedme.core.atomic_files import write_text
from fedme.reproduction import claim_verdicts
from fedme.reproduction.catalogue import Cell, Result, Scale, claims, family_of
from fedme.reproduction.claim_verdicts import Verdict
from fedme.reproduction.findings import ACCURACIES, SETTLED, Findings, Pick
from fedme.reproduction.planned_runs import scale_of
from fedme.results.summary import spread
from fedme.results.tables import text

DIGITS = {"%": 2, "samples": 2, "clients": 1, "seconds": 3}
SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


@dataclass(frozen=True)
class Sheet:
    """A result at a scale, ready to be shown."""

    result: Result
    scale: Scale
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def finished(self) -> tuple[tuple[str, ...], ...]:
        """The rows that have one of our numbers."""
        ours = next(i for i, name in enumerate(self.header) if name.startswith("ours"))
        return tuple(row for row in self.rows if row[ours])

    def text(self, style: str) -> str:
        """The table as text."""
        return text(self.header, self.rows, style)  # type: ignore[arg-type]


def sheet(result: Result, findings: Findings, chosen: Sequence[Cell] | None = None) -> Sheet:
    """The table of a result, or only of the chosen cells."""
    cells = result.cells if chosen is None else chosen
    header, rows = _table(result, findings, cells) if result.rows else _ends(result, findings, cells)
    decided = findings.scale != "smoke"  # it only shows that everything runs
    judged = [claim_verdicts.of_claim(claim, findings) for claim in claims() if decided and result.name in claim.results]
    return Sheet(
        result,
        findings.scale,
        header,
        tuple(rows),
        (_scale_note(result, findings), *result.notes),
        tuple(verdict for verdict in judged if verdict.says != "not run"),
    )


def _scale_note(result: Result, findings: Findings) -> str:
    """What the scale changes, for every family that has finished runs."""
    families: dict[str, dict[str, None]] = {}
    for run in result.runs:
        if run in findings.runs and (says := family_of(run).at(scale_of(run, findings.scale)).says):
            families.setdefault(says, {})[run.partition("/")[0]] = None
    heading = "Scale full: the paper's setting" if findings.scale == "full" else f"Scale {findings.scale}"
    return "; ".join([heading, *(f"{', '.join(names)}: {says}" for says, names in families.items())]) + "."


def _table(result: Result, findings: Findings, cells: Sequence[Cell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    unit = " %" if result.unit == "%" else ""
    header = ["", "column", f"paper{unit}", f"ours{unit}", "difference", "verdict", "seeds"]
    rows = [_line(cell, result, findings) for cell in cells]
    for name, values_of in _extra_columns(result, findings):
        values = [_shown(values_of(cell), result) for cell in cells]
        if any(values):
            header.append(name)
            rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
    return tuple(header), [tuple(row) for row in rows]


ValuesOf = Callable[[Cell], dict[int, float]]


def _extra_columns(result: Result, findings: Findings) -> list[tuple[str, ValuesOf]]:
    """Columns besides the main number, which is always that of the last round."""
    if result.unit != "%":
        return []

    def picked(pick: Pick) -> ValuesOf:
        return lambda cell: findings.values(cell.run, cell.measure, pick)

    means = {ACCURACIES[cell.measure][1] for cell in result.cells if cell.measure in ACCURACIES}
    other = "client mean %" if means == {"pooled"} else "pooled %"
    columns: list[tuple[str, ValuesOf]] = [(other, lambda cell: findings.values(cell.run, cell.measure, other=True))]
    shown = {(cell.run, cell.measure) for cell in result.cells}
    if not any((run, "own") in shown for run, measure in shown if measure == "tuned"):  # the table has no rows for it
        columns.append(
            ("before fine-tuning %", lambda cell: findings.values(cell.run, "own") if cell.measure == "tuned" else {})
        )
    columns.append(("best round by validation %", picked("validation")))
    if result.settled:
        columns.append((f"mean of the last {SETTLED} evaluations %", picked("settled")))
    if result.best_on_test:
        columns.append(("best round on test data % (the paper's rule)", picked("test")))
    return columns


def _line(cell: Cell, result: Result, findings: Findings) -> list[str]:
    values = findings.values(cell.run, cell.measure)
    paper = "" if cell.paper is None else _number(cell.paper, result)
    paper += "" if cell.std is None else f" ± {_number(cell.std, result)}"
    difference = ""
    if values and cell.paper is not None:
        difference = _number(spread(list(values.values()))[0] - cell.paper, result, "+")
    verdict = claim_verdicts.of_cell(cell, result, findings) if findings.scale != "smoke" else ""
    seeds = str(len(values)) if values else ""
    return [cell.row, cell.column, paper, _shown(values, result), difference, verdict, seeds]


def _shown(values: dict[int, float], result: Result) -> str:
    if not values:
        return ""
    mean, std = spread(list(values.values()))
    return _number(mean, result) if std is None else f"{_number(mean, result)} ± {_number(std, result)}"


def _number(value: float, result: Result, sign: str = "") -> str:
    """With the digits of the unit; numbers of samples without digits if they are integers."""
    digits = 0 if result.unit == "samples" and value == round(value) else DIGITS[result.unit]
    return f"{value:{sign}.{digits}f}"


def _ends(result: Result, findings: Findings, cells: Sequence[Cell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The last value of every curve of a figure."""
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        values = findings.values(cell.run, cell.measure)
        first = next(iter(findings.runs.get(cell.run, {}).values()), None)
        last = max((t for curve in first.curves.values() for t in curve.rounds), default=0) + 1 if first else ""
        rows.append((cell.row, cell.column, _shown(values, result), str(last), str(len(values)) if values else ""))
    return ("curve", "panel", "ours", "after rounds", "seeds"), rows


def write(sheet: Sheet, folder: Path, styles: Sequence[str] = tuple(SUFFIXES)) -> list[Path]:
    """The table as Markdown, CSV and LaTeX files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for style in styles:
        suffix = SUFFIXES[style]
        path = folder / f"{sheet.result.name}-{sheet.scale}.{suffix}"
        write_text(path, markdown(sheet) if style == "markdown" else sheet.text(style))
        written.append(path)
    return written


def markdown(sheet: Sheet) -> str:
    """Title, table, notes and claims."""
    parts = [f"## {sheet.result.source}: {sheet.result.title}\n", *_paragraphs(sheet.notes[:1]), sheet.text("markdown")]
    parts += _paragraphs(sheet.notes[1:])
    if sheet.verdicts:
        parts.append("".join(claim_lines(verdict) for verdict in sheet.verdicts))
    return "\n".join(parts)


def commands(sheet: Sheet) -> list[str]:
    """The commands that make exactly the finished cells: one for every number of seeds."""
    seeds = sheet.header.index("seeds")
    counts = sorted({row[seeds] for row in sheet.finished}, key=int, reverse=True)
    return [_command(sheet, count, [row for row in sheet.finished if row[seeds] == count]) for count in counts]


def _command(sheet: Sheet, seeds: str, rows: Sequence[tuple[str, ...]]) -> str:
    words = ["fedme", "reproduce", sheet.result.name, "--scale", sheet.scale, "--seeds", seeds]
    if len(rows) < len(sheet.rows):
        for column in dict.fromkeys(row[1] for row in rows):
            names = [row[0] for row in rows if row[1] == column]
            complete = len(names) == sum(row[1] == column for row in sheet.rows)
            words += [word for name in ([""] if complete else names) for word in ("--only", f"{name}/{column}")]
    return shlex.join(words)


def _paragraphs(notes: Sequence[str]) -> list[str]:
    return [f"{note}\n" for note in notes]


def claim_lines(verdict: Verdict) -> str:
    """A claim and its comparisons, as a Markdown list."""
    lines = [f"* {verdict.claim.text} ({verdict.claim.source}): **{verdict.says}**.\n"]
    for pair in verdict.comparisons:
        if pair.decision != "not run":
            seeds = f"{pair.seeds} seed{'s' if pair.seeds != 1 else ''}"
            word = {"yes": "holds", "no": "does not hold", "equal": "equivalent", "open": "not decided"}[pair.decision]
            clients = f" Clients: {pair.clients}." if pair.clients else ""
            lines.append(f"  * `{pair.left}` and `{pair.right}`: {pair.numbers} ({seeds}): {word}.{clients}\n")
    return "".join(lines)
