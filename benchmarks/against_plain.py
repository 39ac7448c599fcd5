"""Networks as people write them, against the plain loop: seconds a round, sides in turns, one line per network and method.

    python benchmarks/against_plain.py --network vit [--network ...] [--method fedavg] [--rounds 7] [--path stacked] [--explain]

Without `--network` all are measured. CIFAR-10 and Shakespeare are looked for in $FEDME_DATA. "% of peak" is the share of the
sgemm peak of both sides, "spread" the smallest and the largest ratio of one turn.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, get_args

import sides
from rows import CORES, Config
from session import parse
from turns import Side, play, started
from user_report import empty, forms, judged, judged_forms, text
from user_rows import FORMS, METHODS, NETWORKS, MethodName, UserNetwork

import report
from fedme.config.experiment import ConfigError
from fedme.execution.dispatcher import EnginePath

WARM, ROUNDS = 2, 7
NAMES = (*(network.name for network in NETWORKS), "mlp-forms")


def measure(
    name: str, method: MethodName, rounds: int = ROUNDS, warm: int = WARM, quick: bool = False, path: EnginePath = "auto"
) -> dict[str, Any]:
    """One line of the results."""
    if name == "mlp-forms":
        return measure_forms(method, rounds, warm, quick, path)
    network = named(name)
    config = network.config(method, warm + rounds, quick, path)
    try:
        parse(config)
    except ConfigError as error:
        return empty(network, method, f"skipped: {error}")
    try:
        with playing({"ours": ("turns_ours.py", config), "plain": ("turns_plain.py", config)}) as players:
            play(players, 1, 0)
            first = {side: player.answer() for side, player in players.items()}
            seconds = play(players, warm - 1, rounds)
            last = {side: player.answer() for side, player in players.items()}
    except (sides.Failed, OSError) as error:
        return empty(network, method, f"failed: {error}")
    return judged(network, method, seconds, first, last)


def measure_forms(method: MethodName, rounds: int, warm: int, quick: bool, path: EnginePath) -> dict[str, Any]:
    """The same network in several forms, all of them ours."""
    configs = {name: named(name).config(method, warm + rounds, quick, path) for name in FORMS}
    try:
        with playing({name: ("turns_ours.py", config) for name, config in configs.items()}) as players:
            seconds = play(players, warm, rounds)
            answers = {name: player.answer() for name, player in players.items()}
    except (sides.Failed, OSError) as error:
        return forms(method, f"failed: {error}")
    return judged_forms(method, seconds, answers)


@contextlib.contextmanager
def playing(scripts: dict[str, tuple[str, Config]]) -> Iterator[dict[str, Side]]:
    """Sides that are ready to play."""
    with contextlib.ExitStack() as stack:
        players = {name: stack.enter_context(started(script, {"config": config})) for name, (script, config) in scripts.items()}
        for player in players.values():
            player.ready()
        yield players


def named(name: str) -> UserNetwork:
    """A network of the table."""
    return next(network for network in NETWORKS if network.name == name)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--method", action="append", choices=METHODS, help="both by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that are timed")
    parser.add_argument("--warm", type=int, default=WARM, help="rounds before them")
    parser.add_argument("--path", choices=get_args(EnginePath), default="auto", help="engine.path of our side")
    parser.add_argument("--quick", action="store_true", help="tiny work: shows that everything runs, its numbers mean nothing")
    parser.add_argument("--explain", action="store_true", help="also print the engine's explanation of its paths")
    asked = parser.parse_args()
    if asked.rounds < 1 or asked.warm < 1:
        parser.error("--rounds and --warm must be at least 1")
    try:
        found = sides.run("peak.py", {"work": "", "size": 256 if asked.quick else 2048, "times": 20, "threads": CORES})
    except sides.Failed as error:
        parser.exit(1, f"the sgemm peak cannot be measured: {error}\n")
    peak = max(found["gflops"].values())
    print(f"{report.machine()['name']}; sgemm peak {peak:.0f} GF/s", file=sys.stderr)
    for name in asked.network or NAMES:
        for method in asked.method or METHODS:
            line = measure(name, method, asked.rounds, asked.warm, asked.quick, asked.path)
            print(text(line, peak), flush=True)
            for path in line.get("explanation", []) if asked.explain else []:
                print(f"    {path}", flush=True)


if __name__ == "__main__":
    main()
