"""The results as text and as one table; every number says what it is."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedme.core.metrics import Measure
from fedme.report import client_view, exchange_view, joining_view, lineage_view, privacy_view
from fedme.report.run_data import PERSONAL, Family, Run, ScoreKey, client_mean, over_seeds, sample_note
from fedme.results import verdicts
from fedme.results.summary import spread, trouble

FEW_SAMPLES = 10  # a client with fewer test samples has an unreliable result
NAMED = 3  # clients that are named


def view(families: Sequence[Family]) -> dict[str, Any]:
    """A paragraph per family, after a ranking if there are several, and a table with a row per model of every family."""
    paragraphs = [("In short", ranking)] if (ranking := _ranking(families)) else []
    paragraphs += [(family.label, _family(family, families)) for family in families]
    return {"paragraphs": [{"about": about, "lines": lines} for about, lines in paragraphs], "table": _table(families)}


def _ranking(families: Sequence[Family]) -> list[str]:
    measure = families[0].runs[0].measures[0]
    results = [(*_over_seeds(family, PERSONAL), family.label) for family in families]
    ranked = [(mean, std, label) for mean, std, label in results if mean is not None]
    if len(families) == 1 or not ranked:
        return []
    ranked.sort(key=lambda result: -measure.gain(result[0], 0.0))
    parts = [f"{label} {_number(measure, mean, std)}" for mean, std, label in ranked]
    what = f"Test {measure.title} of the personal models after the last round, mean over clients, best first"
    text = [f"{what}: {', '.join(parts)}."]
    if len(ranked) > 1:
        text.append(
            "± is the standard deviation over seeds; a gap that is not clearly larger says little."
            if min(len(family.runs) for family in families) > 1
            else "Runs with a single seed have no spread: repeat them with other seeds before you trust a small gap."
        )
    if not all(family.runs[0].same_division(families[0].runs[0]) for family in families):
        text.append("Not all of these runs gave the same samples to the same clients.")
    return text


def _family(family: Family, families: Sequence[Family]) -> list[str]:
    run = family.runs[0]
    runs = [run for other in families for run in other.runs]
    partition = run.config["partition"].get("name", "")
    text = [
        f"{family.method.rpartition(':')[2]} with {len(run.clients)} clients on {run.config['data']['name']}"
        f"{f' ({partition} partition)' if partition else ''}, {len(run.rounds)} rounds, {_seeds(family)}."
    ]
    text += [note for note in [sample_note(run)] if note]
    unfinished = [run.result for run in family.runs if "unfinished" in run.result]
    text += [f"Unfinished: seed {result['seed']} has completed {result['unfinished']}." for result in unfinished]
    text.append(" ".join(_results(family)))
    megabytes = _megabytes(family)
    text.append(f"{megabytes:.1f} MB were sent in total, in both directions." if megabytes else "Nothing was sent.")
    text += dict.fromkeys(line for run in family.runs for line in trouble(run.result))
    for one in family.runs:
        if one.unusable:
            text.append(f"Left out of this report, because it cannot be used: {one.folder.name}, {'; '.join(one.unusable)}.")
    first_run = [_worst(run), _against_local(run, client_view.local(run, runs)), _exchange(run), privacy_view.sentences(run)]
    seed = f"Seed {run.result['seed']}: " if len(family.runs) > 1 else ""
    return text + [seed + " ".join(sentences) for sentences in first_run if sentences] + _joining(family)


def _joining(family: Family) -> list[str]:
    """Whether joining helped, if `fedme verdict` was asked."""
    judged = joining_view.of_family(family)
    return [verdicts.overall(judged).words(), *joining_view.alarm_lines(judged)] if judged else []


def _results(family: Family) -> list[str]:
    split = "test" if PERSONAL in family.runs[0].scores else "val"
    mean, std = _over_seeds(family, ("personal", "round", split))
    if mean is None:
        return []
    measure = family.runs[0].measures[0]
    number = _number(measure, mean, std)
    pooled = _number(measure, *_pooled(family, ("personal", "round", split)))
    split_name = "test" if split == "test" else "validation"
    if measure.key == "rmse":
        claim = f"have a {split_name} RMSE of {number} in the unit of the target"
    else:
        what = "samples" if measure.title == "accuracy" else "labels, each present or absent"
        claim = f"are correct on {number} of a client's {split_name} {what}"
    text = [f"After the last round the personal models {claim}, mean over clients ({pooled} over all samples pooled)."]
    tuned, tuned_std = _over_seeds(family, ("personal", "finetuned", split))
    if tuned is not None:
        text.append(f"After fine-tuning it is {_number(measure, tuned, tuned_std)}, {_change(measure, tuned, mean)}.")
    return text


def _worst(run: Run) -> list[str]:
    measure = run.measures[0]
    scores = {client: score for client, score in run.last(PERSONAL).items() if score[measure.key] is not None}
    if len(scores) < 2:
        return []
    order = sorted(scores, key=lambda client: measure.gain(scores[client][measure.key], 0.0))
    shown = [f"{client} ({_number(measure, scores[client][measure.key], None)})" for client in order]
    text = [f"The worst clients are {_listed(shown[: min(NAMED, len(shown) - 1)])}; the best is client {shown[-1]}."]
    few = sum(score["samples"] < FEW_SAMPLES for score in scores.values())
    if few:
        subject, possessive = ("1 client has", "its") if few == 1 else (f"{few} clients have", "their")
        text.append(f"{subject} fewer than {FEW_SAMPLES} test samples: a single one moves {possessive} result a lot.")
    return text


def _against_local(run: Run, baseline: Run | None) -> list[str]:
    if baseline is None:
        unknown = (
            "This report has no run of Local over the same clients, so the gain over local training is unknown; "
            "`fedme verdict` computes it."
        )
        return [] if run.isolated or run.verdicts else [unknown]
    gains = client_view.gains(run, baseline)
    if not gains:
        return []
    up = sum(gain > 0 for gain in gains.values())
    down = sum(gain < 0 for gain in gains.values())
    measure = run.measures[0]
    unit = "points" if measure.percent else measure.title if measure.higher else f"(reduction of {measure.title})"
    text = [
        f"Compared with local training, {up} of {len(gains)} clients gained, {down} lost and {len(gains) - up - down} did not "
        f"change; the mean gain is {_signed(measure, statistics.fmean(gains.values()))} {unit}."
    ]
    loser = min(gains, key=lambda client: gains[client])
    if gains[loser] < 0:
        text.append(f"Client {loser} lost most ({_signed(measure, gains[loser])}).")
    return text


def _exchange(run: Run) -> list[str]:
    lent, adopted = exchange_view.totals(run)
    held = lineage_view.architectures(run)
    text = []
    if lent:
        text.append(f"{lent} models were lent and {adopted} of them ({100 * adopted / lent:.0f} %) adopted.")
        left = len(set(lineage_view.origins(run)[-1].values()))
        text.append(f"The {len(run.clients)} personal models descend from {left} of the {len(run.clients)} initial ones.")
    first, last = (Counter(held[index].values()) for index in (0, -1))
    if len(first | last) > 1:
        text.append(f"Architectures at the end: {', '.join(f'{name} ({count})' for name, count in last.most_common())}.")
        gone = [name for name in first if name not in last]
        text += [f"No client holds {_listed(gone, 'or')} any more."] if gone else []
    return text


def _table(families: Sequence[Family]) -> dict[str, Any]:
    rows, measure = [], families[0].runs[0].measures[0]
    for family in families:
        keys = [key for key in family.runs[0].scores if key[2] == "test"]
        for key in sorted(keys, key=lambda key: (key[0] != "personal", key[1] != "round")):
            mean, std = _over_seeds(family, key)
            if mean is None or (key[0] == "global" and all(run.last(key) == run.last(PERSONAL) for run in family.runs)):
                continue
            scores = [[s[measure.key] for s in run.last(key).values() if s[measure.key] is not None] for run in family.runs]
            worst = statistics.fmean(min(values) if measure.higher else max(values) for values in scores)
            numbers = [
                _number(measure, mean, std),
                _number(measure, *_pooled(family, key)),
                _number(measure, worst, None),
                f"{_megabytes(family):.1f}",
            ]
            model = key[0] if key[1] == "round" else f"{key[0]}, fine-tuned"
            rows.append([family.label, family.method, model, *numbers, str(len(family.runs))])
    header = ["run", "method", "model", f"test {measure.title}", "pooled", "worst client", "MB sent", "seeds"]
    return {"header": header, "rows": rows}


def _over_seeds(family: Family, key: ScoreKey) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds of the client mean of the headline metric."""
    return over_seeds([client_mean(run.last(key), run.measures[0].key) for run in family.runs])


