"""Networks as people write them, against the plain loop: seconds a round, sides in turns, one line per network and method.

    python benchmarks/against_plain.py --network vit [--network ...] [--method fedavg] [--rounds 7] [--path stacked] [--explain]

Without `--network` all are measured. CIFAR-10 and Shakespeare are looked for in $FEDME_DATA.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any, get_args

import sides
from rows import CORES
from session import parse
from turns import play, started
from user_rows import METHODS, NETWORKS, MethodName, UserNetwork

import report
from fedme.config.experiment import ConfigError
from fedme.execution.dispatcher import EnginePath

SAME_LOSS = 0.01  # relative difference of the test losses after the first round: weights and batches are the same


def measure(
    network: UserNetwork, method: MethodName, rounds: int = 7, warm: int = 2, quick: bool = False, path: EnginePath = "auto"
) -> dict[str, Any]:
    """One line of the results."""
    config = network.config(method, warm + rounds, quick, path)
    line = {"network": network.name, "work": network.about, "method": method, "bar": network.bar, "reach": network.reach}
    line |= {"reach_peak": network.peak, "met": None, "note": ""}
    try:
        parse(config)
    except ConfigError as error:
        return line | {"note": f"skipped: {error}"}
    try:
        with started("turns_ours.py", {"config": config}) as ours, started("turns_plain.py", {"config": config}) as plain:
            players = {"ours": ours, "plain": plain}
            for side in players.values():
                side.ready()
            play(players, 1, 0)
            first = {name: side.answer() for name, side in players.items()}
            seconds = play(players, warm - 1, rounds)
            last = {name: side.answer() for name, side in players.items()}
    except (sides.Failed, OSError) as error:
        return line | {"note": f"failed: {error}"}
    return line | judged(network, seconds, first, last)


def judged(
    network: UserNetwork, seconds: dict[str, list[float]], first: dict[str, dict[str, Any]], last: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Ratio and verdict. A comparison of unequal work, or with unequal results, does not count as met."""
    ours, plain = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["plain"], strict=True)]
    fair = unfair(network, first, last)
    return {
        "ours_s": ours,
        "plain_s": plain,
        "ratio": plain / ours,
        "spread": [min(ratios), max(ratios)],
        "rounds": seconds,
        "met": network.met(plain / ours) and not fair,
        "gflops": {"ours": last["ours"]["flop"] / ours / 1e9, "plain": last["ours"]["flop"] / plain / 1e9},
        "loss_after_first_round": {name: said["loss"] for name, said in first.items()},
        "accuracy": {name: said["accuracy"] for name, said in last.items()},
        "paths": last["ours"]["paths"],
        "explanation": last["ours"]["explanation"],
        "note": "; ".join(fair),
    }


def unfair(network: UserNetwork, first: dict[str, dict[str, Any]], last: dict[str, dict[str, Any]]) -> list[str]:
    """What makes the comparison unfair."""
    found = []
    for what in ("steps", "samples"):
        if last["ours"][what] != last["plain"][what]:
            found.append(f"{what} differ: {last['ours'][what]} and {last['plain'][what]}")
    losses = first["ours"]["loss"], first["plain"]["loss"]
    if network.repeatable and not abs(losses[0] - losses[1]) <= SAME_LOSS * losses[1]:
        found.append(f"losses after the first round differ: {losses[0]:.4f} and {losses[1]:.4f}")
    return found


def peak(quick: bool) -> float:
    """10^9 floating-point operations a second of large products of matrices."""
    found = sides.run("peak.py", {"work": "", "size": 256 if quick else 2048, "times": 20, "threads": CORES})
    return float(max(found["gflops"].values()))


def text(line: dict[str, Any], gflops: float) -> str:
    """One line for a terminal."""
    head = f"{line['network']:18}{line['method']:7}"
    if "ratio" not in line:
        return f"{head} {line['note']}"
    low, high = line["spread"]
    shares = " / ".join(f"{100 * line['gflops'][name] / gflops:.0f} %" for name in ("ours", "plain"))
    reach = [f"{line['reach']:g}"] if line["reach"] else []
    reach += [f"{100 * line['reach_peak']:.0f} %"] if line["reach_peak"] else []
    cells = [
        f"{head} {', '.join(line['paths'])}",
        f"ours {line['ours_s']:.3f} s",
        f"plain {line['plain_s']:.3f} s",
        f"ratio {line['ratio']:.2f} ({low:.2f} to {high:.2f})",
        f"peak {shares}",
        f"bar {line['bar']:g}" + (f", reach for {' and '.join(reach)}" if reach else ""),
        f"met {'yes' if line['met'] else 'NO'}",
        f"accuracy {' / '.join(f'{100 * value:.1f}' for value in line['accuracy'].values())}",
        *([line["note"]] if line["note"] else []),
    ]
    return " | ".join(cells)


def chosen(names: Sequence[str] | None) -> list[UserNetwork]:
    """The networks of these names, all by default."""
    return [network for network in NETWORKS if not names or network.name in names]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=[network.name for network in NETWORKS], metavar="NAME")
    parser.add_argument("--method", action="append", choices=METHODS, help="both by default")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    parser.add_argument("--warm", type=int, default=2, help="rounds before them")
    parser.add_argument("--path", choices=get_args(EnginePath), default="auto", help="engine.path of our side")
    parser.add_argument("--quick", action="store_true", help="tiny work: shows that everything runs, its numbers mean nothing")
    parser.add_argument("--explain", action="store_true", help="also print the engine's explanation of its paths")
    asked = parser.parse_args()
    if asked.rounds < 1 or asked.warm < 1:
        parser.error("--rounds and --warm must be at least 1")
    gflops = peak(asked.quick)
    print(f"{report.machine()['name']}; sgemm peak {gflops:.0f} GF/s", file=sys.stderr)
    for network in chosen(asked.network):
        for method in asked.method or METHODS:
            line = measure(network, method, asked.rounds, asked.warm, asked.quick, asked.path)
            print(text(line, gflops), flush=True)
            for path in line.get("explanation", []) if asked.explain else []:
                print(f"    {path}", flush=True)


if __name__ == "__main__":
    main()
