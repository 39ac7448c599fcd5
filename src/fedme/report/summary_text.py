"""The results in words and in one table, each number saying what it is."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedme.core.data import ClientId
from fedme.core.metrics import Measure
from fedme.report import client_view, exchange_view, lineage_view, privacy_view
from fedme.report.run_data import PERSONAL, Family, Kind, Run
from fedme.results.summary import spread, trouble

FEW = 10  # test samples, below which a client's result says little
NAMED = 3  # clients that are named


def view(families: Sequence[Family]) -> dict[str, Any]:
    """What is to be told of each family, line by line, and a table with a line for every model of every family."""
    told = _ranking(families) if len(families) > 1 else []
    for family in families:
        told.append((family.label, _family(family, families)))
    return {"told": [{"about": about, "lines": lines} for about, lines in told], "table": _table(families)}


def _ranking(families: Sequence[Family]) -> list[tuple[str, list[str]]]:
    best: list[tuple[float, float | None, str]] = []
    for family in families:
        mean, std = _over_seeds(family, PERSONAL)
        if mean is not None:
            best.append((mean, std, family.label))
    if not best:
        return []
    measure = families[0].runs[0].measures[0]
    best.sort(key=lambda each: -measure.gain(each[0], 0.0))
    parts = [f"{label} {_shown(measure, mean, std)}" for mean, std, label in best]
    what = f"Test {measure.title} of the personal models after the last round, mean over clients, best first"
    text = [f"{what}: {', '.join(parts)}."]
    if len(best) > 1:
        seeds = [len(family.runs) for family in families]
        text.append(
            "± is the standard deviation over seeds; a gap that is not clearly larger than it says little."
            if min(seeds) > 1
            else "Runs of a single seed have no spread: repeat them with other seeds before you trust a small gap."
        )
    if not all(family.runs[0].same_division(families[0].runs[0]) for family in families):
        text.append("Not all of these runs gave the same samples to the same clients.")
    return [("In short", text)]


def _family(family: Family, families: Sequence[Family]) -> list[str]:
    run = family.runs[0]
    config, everything = run.config, [each for other in families for each in other.runs]
    partition = config["partition"].get("name", "")
    text = [
        f"{_method(family.method)} with {len(run.clients)} clients on {config['data']['name']}"
        f"{f' ({partition} partition)' if partition else ''}, {len(run.rounds)} rounds, {_seeds(family)}."
    ]
    unfinished = [each for each in family.runs if "unfinished" in each.result]
    text += [f"Not finished: seed {each.result['seed']} has {each.result['unfinished']} behind it." for each in unfinished]
    text.append(" ".join(_accuracy(family)))
    text.append(_sent(family))
    text += dict.fromkeys(line for each in family.runs for line in trouble(each.result))
    single = [_worst(run), _against_local(run, client_view.local(run, everything)), _exchanged(run), privacy_view.told(run)]
    of = f"Seed {run.result['seed']}: " if len(family.runs) > 1 else ""
    return text + [of + " ".join(each) for each in single if each]


def _accuracy(family: Family) -> list[str]:
    split = "test" if PERSONAL in family.runs[0].scores else "val"
    mean, std = _over_seeds(family, ("personal", "round", split))
    if mean is None:
        return []
    measure = family.runs[0].measures[0]
    pooled = _shown(measure, *spread([_pooled(run, ("personal", "round", split)) for run in family.runs]))
    word = "test" if split == "test" else "validation"
    text = ["After the last round " + _sentence(family.runs[0], _shown(measure, mean, std), pooled, word)]
    tuned, tuned_std = _over_seeds(family, ("personal", "finetuned", split))
    if tuned is not None:
        text.append(f"After fine-tuning it is {_shown(measure, tuned, tuned_std)}, {_change(measure, tuned, mean)}.")
    return text


def _sentence(run: Run, mean: str, pooled: str, word: str) -> str:
    """What the number that counts says."""
    if run.measures[0].key == "rmse":
        return (
            f"the personal models miss a client's {word} targets by {mean} (the root of the mean squared error, in the unit of "
            f"what is predicted), mean over clients ({pooled} over all samples pooled)."
        )
    what = "samples" if run.measures[0].title == "accuracy" else "labels, each there or not"
    return f"the personal models are right on {mean} of a client's {word} {what}, mean over clients ({pooled} of all pooled)."


def _worst(run: Run) -> list[str]:
    measure = run.measures[0]
    scores = {client: score for client, score in run.last(PERSONAL).items() if score[measure.key] is not None}
    if len(scores) < 2:
        return []
    order = sorted(scores, key=lambda client: measure.gain(scores[client][measure.key], 0.0))
    shown = {client: f"{client} ({_shown(measure, scores[client][measure.key], None)})" for client in order}
    named = [shown[client] for client in order[: min(NAMED, len(order) - 1)]]
    text = [f"The worst clients are {_listed(named)}; the best is client {shown[order[-1]]}."]
    few = [client for client in scores if scores[client]["samples"] < FEW]
    if few:
        text.append(f"{_clients(len(few))} fewer than {FEW} test samples: a single one moves {_its(few)} result a lot.")
    return text


def _against_local(run: Run, alone: Run | None) -> list[str]:
    if alone is None:
        local = run.result["method"] == "local"
        return [] if local else ["No run of Local over the same clients is in this report, so it cannot say what they gained."]
    gains = client_view.gains(run, alone)
    if not gains:
        return []
    up = sum(gain > 0 for gain in gains.values())
    down = sum(gain < 0 for gain in gains.values())
    measure = run.measures[0]
    text = [
        f"Beside training alone, {up} of {len(gains)} clients gained, {down} lost and {len(gains) - up - down} stayed; "
        f"the mean is {_gained(measure, statistics.fmean(gains.values()))} {_unit(measure)}."
    ]
    loser = min(gains, key=lambda client: gains[client])
    if gains[loser] < 0:
        text.append(f"Client {loser} lost most ({_gained(measure, gains[loser])}).")
    return text


def _exchanged(run: Run) -> list[str]:
    lent, adopted = exchange_view.totals(run)
    held = lineage_view.architectures(run)
    text = []
    if lent:
        text.append(f"{lent} models were lent and {adopted} of them ({100 * adopted / lent:.0f} %) adopted.")
        left = len(set(lineage_view.origins(run)[-1].values()))
        text.append(f"The {len(run.clients)} personal models descend from {left} of the {len(run.clients)} first ones.")
    first, last = (Counter(held[index].values()) for index in (0, -1))
    if len(first | last) > 1:
        most = ", ".join(f"{name} ({count})" for name, count in last.most_common())
        text.append(f"Architectures at the end: {most}.")
        gone = [name for name in first if name not in last]
        text += [f"Nobody holds {_listed(gone)} any more."] if gone else []
    return text


def _sent(family: Family) -> str:
    mega = statistics.fmean(sum(run.sent.values()) / 1e6 for run in family.runs)
    return f"{mega:.1f} MB were sent in all, both ways." if mega else "Nothing was sent."


def _table(families: Sequence[Family]) -> dict[str, Any]:
    rows, measure = [], families[0].runs[0].measures[0]
    for family in families:
        kinds = dict.fromkeys(kind for kind in family.runs[0].scores if kind[2] == "test")
        for kind in sorted(kinds, key=lambda kind: (kind[0] != "personal", kind[1] != "round")):
            mean, std = _over_seeds(family, kind)
            if mean is None:
                continue
            pooled, pooled_std = spread([_pooled(run, kind) for run in family.runs])
            worst = statistics.fmean(
                (min if measure.higher else max)(
                    score[measure.key] for score in run.last(kind).values() if score[measure.key] is not None
                )
                for run in family.runs
            )
            if kind[0] == "global" and all(run.last(kind) == run.last(PERSONAL) for run in family.runs):
                continue
            model = kind[0] if kind[1] == "round" else f"{kind[0]}, fine-tuned"
            mega = statistics.fmean(sum(run.sent.values()) / 1e6 for run in family.runs)
            numbers = [
                _shown(measure, mean, std),
                _shown(measure, pooled, pooled_std),
                _shown(measure, worst, None),
                f"{mega:.1f}",
            ]
            rows.append([family.label, family.method, model, *numbers, str(len(family.runs))])
    header = ["run", "method", "model", f"test {measure.title}", "pooled", "worst client", "MB sent", "seeds"]
    return {"header": header, "rows": rows}


def _over_seeds(family: Family, kind: Kind) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds of the client mean of what counts."""
    means = [_mean(run.last(kind), run.measures[0].key) for run in family.runs]
    known = [mean for mean in means if mean is not None]
    return spread(known) if known and len(known) == len(means) else (None, None)


