"""Tables of results: of one run, of its clients, and of several runs side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedme.core.foreign_text import safe_name
from fedme.core.metrics import MEASURES, Measure, task_type_of_row
from fedme.results import records, summary, verdicts
from fedme.results.run_directory import require_readable
from fedme.results.statistics import Gain
from fedme.results.tables import Format, print_prose, render
from fedme.results.verdicts import Verdict

MOST_CLIENTS = 200  # lines of a table of clients on a terminal


def results(folder: Path, style: Format, out: Console, as_json: bool = False, everything: bool = False) -> None:
    """The results of a run, finished or not."""
    result = summary.so_far(folder)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    first = summary.measures_of(result)[0]
    render(*result_table(folder, result, everything or style != "table" or out.width >= 110), style, out)
    if style == "table":
        _below_results(folder, result, first, out)


def result_table(folder: Path, result: Mapping[str, Any], everything: bool) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and cells of the results of a run; without `everything`, of its main measure only."""
    first, *others = summary.measures_of(result)
    header = ["model", "split", "round", first.heading, "std", "pooled %" if first.percent else "pooled"]
    header += [measure.heading for measure in others] if everything else []
    rows = []
    for r in _distinct(result["results"]):
        label = r["model"] if r["stage"] == "round" else f"{r['model']}, fine-tuned"
        t = f"{r['round']} {'last' if r['selection'] == 'last round' else 'best'}"
        numbers = [first.text(r[first.key][name]) for name in ("client_mean", "client_std", "pooled")]
        numbers += [measure.text(r.get(measure.key, {}).get("client_mean")) for measure in others] if everything else []
        rows.append([label, r["split"], t, *numbers])
    count = max((r["clients"] for r in result["results"]), default=0)
    state = f", UNFINISHED: {result['unfinished']}" if "unfinished" in result else ""
    title = f"{result['name']}: {result['method']}, seed {result['seed']}, {count} clients, in {folder}{state}"
    return title, header, rows


def _below_results(folder: Path, result: Mapping[str, Any], first: Measure, out: Console) -> None:
    sent = result["bytes_up"] + result["bytes_down"]
    out.print(
        f"Means over clients, with the standard deviation (ddof = 1) of {first.title}; pooled weights all samples equally."
    )
    out.print(f"Rounds count from 0; best is the best round by validation {first.title}.")
    seconds = f"{_seconds(result['client_seconds'])} at clients, {_seconds(result['server_seconds'])} at the server"
    amount = f"{sent / 1e6:.1f} MB" if sent >= 1e5 else f"{sent / 1e3:.1f} kB"
    out.print(f"Sent {amount} in all; {seconds}." if sent else f"Nothing was sent; {seconds}.")
    if "privacy" in result:
        out.print(private(result["privacy"]), markup=False, highlight=False)
    if missing := result.get("missing"):
        counts = ", ".join(f"{count} ({reason})" for reason, count in missing.items())
        print_prose([f"Missing replies: {counts}."], out)
    print_prose([*summary.trouble(result), *_joining(folder, result)], out)


def _joining(folder: Path, result: Mapping[str, Any]) -> list[str]:
    """Whether joining helped, or how to find out."""
    known = verdicts.strongest(folder)
    if known:
        return [*verdict_lines(known), f"`{verdicts.command(folder)}` shows every client."]
    if "unfinished" in result or not result["bytes_up"] + result["bytes_down"]:
        return []
    return [f"Does joining help? `{verdicts.command(folder)}` compares with training every client alone."]


def verdict_lines(known: Sequence[Verdict]) -> list[str]:
    """The verdicts over all clients, and an alarm for every client that joining hurts."""
    return [verdicts.overall(known).words(), *verdicts.alarms(known)]


