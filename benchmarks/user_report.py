"""Judge and show the comparisons with the plain loop."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from user_rows import FORMS_BAR, UserNetwork

SAME_LOSS = 0.01  # relative difference of the test losses after the first round: weights and batches are the same
SAME_ACCURACY = 0.05  # after the last round: rounding errors have grown, and clients may have adopted other models

Answers = Mapping[str, Mapping[str, Any]]  # by side
Seconds = Mapping[str, Sequence[float]]  # of the rounds, by side


def empty(network: UserNetwork, method: str, reason: str = "") -> dict[str, Any]:
    """A line without measurements, and why there are none."""
    bars = {"bar": network.bar, "reach": network.reach, "reach_peak": network.peak}
    return {"network": network.name, "work": network.about, "method": method, **bars, "met": None, "note": reason}


def judged(network: UserNetwork, method: str, seconds: Seconds, first: Answers, last: Answers) -> dict[str, Any]:
    """Ratio and verdict. A comparison of unequal work, or with unequal results, does not count as met."""
    ours, plain = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["plain"], strict=True)]
    unfair = differences(network, first, last)
    return empty(network, method, "; ".join(unfair)) | {
        "ours_s": ours,
        "plain_s": plain,
        "ratio": plain / ours,
        "spread": [min(ratios), max(ratios)],
        "met": network.met(plain / ours) and not unfair,
        "gflops": {"ours": last["ours"]["flop"] / ours / 1e9, "plain": last["ours"]["flop"] / plain / 1e9},
        "loss_after_first_round": {name: said["loss"] for name, said in first.items()},
        "accuracy": {name: said["accuracy"] for name, said in last.items()},
        "paths": last["ours"]["paths"],
        "explanation": last["ours"]["explanation"],
        "rounds": {name: list(each) for name, each in seconds.items()},
    }


def differences(network: UserNetwork, first: Answers, last: Answers) -> list[str]:
    """What makes a comparison unfair."""
    found = []
    for what in ("steps", "samples"):
        if last["ours"][what] != last["plain"][what]:
            found.append(f"{what} differ: {last['ours'][what]} and {last['plain'][what]}")
    losses = first["ours"]["loss"], first["plain"]["loss"]
    if network.repeatable and not abs(losses[0] - losses[1]) <= SAME_LOSS * losses[1]:
        found.append(f"losses after the first round differ: {losses[0]:.4f} and {losses[1]:.4f}")
    accuracies = last["ours"]["accuracy"], last["plain"]["accuracy"]
    if not abs(accuracies[0] - accuracies[1]) <= SAME_ACCURACY:
        found.append(f"accuracies differ: {accuracies[0]:.4f} and {accuracies[1]:.4f}")
    return found


def judged_forms(method: str, seconds: Seconds, answers: Answers) -> dict[str, Any]:
    """One network in several forms: the slowest form divided by the fastest."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    slowest, fastest = max(medians, key=medians.__getitem__), min(medians, key=medians.__getitem__)
    turns = [slow / fast for slow, fast in zip(seconds[slowest], seconds[fastest], strict=True)]
    ratio = medians[slowest] / medians[fastest]
    return forms(method, ", ".join(f"{name} {each:.3f} s" for name, each in medians.items())) | {
        "ratio": ratio,
        "spread": [min(turns), max(turns)],
        "met": ratio <= FORMS_BAR,
        "paths": list(dict.fromkeys(path for said in answers.values() for path in said["paths"])),
        "rounds": {name: list(each) for name, each in seconds.items()},
    }


def forms(method: str, reason: str = "") -> dict[str, Any]:
    """The line of the forms without measurements."""
    work = {"network": "mlp-forms", "work": "the MLP in three forms: the slowest divided by the fastest", "method": method}
    return work | {"bar": FORMS_BAR, "reach": None, "reach_peak": None, "met": None, "note": reason}


def cells(line: Mapping[str, Any], gflops: float | None) -> dict[str, str]:
    """What is shown of a line; `gflops` is the sgemm peak."""
    shown = {"network": line["network"], "method": line["method"], "path": ", ".join(line.get("paths", []))}
    for name in ("ours", "plain"):
        shown[f"{name}, s"] = f"{line[f'{name}_s']:.3f}" if f"{name}_s" in line else "-"
    measured = "ratio" in line
    shown["ratio"] = f"{line['ratio']:.2f}" if measured else "-"
    shown["spread"] = "{:.2f} to {:.2f}".format(*line["spread"]) if measured else "-"
    share = "gflops" in line and gflops
    shown["% of peak"] = " / ".join(f"{100 * each / gflops:.0f}" for each in line["gflops"].values()) if share else "-"
    reach = [f"{line['reach']:g}"] if line["reach"] else []
    reach += [f"{100 * line['reach_peak']:.0f} %"] if line["reach_peak"] else []
    shown["bar"] = ("<= " if line["network"] == "mlp-forms" else ">= ") + f"{line['bar']:g}"
    shown["reach for"] = ", ".join(reach)
    shown["met"] = {None: "not measured", True: "yes", False: "NO"}[line["met"]]
    first = line.get("loss_after_first_round", {})
    shown["loss after round 1"] = " / ".join(f"{value:.4f}" for value in first.values())
    shown["accuracy"] = " / ".join(f"{100 * value:.1f}" for value in line.get("accuracy", {}).values())
    return shown | {"note": line["note"].replace("|", "/").replace("\n", " ")}


def text(line: Mapping[str, Any], gflops: float | None) -> str:
    """One line for a terminal."""
    if "ratio" not in line:
        return f"{line['network']:18}{line['method']:7} {line['note']}"
    shown = cells(line, gflops)
    head = f"{shown.pop('network'):18}{shown.pop('method'):7} {shown.pop('path')}"
    return " | ".join([head, *(f"{name} {value}" for name, value in shown.items() if value not in ("", "-"))])
