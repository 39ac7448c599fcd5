"""Every client on its own: how good its models are, how they became so, and what each gained over training alone."""

from collections.abc import Sequence
from typing import Any

from fedme.core.data import ClientId
from fedme.report.run_data import PERSONAL, Kind, Run

MOST_ROUNDS = 100  # of the history of single clients; of longer runs every n-th round is kept


def view(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """How all clients of a run do in the end and their history; `local` is the run that tells what they had alone."""
    kinds = [kind for kind in run.scores if kind[0] == "personal"]
    alone = local(run, runs)
    return {
        "results": {_word(kind): [_result(run, kind, client) for client in run.clients] for kind in kinds},
        "samples": [run.last(PERSONAL).get(client, {}).get("samples") for client in run.clients],
        "history": {kind[2]: _history(run, kind) for kind in kinds if kind[1] == "round"},
        "local": None if alone is None else runs.index(alone),
        "comparable": [index for index, other in enumerate(runs) if other is not run and run.same_division(other)],
    }


def local(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run of Local over the same clients with the same samples."""
    if run.result["method"] == "local":
        return None
    return next((other for other in runs if other.result["method"] == "local" and run.same_division(other)), None)


def gains(run: Run, alone: Run, stage: str = "round") -> dict[ClientId, float]:
    """How much better a client's personal model is on its test part than what it had alone, where both are known."""
    found, measure = {}, run.measures[0]
    for client, score in run.last(("personal", stage, "test")).items():
        before = alone.last(PERSONAL).get(client, {}).get(measure.key)
        if before is not None and score[measure.key] is not None:
            found[client] = measure.gain(score[measure.key], before)
    return found


def _word(kind: Kind) -> str:
    return f"{kind[2]} {kind[1]}"


def _result(run: Run, kind: Kind, client: ClientId) -> float | None:
    return _short(run.last(kind).get(client, {}).get(run.measures[0].key))


def _short(value: float | None) -> float | None:
    """Five digits that count."""
    return None if value is None else float(f"{value:.5g}")


def _history(run: Run, kind: Kind) -> dict[str, Any]:
    rounds = sorted(run.scores[kind])
    step = -(-len(rounds) // MOST_ROUNDS)
    kept = [t for index, t in enumerate(rounds) if index % step == 0 or t == rounds[-1]]

    def value(t: int, client: ClientId) -> float | None:
        return _short(run.scores[kind][t].get(client, {}).get(run.measures[0].key))

    return {"rounds": kept, "values": [[value(t, client) for t in kept] for client in run.clients]}