def verdict_table(title: str, known: Sequence[Verdict], style: Format, out: Console) -> None:
    """The verdict on every client."""
    first = known[0]
    measure, names = first.measure, verdicts.titles(first.task)
    others = [key for key in ("auroc",) if any(key in verdict.gains for verdict in known)]
    wide = style != "table" or out.width >= 160
    header = ["client", "samples", "model", "federated", "local", "local model", "constant", "gain", "95 % interval"]
    header += [f"{names[key]} gain" for key in others if wide] + ["verdict"]
    cells = []
    for v in known:
        interval = f"{verdicts.signed(measure, v.main.low)} to {verdicts.signed(measure, v.main.high)}"
        row = [
            safe_name(v.client),
            str(v.samples),
            f"{v.arch} ({verdicts.MODELS.get(v.model, v.model)})",
            measure.text(v.value),
            measure.text(v.local),
            v.local_arch,
        ]
        row += [measure.text(v.constant), verdicts.signed(measure, v.main.gain), interval]
        row += [_interval(v.gains.get(key)) for key in others if wide]
        cells.append([*row, v.label])
    render(title, header, cells, style, out)
    if style == "table":
        print_prose(verdict_lines(known), out)


def _interval(gain: Gain | None) -> str:
    return "-" if gain is None else f"{gain.gain:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 1e9 else f"{value:.3g} s"


def private(privacy: Mapping[str, Any]) -> str:
    """The privacy loss of a run, in one sentence."""
    known = {client: value for client, value in privacy["epsilon"].items() if value is not None}
    if not known or len(known) < len(privacy["epsilon"]):
        return "Privacy: no bound (epsilon), because no noise is added."
    worst = max(known, key=lambda client: known[client])
    least = min(known.values())
    spread = f"{least:.2f} to {known[worst]:.2f}" if least < known[worst] else f"{known[worst]:.2f}"
    bound = f"epsilon {spread} (delta {privacy['delta']:g})"
    return f"Privacy: {bound} for the training samples of a client, most for {safe_name(worst)}."


