"""Per client: final results with intervals, their history, and the score of the most frequent label."""

from collections.abc import Sequence
from typing import Any

from fedme.core.data import ClientId
from fedme.report.run_data import PERSONAL, Run, ScoreKey
from fedme.results.statistics import proportion

MAX_ROUNDS = 100  # of a client's history; longer runs keep every n-th round


def view(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Final results and history of every client. `local` and `comparable` are positions in `runs`."""
    keys = [key for key in run.scores if key[0] == "personal"]
    baseline = local(run, runs)
    return {
        "results": {f"{key[2]} {key[1]}": [_score(run, key, client) for client in run.clients] for key in keys},
        "intervals": {f"{key[2]} {key[1]}": [_interval(run, key, client) for client in run.clients] for key in keys},
        "majority": [None if value is None else round(value, 4) for value in majority(run)],
        "samples": [run.last(PERSONAL).get(client, {}).get("samples") for client in run.clients],
        "history": {key[2]: _history(run, key) for key in keys if key[1] == "round"},
        "local": None if baseline is None else runs.index(baseline),
        "comparable": [index for index, other in enumerate(runs) if other is not run and run.same_division(other)],
    }


def local(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run in which the same clients trained alone on the same samples."""
    if run.isolated:
        return None
    return next((other for other in runs if other.isolated and run.same_division(other)), None)


def majority(run: Run) -> list[float | None]:
    """Per client, the accuracy of always answering with its most frequent label, by the labels of all its samples."""
    if run.labels is None or run.result.get("task", "classification") != "classification":
        return [None] * len(run.clients)
    counts = [list(run.labels["clients"][client]["labels"].values()) for client in run.clients]
    return [max(of_client) / sum(of_client) if of_client and sum(of_client) else None for of_client in counts]


def _interval(run: Run, key: ScoreKey, client: ClientId) -> list[float] | None:
    """The 95 % interval of an accuracy, from the number of samples; None for other metrics."""
    score = run.last(key).get(client)
    if run.result.get("task", "classification") != "classification" or score is None or score["accuracy"] is None:
        return None
    low, high = proportion(score["accuracy"] * score["samples"], score["samples"])
    return [round(low, 4), round(high, 4)]


def _score(run: Run, key: ScoreKey, client: ClientId, t: int | None = None) -> float | None:
    """The headline metric in the last round, as it was recorded, or in round `t`, rounded to six significant digits."""
    scores = run.last(key) if t is None else run.scores[key][t]
    value = scores.get(client, {}).get(run.measures[0].key)
    return value if value is None or t is None else float(f"{value:.6g}")


def _history(run: Run, key: ScoreKey) -> dict[str, Any]:
    rounds = sorted(run.scores[key])
    step = -(-len(rounds) // MAX_ROUNDS)
    rounds = [t for index, t in enumerate(rounds) if index % step == 0 or t == rounds[-1]]
    return {"rounds": rounds, "values": [[_score(run, key, client, t) for t in rounds] for client in run.clients]}
