"""The first screen: how good are the models, who gained and who lost, what did it cost, and what to look at next."""

import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from fedme.report import client_view, cost_view, gain_view, lineage_view, summary_text
from fedme.report.formats import clients, count, duration, number, signed, size
from fedme.report.gain_view import Comparison
from fedme.report.run_data import PERSONAL, Family, Run, client_mean
from fedme.results import verdicts
from fedme.results.summary import trouble

STEPS = 5  # of what to look at next
RISING = 0.005  # a validation result that improves by more in the last fifth of the rounds has not settled


def notes(families: Sequence[Family]) -> list[str]:
    """What bears on the results: unfinished and diverged runs, records left out, notes on data and settings."""
    families_by_note: dict[str, list[str]] = {}
    for family in families:
        for run in family.runs:
            seed = f"seed {run.result['seed']}: " if len(family.runs) > 1 else ""
            for text in [*_notes_of_seed(run, seed), *_notes(run)]:
                families_by_note.setdefault(text, []).append(family.label)
    lines = [
        text
        if len(families) == 1 or set(labels) == {f.label for f in families}
        else f"{', '.join(dict.fromkeys(labels))}: {text}"
        for text, labels in families_by_note.items()
    ]
    if not all(family.runs[0].same_division(families[0].runs[0]) for family in families):
        lines.append(
            "Not all of these runs gave the same samples to the same clients: their results are not comparable one to one."
        )
    return lines


def _notes_of_seed(run: Run, seed: str) -> list[str]:
    lines = []
    if "unfinished" in run.result:
        lines.append(f"Unfinished: seed {run.result['seed']} has completed {run.result['unfinished']}.")
    if run.unusable:
        lines.append(f"Left out of this report, because it cannot be used: {run.folder.name}, {'; '.join(run.unusable)}.")
    return lines + [seed + line for line in trouble(run.result)]


def _notes(run: Run) -> list[str]:
    lines: list[str] = []
    for place in (run.environment, run.labels or {}):
        noted = place.get("notes", [])
        # That a setting of another method was dropped bears on nothing; it stays among the facts of the run.
        lines += (
            [text for text in noted if isinstance(text, str) and ": dropped " not in text] if isinstance(noted, list) else []
        )
    return lines


def view(family: Family, compared: Sequence[Comparison]) -> dict[str, Any]:
    """Tiles and next steps of a family."""
    return {
        "tiles": [_quality(family), _gained(family, compared), _worst(family), _cost(family)],
        "next": steps(family, compared),
    }


def _tile(title: str, value: str, details: Sequence[str], link: str, **more: Any) -> dict[str, Any]:
    return {"title": title, "value": value, "details": list(details), "link": link, **more}


def _quality(family: Family) -> dict[str, Any]:
    run = family.runs[0]
    measure = run.measures[0]
    split = "test" if PERSONAL in run.scores else "val"
    mean, std = summary_text.client_means(family, ("personal", "round", split))
    title = f"{'Test' if split == 'test' else 'Validation'} {measure.title}"
    if mean is None:
        return _tile(title, "unknown", ["The models diverged, or were not evaluated."], "rounds")
    seeds = f"± over {len(family.runs)} seeds" if std is not None else "one seed"
    details = [f"personal models, mean over {clients(len(run.last(('personal', 'round', split))))}; {seeds}"]
    tuned, _ = summary_text.client_means(family, ("personal", "finetuned", split))
    details += [f"{number(measure, tuned)} after fine-tuning"] if tuned is not None else []
    majority = _majority(run)
    details += [f"always the most frequent label: {number(measure, majority)}"] if majority is not None else []
    return _tile(title, number(measure, mean, std), details, "rounds")


def _majority(run: Run) -> float | None:
    """The mean accuracy of always predicting a client's most frequent label."""
    known = [value for value in client_view.majority(run) if value is not None]
    return statistics.fmean(known) if known and run.measures[0].key == "accuracy" else None


def _gained(family: Family, compared: Sequence[Comparison]) -> dict[str, Any]:
    title = "Gain over training alone"
    if not compared:
        run = family.runs[0]
        value, detail = ("-", "here every client trained alone") if run.isolated else ("unknown", gain_view.missing(family))
        return _tile(title, value, [detail], "gain")
    one = compared[0]
    overall, measure = one.overall, one.overall.measure
    unit = " points" if measure.percent else f" {measure.title}"
    value = "unknown" if not math.isfinite(overall.mean) else f"{verdicts.signed(measure, overall.mean)}{unit}"
    interval = (
        f"95 % interval {signed(measure, overall.low)} to {signed(measure, overall.high)}; "
        if math.isfinite(overall.low)
        else ""
    )
    details = [f"{interval}compared with {one.against}"]
    sides = [("gained", len(overall.better)), ("lost", len(overall.worse)), ("not clear", len(overall.open))]
    if not one.known:
        return _tile(title, value, [*details, "no interval per client: the run is not finished"], "gain")
    return _tile(title, value, details, "gain", parts=[list(side) for side in sides])


def _worst(family: Family) -> dict[str, Any]:
    run = family.runs[0]
    ranked = summary_text.ranked_clients(run)
    if not ranked:
        return _tile("Worst client", "unknown", ["No client has test results."], "clients")
    measure = run.measures[0]
    client, value, samples = ranked[0]
    seed = f", seed {run.result['seed']}" if len(family.runs) > 1 else ""
    equal = sum(other == value for _, other, _ in ranked) - 1
    seed += f", and {count(equal)} other{'s' * (equal > 1)}" if equal else ""
    details = [
        f"client {client}, {samples:,} test samples{seed}",
        f"best client: {number(measure, ranked[-1][1])} ({ranked[-1][0]})",
    ]
    return _tile("Worst client", number(measure, value), details, "clients", client=client)