def _distinct(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without a best round that is the last round, and with one line for a global model that is every personal model."""

    def numbers(r: dict[str, Any]) -> Any:
        return r["stage"], r["split"], r["selection"], r["round"], r.get("accuracy"), r["loss"]

    personal = [numbers(r) for r in results if r["model"] == "personal"]
    last = {(r["model"], r["stage"], r["split"]): r["round"] for r in results if r["selection"] == "last round"}
    distinct = []
    for r in results:
        if r["selection"] != "last round" and last[r["model"], r["stage"], r["split"]] == r["round"]:
            continue
        if r["model"] == "global" and numbers(r) in personal:
            continue
        twin = r["model"] == "personal" and any(o["model"] == "global" and numbers(o) == numbers(r) for o in results)
        distinct.append(r | {"model": "personal = global"} if twin else r)
    return distinct


def clients(folder: Path, style: Format, out: Console, as_json: bool = False) -> None:
    """The personal model of every client after the last evaluated round."""
    require_readable(folder)
    rows = [r for r in records.read(folder) if r["model"] == "personal"]
    last = max((r["round"] for r in rows), default=-1)
    measure = MEASURES[task_type_of_row(rows[0] if rows else {})][0]
    table: dict[str, dict[str, Any]] = {}
    for r in rows:
        if r["round"] == last:
            line = table.setdefault(r["client"], {"client": r["client"], "arch": r["arch"]})
            key = f"{r['split']}{', fine-tuned' if r['stage'] == 'finetuned' else ''}"
            line[key] = r[measure.key]
            if r["split"] == "test":
                line["samples"] = r["samples"]
                line |= records.added_numbers(r) if r["stage"] == "round" else {}
            line |= {"epsilon": r["epsilon"]} if "epsilon" in r else {}
    if as_json:
        print(json.dumps(list(table.values()), indent=2))
        return
    lines = list(table.values())
    if style == "table" and len(lines) > MOST_CLIENTS:
        out.print(
            f"{len(lines):,} clients: the {MOST_CLIENTS // 2} worst and the {MOST_CLIENTS // 2} best; --format csv prints all"
        )
        lines = _worst_and_best(lines, measure)
    header = list(dict.fromkeys(key for line in lines for key in line))
    added = {name: Measure(name, name) for name in summary.added_measures(rows)}
    cells = [[_cell(line.get(key), key, added.get(key, measure)) for key in header] for line in lines]
    what = f"{measure.title} in %" if measure.percent else measure.title
    render(f"personal models after round {last}, {what}, in {folder}", header, cells, style, out)


def _worst_and_best(lines: Sequence[dict[str, Any]], measure: Measure) -> list[dict[str, Any]]:
    """The clients at both ends, the worst first, by test results, else by validation results."""
    split = "test" if any(line.get("test") is not None for line in lines) else "val"
    known = [line for line in lines if line.get(split) is not None]
    ranked = sorted(known, key=lambda line: measure.gain(line[split], 0.0))
    return ranked[: MOST_CLIENTS // 2] + ranked[-(MOST_CLIENTS // 2) :]


def _cell(value: Any, key: str, measure: Measure) -> str:
    if key == "epsilon":
        return "no bound" if value is None else f"{value:.2f}"
    return str(value) if isinstance(value, str) or key.endswith("samples") else measure.text(value)


def comparison(lines: list[summary.Line], style: Format, out: Console) -> None:
    """Runs side by side; as CSV, means and deviations have separate columns."""
    if style == "csv":
        words = ["run", "method", "model", "stage", "split", "selection", "differs", "seeds"]
        key = lines[0].measure.key if lines else "accuracy"
        numbers = [f"{key}_mean", f"{key}_std", "pooled_mean", "pooled_std", "bytes"]
        render("", [*words, *numbers], [_record(line) for line in lines], "csv", out)
        return
    names = summary.names({line.config: (line.name, line.method) for line in lines})
    measure = lines[0].measure
    header = ["run", "method", "model", measure.heading, "pooled %" if measure.percent else "pooled", "seeds", "MB sent"]
    rows = [
        [
            names[line.config],
            line.method,
            label,
            spread_text(measure, line.client_mean),
            spread_text(measure, line.pooled),
            str(len(line.seeds)),
            f"{line.bytes / 1e6:.1f}",
        ]
        for line, label in _labelled(lines)
    ]
    if style == "table" and out.width < 100:  # without the method and the bytes
        header, rows = [header[0], *header[2:6]], [[row[0], *row[2:6]] for row in rows]
    what = f"{lines[0].split} {measure.title} of the {lines[0].selection}"
    title = f"{what}: mean over clients, and pooled over samples; ± is over seeds (ddof = 1)"
    render(title, header, rows, style, out)
    if style == "table":
        for config, name in names.items():
            if "#" in name:
                differs = next(line.differs for line in lines if line.config == config)
                out.print(f"{name}: {_settings(differs)}", highlight=False, markup=False)


def spread_text(measure: Measure, values: Sequence[float | None]) -> str:
    """Mean and standard deviation over seeds."""
    mean, std = _spread(values)
    return measure.text(mean) if std is None else f"{measure.text(mean)} ± {measure.text(std)}"


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and deviation, or neither if a value is missing because the models of a seed diverged."""
    known = [value for value in values if value is not None]
    return summary.spread(known) if len(known) == len(values) else (None, None)


def _record(line: summary.Line) -> list[str]:
    numbers = [*_spread(line.client_mean), *_spread(line.pooled), line.bytes]
    words = [line.name, line.method, line.model, line.stage, line.split, line.selection, _settings(line.differs)]
    return [*words, str(len(line.seeds)), *("" if number is None else repr(number) for number in numbers)]


def _settings(differs: Mapping[str, Any]) -> str:
    """The settings in which a run differs from the others, shortened."""
    text = ", ".join(f"{key}={json.dumps(value)}" for key, value in differs.items())
    return text if len(text) <= 120 else text[:117] + "..."


def _labelled(lines: list[summary.Line]) -> list[tuple[summary.Line, str]]:
    """Every line with a label for its model; a global model that is every personal model has one line."""
    rounds = {(line.config, line.model): line for line in lines if line.stage == "round"}

    def twin(line: summary.Line, model: str) -> bool:
        other = rounds.get((line.config, model))
        same = other is not None and (other.client_mean, other.pooled) == (line.client_mean, line.pooled)
        return line.stage == "round" and same

    labelled = []
    for line in lines:
        if line.model == "global" and twin(line, "personal"):
            continue
        label = "personal = global" if line.model == "personal" and twin(line, "global") else line.model
        labelled.append((line, label if line.stage == "round" else f"{label}, fine-tuned"))
    return labelled