def _pooled(family: Family, key: ScoreKey) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds of the headline metric over all samples; NaN if a client's is undefined."""
    pooled = [run.measures[0].pooled(list(run.last(key).values())) for run in family.runs]
    return spread([float("nan") if value is None else value for value in pooled])


def _megabytes(family: Family) -> float:
    return statistics.fmean(sum(run.sent.values()) / 1e6 for run in family.runs)


def _number(measure: Measure, mean: float, std: float | None) -> str:
    digits = 1 if measure.percent else None
    deviation = "" if std is None else f" ± {measure.text(std, digits)}"
    return f"{measure.text(mean, digits)}{deviation}{' %' if measure.percent else ''}"


def _change(measure: Measure, now: float, before: float) -> str:
    gain = measure.gain(now, before)
    if abs(gain) < (0.0005 if measure.percent else 1e-9):
        return "the same"
    if not measure.percent:
        return f"{measure.text(abs(gain))} {'better' if gain > 0 else 'worse'}"
    return f"{100 * abs(gain):.1f} points {'more' if gain > 0 else 'less'}"


def _signed(measure: Measure, gain: float) -> str:
    return f"{'+' if gain >= 0 else ''}{measure.text(gain, 1 if measure.percent else None)}"


def _listed(words: Sequence[str], conjunction: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def _seeds(family: Family) -> str:
    seeds = [str(run.result["seed"]) for run in family.runs]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {_listed(seeds)}"
