"""The results as text and as one table; every number says what it is."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedme.core.metrics import Measure
from fedme.report import cost_view, exchange_view, lineage_view, naming, privacy_view
from fedme.report.formats import change, clients, listed, number
from fedme.report.gain_view import Comparison
from fedme.report.run_data import PERSONAL, Family, Run, ScoreKey, client_mean, over_seeds, sample_note
from fedme.results.summary import spread

FEW_SAMPLES = 10  # a client with fewer test samples has an unreliable result
NAMED = 3  # clients that are named

Compared = Sequence[Sequence[Comparison]]  # by family


def view(families: Sequence[Family], compared: Compared) -> dict[str, Any]:
    """A paragraph per family, after a ranking if there are several, and a table with a row per model of every family."""
    paragraphs = [("In short", ranking)] if (ranking := _ranking(families, compared)) else []
    paragraphs += [(f"More about {family.label}", _family(family, one)) for family, one in zip(families, compared, strict=True)]
    return {
        "paragraphs": [{"about": about, "lines": lines} for about, lines in paragraphs],
        "table": _table(families, compared),
    }


def _ranking(families: Sequence[Family], compared: Compared) -> list[str]:
    measure = families[0].runs[0].measures[0]
    results = [(*client_means(family, PERSONAL), family.label) for family in families]
    ranked = [(mean, std, label) for mean, std, label in results if mean is not None]
    if len(families) == 1 or not ranked:
        return []
    ranked.sort(key=lambda result: -measure.gain(result[0], 0.0))
    parts = [f"{label} {number(measure, mean, std)}" for mean, std, label in ranked]
    what = f"Test {measure.title} of the personal models after the last round, mean over clients, best first"
    text = [f"{what}: {', '.join(parts)}."]
    for family, comparison in zip(families, compared, strict=True):
        if comparison:
            text.append(f"{family.label}: {comparison[0].words()}")
    if len(ranked) > 1:
        text.append(
            "± is the standard deviation over seeds; a gap that is not clearly larger says little."
            if min(len(family.runs) for family in families) > 1
            else "Runs with a single seed have no spread: repeat them with other seeds before you trust a small gap."
        )
    return text


def _family(family: Family, compared: Sequence[Comparison]) -> list[str]:
    run = family.runs[0]
    partition = run.config["partition"].get("name", "")
    text = [
        f"{naming.method(family.method)} with {clients(len(run.clients))} on {naming.data(run)}"
        f"{f' ({partition} partition)' if partition else ''}, {len(run.rounds)} rounds, {_seeds(family)}."
    ]
    text += [note for note in [sample_note(run)] if note]
    text.append(" ".join(_results(family)))
    text += cost_view.sentences(family)
    first_run = [_worst(run), _exchange(run), privacy_view.sentences(run)]
    seed = f"Seed {run.result['seed']}: " if len(family.runs) > 1 else ""
    text += [seed + " ".join(sentences) for sentences in first_run if sentences]
    for comparison in compared:
        text += [comparison.words(), *comparison.alarms()]
    if not compared and not run.isolated:
        text.append(
            "This report has no run of Local over the same clients, and `fedme verdict` was not asked: "
            "the gain over training alone is unknown."
        )
    return text


def _results(family: Family) -> list[str]:
    split = "test" if PERSONAL in family.runs[0].scores else "val"
    mean, std = client_means(family, ("personal", "round", split))
    if mean is None:
        return []
    measure = family.runs[0].measures[0]
    pooled = number(measure, *_pooled(family, ("personal", "round", split)))
    word = "Test" if split == "test" else "Validation"
    text = [
        f"{word} {measure.title} of the personal models after the last round: {number(measure, mean, std)}, mean over clients "
        f"({pooled} over all samples pooled)."
    ]
    tuned, tuned_std = client_means(family, ("personal", "finetuned", split))
    if tuned is not None:
        text.append(f"After fine-tuning it is {number(measure, tuned, tuned_std)}, {change(measure, tuned, mean)}.")
    return text


def ranked_clients(run: Run) -> list[tuple[str, float, int]]:
    """Clients with the test result and the test samples of their personal model, the worst first."""
    measure = run.measures[0]
    last = run.last(PERSONAL)
    scores = {client: last[client] for client in run.clients if client in last and last[client][measure.key] is not None}
    order = sorted(scores, key=lambda client: measure.gain(scores[client][measure.key], 0.0))
    return [(client, scores[client][measure.key], scores[client]["samples"]) for client in order]


def _worst(run: Run) -> list[str]:
    measure, ranked = run.measures[0], ranked_clients(run)
    if len(ranked) < 2:
        return []
    shown = [f"{client} ({number(measure, value)})" for client, value, _ in ranked]
    text = [f"The worst clients are {listed(shown[: min(NAMED, len(shown) - 1)])}; the best is client {shown[-1]}."]
    few = sum(samples < FEW_SAMPLES for _, _, samples in ranked)
    if few:
        subject, possessive = ("1 client has", "its") if few == 1 else (f"{few} clients have", "their")
        text.append(f"{subject} fewer than {FEW_SAMPLES} test samples: a single one moves {possessive} result a lot.")
    return text


def _exchange(run: Run) -> list[str]:
    lent, adopted = exchange_view.totals(run)
    held = lineage_view.architectures(run)
    text = []
    if lent:
        text.append(f"{lent:,} models were lent and {adopted:,} of them ({100 * adopted / lent:.0f} %) adopted.")
        left = len(set(lineage_view.origins(run)[-1].values()))
        text.append(f"The {len(run.clients)} personal models descend from {left} of the {len(run.clients)} initial ones.")
    first, last = (Counter(held[index].values()) for index in (0, -1))
    if len(first | last) > 1:
        text.append(f"Architectures at the end: {', '.join(f'{name} ({count})' for name, count in last.most_common())}.")
        gone = lineage_view.lost(run)
        text += [f"No client holds {listed(gone, 'or')} any more."] if gone else []
    return text


def _table(families: Sequence[Family], compared: Compared) -> dict[str, Any]:
    """A cell is a text, or a text and the number to sort by. `better` says for a column whether higher or lower is better."""
    measure = families[0].runs[0].measures[0]
    best = "higher" if measure.higher else "lower"
    columns: list[tuple[str, str | None]] = [
        ("run", None),
        ("model", None),
        (f"test {measure.title}", best),
        ("worst client", best),
        ("gained", "higher"),
        ("lost", "lower"),
        ("not clear", ""),
        ("pooled", best),
        ("sent", "lower"),
        ("client time", "lower"),
        ("server time", "lower"),
        ("parameters", "lower"),
        ("seeds", ""),
    ]
    rows = [row for family, one in zip(families, compared, strict=True) for row in _rows(family, one, measure)]
    empty = {i for i in range(len(columns)) if all(row[i] == "-" for row in rows)}
    kept = [i for i in range(len(columns)) if i not in empty]
    return {
        "header": [columns[i][0] for i in kept],
        "better": [columns[i][1] for i in kept],
        "rows": [[row[i] for i in kept] for row in rows],
    }


def _rows(family: Family, compared: Sequence[Comparison], measure: Measure) -> list[list[Any]]:
    rows = []
    counts: dict[str, Comparison] = {comparison.key: comparison for comparison in reversed(compared)}
    for key in sorted(
        (key for key in family.runs[0].scores if key[2] == "test"), key=lambda key: (key[0] != "personal", key[1] != "round")
    ):
        mean, std = client_means(family, key)
        if mean is None or (key[0] == "global" and all(run.last(key) == run.last(PERSONAL) for run in family.runs)):
            continue
        scores = [[s[measure.key] for s in run.last(key).values() if s[measure.key] is not None] for run in family.runs]
        worst = statistics.fmean(min(values) if measure.higher else max(values) for values in scores)
        pooled = _pooled(family, key)
        comparison = counts.get(key[1]) if key[0] == "personal" else None
        if comparison is None and key == PERSONAL:
            comparison = counts.get("verdict")
        model = key[0] if key[1] == "round" else f"{key[0]}, fine-tuned"
        rows.append(
            [
                family.label,
                model,
                [number(measure, mean, std), mean],
                [number(measure, worst), worst],
                *_sides(comparison),
                [number(measure, *pooled), pooled[0]],
                *cost_view.cells(family),
                [str(len(family.runs)), len(family.runs)],
            ]
        )
    return rows


def _sides(comparison: Comparison | None) -> list[Any]:
    """How many clients gained, lost, and neither, beyond chance."""
    if comparison is None or not comparison.known:
        return ["-", "-", "-"]
    overall = comparison.overall
    return [[str(len(group)), len(group)] for group in (overall.better, overall.worse, overall.open)]


def client_means(family: Family, key: ScoreKey) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds of the client mean of the headline metric."""
    return over_seeds([client_mean(run.last(key), run.measures[0].key) for run in family.runs])


def _pooled(family: Family, key: ScoreKey) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds of the headline metric over all samples; NaN if a client's is undefined."""
    pooled = [run.measures[0].pooled(list(run.last(key).values())) for run in family.runs]
    return spread([float("nan") if value is None else value for value in pooled])


def _seeds(family: Family) -> str:
    seeds = [str(run.result["seed"]) for run in family.runs]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {listed(seeds)}"
