"""The pages with all finished results: the verdicts on all claims, and a page per paper with tables, curves and commands.

Measurements are archived beside the pages, so that a later call can extend them without the earlier run directories.
"""

import importlib.resources
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedme.core.atomic_files import write_text
from fedme.reproduction import catalogue, claim_verdicts, comparison_tables, figures, findings, power_plan, rate_search
from fedme.reproduction.catalogue import PAPERS, Claim, Panel, Remark, Result, Scale
from fedme.reproduction.claim_verdicts import Verdict
from fedme.reproduction.comparison_tables import Sheet
from fedme.reproduction.findings import Findings, points
from fedme.reproduction.planned_runs import RunFolders
from fedme.results.statistics import compare
from fedme.results.tables import text

SCALES: tuple[Scale, ...] = ("full", "small")
DATA = importlib.resources.files("fedme") / "reproduction" / "data"


def write(path: Path, root: Path) -> list[Path]:
    """Write the page of verdicts and, in a directory of its name, a page per paper, measurements, tables and curves.

    Returns the files written.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [file for suffix in ("csv", "tex", "md", *figures.FORMATS) for file in folder.glob(f"*.{suffix}")]:
        old.unlink()
    written, by_scale = [], dict[Scale, Findings]()
    for scale in SCALES:
        archive = folder / f"{scale}.jsonl"
        by_scale[scale] = findings.gather(RunFolders(root, scale), archive=archive)
        findings.write_archive(by_scale[scale], archive)
        written.append(archive)
    sections: dict[str, list[str]] = {paper: [] for paper in PAPERS}
    missing = []
    # Seconds depend on the load of the machine, so they are not on the pages.
    for result in (result for result in catalogue.results().values() if result.unit != "seconds"):
        sheets = [comparison_tables.sheet(result, by_scale[scale]) for scale in SCALES]
        shown = [sheet for sheet in sheets if sheet.finished]
        if not shown:
            missing.append(f"`{result.name}`")
        for sheet in shown:
            written += comparison_tables.write(sheet, folder, ("csv", "latex"))
            written += figures.draw(result, by_scale[sheet.scale], folder)
        sections[result.paper] += [_section(shown, folder)] if shown else []
    judged = _judged(by_scale)
    for paper in PAPERS:
        results = [_title(paper, path), *sections[paper], _comparisons(judged[paper])]
        pages = [*results, _settings(paper), _rates(paper), _known_issues(paper)]
        write_text(folder / f"{paper}.md", "\n".join(part for part in pages if part))
        written.append(folder / f"{paper}.md")
    write_text(folder / "plan.md", _plan(path))
    written.append(folder / "plan.md")
    head, reading, differ = ((DATA / f"{name}.md").read_text(encoding="utf-8") for name in ("head", "reading", "differ"))
    leads = _leads(catalogue.results()["fedme-rounds"], by_scale["full"] if "full" in by_scale else Findings("full", {}))
    parts = (head, _claims(judged, by_scale), _papers(judged, folder), differ, leads, reading, _missing(missing))
    write_text(path, "\n".join(parts))
    return [*written, path]


def _title(paper: str, path: Path) -> str:
    return (
        f"# {PAPERS[paper]}\n\nThe tables and figures of this paper beside our results. The [page of verdicts](../{path.name}) "
        "says how to read them.\n"
    )


def _section(sheets: Sequence[Sheet], folder: Path) -> str:
    result = sheets[0].result
    parts = [f"## {_place(result.source)}: {result.title}\n"]
    for sheet in sheets:
        parts.append("\n".join(["```", *comparison_tables.commands(sheet), "```\n"]))
        parts.append(f"{sheet.notes[0]}\n")
        if (folder / f"{result.name}-{sheet.scale}.png").exists():
            parts.append(f"![{result.title}]({result.name}-{sheet.scale}.png)\n")
        parts.append(_finished(sheet))
    parts += [f"{note}\n" for note in result.notes]
    return "\n".join(parts)


def _finished(sheet: Sheet) -> str:
    """The table of the finished cells, and the number of the others."""
    left = len(sheet.rows) - len(sheet.finished)
    table = text(sheet.header, sheet.finished, "markdown")
    return f"{table}\n{left} of {len(sheet.rows)} cells have not been run at this scale.\n" if left else table


def _place(source: str) -> str:
    """The place within a paper: its name is the title of the page."""
    return source.rpartition(", ")[2]


Judged = tuple[int, Claim, Mapping[Scale, Verdict]]


def _judged(by_scale: Mapping[Scale, Findings]) -> dict[str, list[Judged]]:
    """Every claim with its number and its verdict per scale, by paper."""
    claims = [claim for claim in catalogue.claims() if claim.kind != "slower"]
    judged: dict[str, list[Judged]] = {paper: [] for paper in PAPERS}
    by_claim = {
        scale: claim_verdicts.corrected([claim_verdicts.of_claim(claim, by_scale[scale]) for claim in claims])
        for scale in SCALES
    }
    for number, claim in enumerate(claims, 1):
        verdicts = {scale: by_claim[scale][number - 1] for scale in SCALES}
        judged[claim.paper].append((number, claim, verdicts))
    return judged


def _claims(judged: Mapping[str, Sequence[Judged]], by_scale: Mapping[Scale, Findings]) -> str:
    """One table of all claims: the verdict, the comparison that decides it, and what the plan still asks for."""
    header = ("", "claim", "source", "verdict", "scale", "effect", "95 % interval", "seeds", "planned runs left")
    every = [claim for claims in judged.values() for claim in claims]
    rows = [_row(*claim, by_scale) for claim in every]
    return f"## The claims\n\n{_counts(every)}\n\n{text(header, rows, 'markdown')}"


def _row(number: int, claim: Claim, verdicts: Mapping[Scale, Verdict], by_scale: Mapping[Scale, Findings]) -> tuple[str, ...]:
    scale = _best_scale(verdicts)
    verdict, planned = verdicts[scale], [row for row in power_plan.rows() if row.claim == claim.text]
    left = [(row.scale, run, seed) for row in planned for run, seed in power_plan.missing(row, by_scale)]
    hours = sum(catalogue.minutes([run], of) for of, run, _ in left) / 60
    to_do = f"{len(left)}, about {hours:.1f} hours" if left else "none"
    if (deciding := verdict.deciding) is None:
        return (str(number), claim.text, claim.source, f"needs {hours:.1f} hours", "", "", "", "", to_do)
    effect, interval = "", ""
    if deciding.effect is not None:
        effect = f"{deciding.effect.mean:+.2f} {deciding.unit}"
        low, high = deciding.effect.low, deciding.effect.high
        interval = f"{low:+.2f} to {high:+.2f}" if deciding.effect.count >= claim_verdicts.SEEDS else ""
    says = verdict.says.replace(" at this scale", "")
    seeds = next((f"{deciding.seeds} of {row.seeds}" for row in planned if row.scale == scale), str(deciding.seeds))
    return (str(number), claim.text, claim.source, says, scale, effect, interval, seeds, to_do)


def _best_scale(verdicts: Mapping[Scale, Verdict]) -> Scale:
    """The scale that decides; if both or neither do, the full one."""
    return max(verdicts, key=lambda scale: (_weight(verdicts[scale]), -SCALES.index(scale)))


def _weight(verdict: Verdict) -> int:
    """Verdicts with a test come before those without, and both before no verdict."""
    if not verdict.says.startswith(claim_verdicts.VERDICTS):
        return 0 if verdict.says == "not run" else 1
    return 2 if "so far" in verdict.says else 3


def _counts(claims: Sequence[Judged]) -> str:
    """How many claims have which verdict with a test, are not decided, and have not been run."""
    best = [max(verdicts.values(), key=_weight) for _, _, verdicts in claims]
    holds, fails, same = (
        sum(_weight(verdict) == 3 and verdict.says.startswith(word) for verdict in best) for word in claim_verdicts.VERDICTS
    )
    waiting = sum(_weight(verdict) == 0 for verdict in best)
    counts = [
        (holds, "holds", "hold"),
        (fails, "does not hold", "do not hold"),
        *([(same, "is equivalent", "are equivalent")] if same else []),
        (len(best) - holds - fails - same - waiting, "is not decided", "are not decided"),
        (waiting, "waits for its first runs", "wait for their first runs"),
    ]
    return f"{len(best)} claims: {', '.join(f'{count} {one if count == 1 else many}' for count, one, many in counts)}."


def _papers(judged: Mapping[str, Sequence[Judged]], folder: Path) -> str:
    """A paragraph on every paper."""
    parts = [
        "## The papers in plain words\n",
        "The sentences about results follow from the verdicts of the table, and change with them. In brackets: the number of "
        "the claim, and the scale of the runs.\n",
    ]
    for paper, claims in judged.items():
        link = f"[Tables, figures and comparisons]({folder.name}/{paper}.md)"
        parts.append(f"### {PAPERS[paper]}\n\n{_counts(claims)} {catalogue.intro(paper)}\n\n{_in_words(claims)}\n\n{link}\n")
    return "\n".join(parts)


def _in_words(claims: Sequence[Judged]) -> str:
    """What the verdicts say, in sentences that follow from them."""
    tested, so_far, undecided, waiting = list[str](), list[str](), list[str](), list[str]()
    for number, claim, verdicts in claims:
        scale = _best_scale(verdicts)
        weight, says, plain = _weight(verdicts[scale]), verdicts[scale].says, claim.plain
        if not weight or plain is None:
            waiting.append(str(number))
        elif weight == 1:
            undecided.append(f"{plain.open} ({number}, {scale})")
        else:
            same = plain.equal or f"what claim {number} compares is {says.partition(' (')[0]}"
            clause = plain.holds if says.startswith("holds") else same if says.startswith("equivalent") else plain.fails
            (tested if weight == 3 else so_far).append(f"{clause} ({number}, {scale})")
    sentences = [f"{clause[0].upper()}{clause[1:]}." for clause in tested]
    sentences += [f"So far, with too few seeds for a test: {'; '.join(so_far)}."] if so_far else []
    sentences += [f"Not decided by the runs so far: {'; '.join(undecided)}."] if undecided else []
    sentences += [f"No runs yet for claim{'s' if len(waiting) > 1 else ''} {', '.join(waiting)}."] if waiting else []
    return " ".join(sentences)


def _leads(result: Result, full: Findings) -> str:
    """Who is ahead after how many rounds, in sentences that follow from the planned runs; or what is still to be run."""
    (planned,) = [background for background in power_plan.backgrounds() if background.result == result.name]
    lines = [line for panel in result.panels if (line := _lead(panel, full))]
    left = len(power_plan.missing(planned, {planned.scale: full}))
    if left:
        lines.append(f"* To be run: {left} of {len(planned.runs) * planned.seeds} planned runs, `{planned.command}`.\n")
    return "With the networks and the rates of the authors' code, at full scale and before fine-tuning:\n\n" + "".join(lines)


def _lead(panel: Panel, full: Findings) -> str:
    """In which rounds the second curve of a panel is above the first; empty without seeds that both have."""
    rival, own = panel.series
    lines = [
        {seed: dict(points(run, curve.measure)) for seed, run in full.runs.get(curve.run, {}).items()} for curve in (rival, own)
    ]
    seeds = sorted(lines[0].keys() & lines[1].keys())
    if not seeds:
        return ""
    rounds = sorted(set.intersection(*(set(line[seed]) for line in lines for seed in seeds)))
    gaps = {t + 1: statistics.fmean(lines[1][seed][t] - lines[0][seed][t] for seed in seeds) for t in rounds}
    ahead = [t for t, gap in gaps.items() if gap > 0]
    last, best = max(gaps), max(gaps, key=lambda t: gaps[t])
    end = compare([lines[1][seed][rounds[-1]] - lines[0][seed][rounds[-1]] for seed in seeds])
    interval = f", 95 % interval {end.low:+.1f} to {end.high:+.1f}" if end.count >= claim_verdicts.SEEDS else ""
    share = f"{own.name} is ahead of {rival.name} at {len(ahead)} of {len(gaps)} evaluations"
    where = (
        f", first after {ahead[0]} and last after {ahead[-1]} rounds, most after {best} ({gaps[best]:+.1f} points)"
        if ahead
        else ""
    )
    seeds_text = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    return f"* {panel.title} ({seeds_text}): {share}{where}. After {last} rounds: {gaps[last]:+.1f} points{interval}.\n"


def _comparisons(claims: Sequence[Judged]) -> str:
    """The comparisons behind the verdicts on a paper's claims."""
    details = [
        f"**{number}**, scale {scale}:\n\n{comparison_tables.claim_lines(verdict)}"
        for number, _, verdicts in claims
        for scale, verdict in verdicts.items()
        if verdict.says != "not run"
    ]
    return "\n".join(["## Comparisons behind the verdicts\n", *details]) if details else ""


