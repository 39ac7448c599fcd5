"""Per client: final results, their history, and the gain over local training."""

from collections.abc import Sequence
from typing import Any

from fedme.core.data import ClientId
from fedme.report.run_data import PERSONAL, Run, ScoreKey

MAX_ROUNDS = 100  # of a client's history; longer runs keep every n-th round


def view(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Final results and history of every client. `local` and `comparable` are positions in `runs`."""
    keys = [key for key in run.scores if key[0] == "personal"]
    baseline = local(run, runs)
    return {
        "results": {f"{key[2]} {key[1]}": [_score(run, key, client) for client in run.clients] for key in keys},
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


def gains(run: Run, baseline: Run) -> dict[ClientId, float]:
    """By how much each client's personal model beats its model in `baseline` on test data, where both have a result."""
    measure = run.measures[0]
    before = {client: score[measure.key] for client, score in baseline.last(PERSONAL).items()}
    return {
        client: measure.gain(score[measure.key], before[client])
        for client, score in run.last(PERSONAL).items()
        if score[measure.key] is not None and before.get(client) is not None
    }


def _score(run: Run, key: ScoreKey, client: ClientId, t: int | None = None) -> float | None:
    """The headline metric in a round (the last one by default), rounded to five significant digits."""
    scores = run.last(key) if t is None else run.scores[key][t]
    value = scores.get(client, {}).get(run.measures[0].key)
    return None if value is None else float(f"{value:.5g}")


def _history(run: Run, key: ScoreKey) -> dict[str, Any]:
    rounds = sorted(run.scores[key])
    step = -(-len(rounds) // MAX_ROUNDS)
    rounds = [t for index, t in enumerate(rounds) if index % step == 0 or t == rounds[-1]]
    return {"rounds": rounds, "values": [[_score(run, key, client, t) for t in rounds] for client in run.clients]}