def _mean(scores: Mapping[ClientId, Mapping[str, Any]], key: str) -> float | None:
    values = [score[key] for score in scores.values() if score[key] is not None]
    return statistics.fmean(values) if values else None


def _pooled(run: Run, kind: Kind) -> float:
    pooled = run.measures[0].pooled(list(run.last(kind).values()))
    return float("nan") if pooled is None else pooled


def _shown(measure: Measure, mean: float, std: float | None) -> str:
    digits = 1 if measure.percent else None
    spread = "" if std is None else f" ± {measure.text(std, digits)}"
    return f"{measure.text(mean, digits)}{spread}{' %' if measure.percent else ''}"


def _change(measure: Measure, now: float, before: float) -> str:
    """What fine-tuning changed."""
    gain = measure.gain(now, before)
    if abs(gain) < (0.0005 if measure.percent else 1e-9):
        return "the same"
    if not measure.percent:
        return f"{measure.text(abs(gain))} {'better' if gain > 0 else 'worse'}"
    return f"{100 * abs(gain):.1f} points {'more' if gain > 0 else 'less'}"


def _gained(measure: Measure, gain: float) -> str:
    return f"{'+' if gain >= 0 else ''}{measure.text(gain, 1 if measure.percent else None)}"


def _unit(measure: Measure) -> str:
    """Of a gain."""
    return "points" if measure.percent else f"of {measure.title}, where less is better" if not measure.higher else measure.title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _clients(count: int) -> str:
    return "1 client has" if count == 1 else f"{count} clients have"


def _its(few: Sequence[str]) -> str:
    return "its" if len(few) == 1 else "their"


def _seeds(family: Family) -> str:
    seeds = [str(run.result["seed"]) for run in family.runs]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {_listed(seeds)}"


def _method(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name else name