def _settings(paper: str) -> str:
    return _remarks("Settings that need a word", catalogue.settings(), paper)


def _rates(paper: str) -> str:
    """The searches of learning rates for the runs of a paper."""
    runs = {run for result in catalogue.results().values() if result.paper == paper for run in result.runs}
    searches = [search for search in rate_search.searches() if search.run in runs]
    if not searches:
        return ""
    rule = (
        "Validation accuracy in % (client mean after the last round, seed 0, scale small) of the model that the paper's table "
        "reports, with the rates that were tried. The best one is used, with model 2 for all methods."
    )
    names = sorted({search.run.partition("/")[0] for search in searches})
    parts = [
        "## Learning rates\n",
        f"{rule}\n",
        "\n".join(["```", *(f"fedme reproduce --rates {name}" for name in names), "```\n"]),
    ]
    made = [search for search in searches if search.accuracy]
    parts += [text(*rate_search.table(made), "markdown")] if made else []
    if left := [f"`{search.run}` ({search.used:g})" for search in searches if not search.accuracy]:
        parts.append(
            f"Not searched by this rule yet, {len(left)} of {len(searches)}: {', '.join(left)}. In brackets the rate in use, "
            "which is that of an earlier search or FedAvg's.\n"
        )
    return "\n".join(parts)


