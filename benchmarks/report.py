"""Judge measurements and write them down: `results.json` for programs, `results.md` for people."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import protocol
import user_report
from rows import Against, Row

TOLERANCE = 0.015  # accuracies that are "the same": batches come in another order on every side


def judge(row: Row, against: Against, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the results. A comparison of unequal work, or with unequal results, does not count as met."""
    ours_s = protocol.middle(ours["seconds_per_round"], row.whole)
    if against.kind == "peak":
        peer_s = ours["flop"] / (max(theirs["gflops"].values()) * 1e9)
    else:
        peer_s = protocol.middle(theirs["seconds_per_round"], row.whole)
    ratio = ours_s / peer_s if against.at_most else peer_s / ours_s
    fair = differences(against, ours, theirs)
    return empty(row, against) | {
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ratio": ratio,
        "met": bool((ratio <= against.bar if against.at_most else ratio >= against.bar) and not fair),
        "steps": {"ours": ours["steps"], "peer": theirs["steps"]},
        "samples": {"ours": ours["samples"], "peer": theirs["samples"]},
        "accuracy": {"ours": ours["accuracy"], "peer": theirs["accuracy"] if against.kind != "peak" else None},
        "rounds": {"ours": ours["seconds_per_round"], "peer": theirs["seconds_per_round"]},
        "paths": ours.get("paths", []),
        "note": "; ".join(fair),
    }


def differences(against: Against, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What makes a comparison unfair."""
    found = []
    for what in ("steps", "samples") if against.same_work else ():
        if None not in (ours[what], theirs[what]) and ours[what] != theirs[what]:
            found.append(f"{what} differ: {ours[what]} and {theirs[what]}")
    if against.same_result and abs(ours["accuracy"] - theirs["accuracy"]) > TOLERANCE:
        found.append(f"accuracies differ: {ours['accuracy']:.4f} and {theirs['accuracy']:.4f}")
    return found


def empty(row: Row, against: Against, reason: str = "") -> dict[str, Any]:
    """A line without measurements, and why there are none."""
    bar = {"bar": against.bar, "reach": against.reach, "at_most": against.at_most}
    nothing = dict.fromkeys(("ours_s", "peer_s", "ratio", "met"))
    return {
        "name": row.name,
        "work": row.work,
        "peer": against.peer,
        **nothing,
        **bar,
        "machine": machine()["name"],
        "note": reason,
    }


def unanswered(row: Row, against: Against, ours: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """A line with our side only."""
    alone = {"ours_s": protocol.middle(ours["seconds_per_round"], row.whole), "accuracy": {"ours": ours["accuracy"]}}
    return empty(row, against, reason) | alone


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {"name": f"{_processor()}, {os.cpu_count()} cores", "system": f"{platform.system()} {platform.machine()}"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def markdown(results: Mapping[str, Any]) -> str:
    """The results as a page."""
    gemm = ", ".join(f"{speed:.0f} GF/s on {threads} thread(s)" for threads, speed in results["gemm"].items())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    head = [
        "# Benchmark" + (" (quick: a check that everything runs; its numbers mean nothing)" if results["quick"] else ""),
        "",
        f"{results['machine']['name']}, {results['machine']['system']}; sgemm {gemm or 'not measured'}.  ",
        f"{versions}.  ",
        f"{results['started']}, {results['minutes']:.1f} minutes.",
        "",
    ]
    found = []
    for title, beginning in SECTIONS.items():
        others = tuple(each for each in SECTIONS.values() if each and each != beginning)
        rows = [row for row in results["rows"] if row["name"].startswith(beginning) and not row["name"].startswith(others)]
        if rows:
            found += [*([f"## {title}", ""] if title else []), *lines([HEADS, *(_cells(row) for row in rows)]), ""]
    found = found[:-1]
    if results["networks"]:
        peak = max(results["gemm"].values(), default=None)
        shown = [user_report.cells(line, peak) for line in results["networks"]]
        section = ["## Networks as people write them, against the plain loop", ""]
        found += ["", *section, *lines([tuple(shown[0]), *(tuple(each.values()) for each in shown)])]
    return "\n".join([*head, *found, ""])


SECTIONS = {"": "", "Methods, as a multiple of our FedAvg": "methods-", "Methods, against fluke": "fluke-"}  # by rows' names
HEADS = ("work", "against", "ours, s", "theirs, s", "ratio", "bar", "reach for", "met", "accuracy", "note")


def lines(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return [shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    sign = "<=" if row["at_most"] else ">="
    met = {None: "not measured", True: "yes", False: "NO"}[row["met"]]
    accuracies = [value for value in (row.get("accuracy") or {}).values() if value is not None]
    return (
        row["work"],
        row["peer"],
        number(row["ours_s"]),
        number(row["peer_s"]),
        number(row["ratio"], ".2f"),
        f"{sign} {row['bar']:g}",
        "" if row["reach"] is None else f"{sign} {row['reach']:g}",
        met,
        " / ".join(f"{100 * value:.1f}" for value in accuracies),
        row["note"].replace("|", "/").replace("\n", " "),
    )


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(results), encoding="utf-8")


def now() -> str:
    """The time, for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