def _cost(family: Family) -> dict[str, Any]:
    run = family.runs[0]
    total = cost_view.sent(family)
    at_clients, at_server = cost_view.seconds(family)
    rounds = max(1, len(run.rounds))
    details = [f"{size(total / rounds / max(1, len(run.clients)))} per client and round"] if total else ["nothing was sent"]
    details.append(f"{duration(at_clients)} at the clients, {duration(at_server)} at the server")
    known = cost_view.parameters(run)
    if known:
        sizes = [parameters for parameters, _ in known.values()]
        spread = f"{count(min(sizes))} to {count(max(sizes))}" if len(set(sizes)) > 1 else count(sizes[0])
        details.append(f"{spread} parameters per model")
    return _tile("Cost: bytes sent", size(total) if total else "0", details, "bytes")


def steps(family: Family, compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """What to look at next, the most important first: a text, and a chart, a client or a command."""
    run = family.runs[0]
    proposals = [
        *_unfinished(family),
        *_below_majority(run),
        *_losses(compared),
        *_uncompared(family, compared),
        *_one_seed(family),
    ]
    proposals += [*_few_samples(run, compared), *_still_rising(run)]
    gone = lineage_view.lost(run)
    if gone:
        proposals.append({"text": f"{len(gone)} of the initial architectures died out: {', '.join(gone)}.", "link": "shares"})
    ranked = summary_text.ranked_clients(run)
    if ranked and len(proposals) < STEPS:
        client, value, _ = ranked[0]
        text = f"Follow the worst client, {client} ({number(run.measures[0], value)}), through all charts."
        proposals.append({"text": text, "link": "clients", "client": client})
    return proposals[:STEPS]


def _unfinished(family: Family) -> list[dict[str, Any]]:
    open_runs = [run for run in family.runs if "unfinished" in run.result]
    return [
        {"text": f"Finish seed {run.result['seed']}, which has {run.result['unfinished']}:", "command": _fedme("resume", run)}
        for run in open_runs[:1]
    ]


def _below_majority(run: Run) -> list[dict[str, Any]]:
    majority, mean = _majority(run), client_mean(run.last(PERSONAL), "accuracy")
    if majority is None or mean is None or mean >= majority:
        return []
    text = "The models are worse than always predicting the most frequent label. Train longer, or with another learning rate."
    return [{"text": text, "link": "rounds"}]


def _losses(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    if not compared:
        return []
    one = compared[0]
    lost = sorted((v for v in one.verdicts if v.client in set(one.overall.worse)), key=lambda v: v.main.gain)
    if not lost:
        return []
    worst, measure = lost[0], one.overall.measure
    unit = " points" if measure.percent else ""
    others = f"{clients(len(lost))} lost by joining; most" if len(lost) > 1 else "1 client lost by joining:"
    text = f"{others} client {worst.client} ({signed(measure, worst.main.gain)}{unit}). Why?"
    return [{"text": text, "link": "gain", "client": worst.client}]


def _uncompared(family: Family, compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    run = family.runs[0]
    if run.isolated or "unfinished" in run.result or any(one.key == "verdict" for one in compared):
        return []
    if run.config["data"]["name"] == "sites":
        return [{"text": "Does joining help? Every site asks at its place:", "command": "fedme deploy verdict"}]
    what = "the best that it could train alone, with every architecture" if compared else "training alone"
    return [{"text": f"Compare every client with {what}:", "command": gain_view.command(run)}]


def _one_seed(family: Family) -> list[dict[str, Any]]:
    run = family.runs[0]
    if len(family.runs) > 1 or run.config["data"]["name"] in ("sites", "given"):
        return []
    config, seed = run.folder / "config.toml", run.result["seed"] + 1
    target = shlex.quote(f"output={run.folder}-seed-{seed}")
    text = "One seed has no spread. Repeat the run with another one:"
    return [{"text": text, "command": f"fedme run {shlex.quote(str(config))} seed={seed} {target}"}]


def _few_samples(run: Run, compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    ranked = summary_text.ranked_clients(run)
    few = sum(samples < summary_text.FEW_SAMPLES for _, _, samples in ranked)
    if not few or run.isolated or run.config["data"]["name"] == "sites":
        return []
    if any(verdict.folds > 1 for one in compared for verdict in one.verdicts[:1]):
        return []
    verb = "has" if few == 1 else "have"
    text = f"{clients(few)} {verb} fewer than {summary_text.FEW_SAMPLES} test samples. Test on every sample once:"
    return [{"text": text, "command": f"{gain_view.command(run)} --folds 5"}]


def _still_rising(run: Run) -> list[dict[str, Any]]:
    scores = run.scores.get(("personal", "round", "val"), {})
    rounds = sorted(scores)
    if len(rounds) < 10:
        return []
    measure = run.measures[0]
    last, before = (client_mean(scores[t], measure.key) for t in (rounds[-1], rounds[int(0.8 * len(rounds))]))
    if last is None or before is None:
        return []
    least = RISING if measure.percent else RISING * abs(before)
    if measure.gain(last, before) <= least:
        return []
    return [{"text": f"Validation {measure.title} still improves at the end: more rounds may help.", "link": "rounds"}]


def _fedme(verb: str, run: Run) -> str:
    return f"fedme {verb} {shlex.quote(str(run.folder))}"