def _known_issues(paper: str) -> str:
    return _remarks("What the paper's own numbers show", catalogue.known_issues(), paper)


def _remarks(title: str, remarks: Sequence[Remark], paper: str) -> str:
    lines = [f"* {remark.text} ({remark.source})\n" for remark in remarks if remark.paper == paper]
    return f"## {title}\n\n" + "".join(lines) if lines else ""


def _plan(path: Path) -> str:
    """The committed plan as a table."""
    known = power_plan.numbered()
    header = ("", "claim", "scale", "comparisons", "margin", "std", "seeds", "for the margin", "processor hours")
    rows = []
    for row in power_plan.rows():
        needed, std = row.needed(), max(seen.std for seen in row.comparisons)
        cells = (row.scale, str(len(row.comparisons)), f"{row.margin:g}", f"{std:g}", str(row.seeds))
        rows.append((str(known[row.claim][0]), row.claim, *cells, str(needed or ""), f"{row.minutes / 60:.1f}"))
    lines = [
        "# The plan of the runs\n",
        f"Made before the runs behind the [verdicts](../{path.name}): how many seeds every claim gets, at which scale, and "
        "about how long they take on one processor. **std** is the largest deviation of the claim's differences over "
        "seeds that was seen before, in points (assumed, where fewer than two seeds were finished). **for the margin** is "
        "the number of seeds that finds a difference of the margin in 80 % of all cases, without a correction for the "
        "number of claims: where it is far above **seeds**, only larger differences can be found. Runs that several "
        "claims share are counted for each of them. After this plan only seeds are added, up to the planned number; no "
        "setting is chosen by a verdict.\n",
        "```\nfedme reproduce --plan 8 --page docs/reproduction.md\nfedme reproduce --claim 9 --scale small\n```\n",
        text(header, rows, "markdown"),
        "## Runs that decide no claim\n",
        *(
            f"* {planned.why}: {len(planned.runs)} runs with {planned.seeds} seeds at scale {planned.scale}, about "
            f"{planned.minutes / 60:.0f} processor hours: `{planned.command}`\n"
            for planned in power_plan.backgrounds()
        ),
    ]
    return "\n".join(lines)


def _missing(names: Sequence[str]) -> str:
    seconds = [f"`fedme reproduce {result.name}`" for result in catalogue.results().values() if result.unit == "seconds"]
    lines = [f"Nothing is finished for {', '.join(names)}. `fedme reproduce NAME` runs them.\n"] if names else []
    lines.append(f"Seconds depend on the machine and its load: {', '.join(seconds)} measures them on yours.\n")
    return "## Not shown\n\n" + "\n".join(lines)
