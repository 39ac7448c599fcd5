"""Metrics and callbacks of a program in a run: they are called here, and their numbers become part of the records."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.config.experiment import Experiment
from fedme.core.atomic_files import RunError, finite
from fedme.core.callbacks import Callback, ClientEvaluation, ClientRound, FinishedRound, Metric, number, numbers
from fedme.core.data import ClientId
from fedme.federation.client_work import Evaluation, ModelScore
from fedme.federation.round import Traffic


class Observers:
    """The metrics and callbacks of one run; `numbers` are those that callbacks returned in the current round, by client."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        supplied = experiment.supplied
        self.metrics: Mapping[str, Metric] = supplied.metrics if supplied else {}
        self.callbacks: Sequence[Callback] = supplied.callbacks if supplied else ()
        self.rounds, self.folder = experiment.settings.rounds, folder
        self.numbers: dict[ClientId, dict[str, float]] = defaultdict(dict)

    def clients(self, t: int, traffic: Mapping[ClientId, Traffic]) -> None:
        """Call `on_client` for every client that was asked in the round."""
        for client, sent in traffic.items() if self.callbacks else ():
            report = sent.report
            event = ClientRound(
                t,
                self.rounds,
                client,
                dict(report.losses),
                dict(report.notes),
                sent.bytes_up,
                sent.bytes_down,
                sent.seconds,
                sent.answered,
            )
            for callback in self.callbacks:
                self.numbers[client] |= numbers(callback.on_client(event), f"{_name(callback)}.on_client")

    def evaluated(self, t: int, client: ClientId, evaluation: Evaluation) -> list[ModelScore]:
        """Compute the metrics of a client's models and call `on_evaluation`. Returns the scores with the metrics.

        They are computed from the outputs of an evaluation, which are those of the personal model, and after the last round
        those of the other models too.
        """
        scores = list(evaluation.scores)
        if self.metrics:
            scores = [replace(score, own=self._metrics(client, score, evaluation.outputs)) for score in scores]
        if not self.callbacks:
            return scores
        personal = {score.split: score.metrics for score in scores if (score.model, score.stage) == ("personal", "round")}
        event = ClientEvaluation(t, self.rounds, client, personal, evaluation.models.get("personal"))
        for callback in self.callbacks:
            self.numbers[client] |= numbers(callback.on_evaluation(event), f"{_name(callback)}.on_evaluation")
        return scores

    def _metrics(self, client: ClientId, score: ModelScore, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        role = "finetuned" if score.stage == "finetuned" else score.model
        answers, targets = outputs.get(f"{score.split}/{role}"), outputs.get(f"{score.split}/targets")
        if answers is None or targets is None:
            return {}
        values = {}
        for name, metric in self.metrics.items():
            what = f"metric '{name}', client {client}, {score.split} samples"
            try:
                values[name] = number(metric(answers, targets), what)
            except RunError:
                raise
            except Exception as error:  # a user's function may raise anything
                raise RunError(f"{what}: {type(error).__name__}: {error}") from error
        return values

    def finished(self, t: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Call `on_round`, and return the rows with the numbers of all callbacks of the round."""
        if not self.callbacks:
            return rows
        common: dict[str, float] = {}
        shown = [dict(row) for row in rows]
        for callback in self.callbacks:
            event = FinishedRound(t, self.rounds, self.folder, shown)
            common |= numbers(callback.on_round(event), f"{_name(callback)}.on_round")
        returned, self.numbers = self.numbers, defaultdict(dict)
        # As they are recorded: the summary of a run is made from these rows.
        added = {row["client"]: finite({**common, **returned.get(row["client"], {})}) for row in rows}
        return [row | {"callbacks": added[row["client"]]} if added[row["client"]] else row for row in rows]


def _name(callback: Callback) -> str:
    return type(callback).__name__
