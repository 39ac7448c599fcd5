"""A federation that is ready to play rounds: from a configuration, through the library's public functions only."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import division

from fedme.config import experiment
from fedme.config.experiment import Experiment
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.operations import Op, Train
from fedme.datasets import Federation
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.running import assembly
from fedme.running.garbage_collection import existing_objects_left_out, rare_collections

sys.path.insert(0, str(Path(__file__).parent))  # `networks:cnn` is found wherever the benchmark is started


@dataclass
class Count:
    """What an engine was asked to train."""

    steps: int = 0
    samples: int = 0

    def add(self, operations: Sequence[Op]) -> None:
        """Count these operations."""
        for op in operations:
            if isinstance(op, Train):
                batches = op.batch_schedule.batches(len(op.data), op.key.at("batches"))
                self.steps += len(batches)
                self.samples += sum(map(len, batches))


class Session:
    """One experiment in memory, round by round."""

    def __init__(self, experiment: Experiment, federation: Federation) -> None:
        self.experiment, self.federation = experiment, federation
        self.root, self.method = Key(experiment.settings.seed), experiment.method
        self.dispatcher = assembly.executor(experiment.settings.engine)
        self.task: Task = assembly.prepare(experiment, federation, self.dispatcher).task
        self.engine = InProcessEngine(
            self.method,
            self.task,
            federation.clients,
            self.root,
            self.dispatcher,
            update_bn=experiment.settings.models.update_bn,
        )
        self.server = self.method.init_server(self.task, self.root.at("init"))
        self.t = 0

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Session":
        """The session that plain data describes."""
        experiment = parse(raw)
        return cls(experiment, assembly.gather(experiment))

    def __enter__(self) -> "Session":
        self._rounds = existing_objects_left_out()  # as in a run
        self._rounds.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._rounds.__exit__(None, None, None)
        self.dispatcher.close()

    def play(self) -> None:
        """One round."""
        with rare_collections(self.experiment.settings.train.cohort or len(self.task.members)):  # as in a run
            self.server = run_round(self.method, self.task, self.engine, self.server, self.t, self.rounds, self.root).server
        self.t += 1

    def counted(self) -> Count:
        """One round, and what was trained in it."""
        count, execute = Count(), self.engine.execute

        def watching(operations: Sequence[Op]) -> Sequence[tuple[Any, float]]:
            count.add(operations)
            return execute(operations)

        self.engine.execute = watching
        try:
            self.play()
        finally:
            self.engine.execute = execute
        return count

    @property
    def rounds(self) -> int:
        """How many rounds the experiment has."""
        return self.experiment.settings.rounds

    def accuracy(self) -> float:
        """The share of right answers of the personal models (with FedAvg: the global one) on all test samples."""
        return self.tested()["accuracy"]

    def tested(self) -> dict[str, float]:
        """Loss and accuracy of the personal models (with FedAvg: the global one) on all test samples."""
        deliveries = {client: self.method.deliver(self.task, self.server, client) for client in self.task.members}
        done = self.engine.evaluate_models(deliveries, Round(self.t - 1, self.rounds))
        tested = [s.metrics for each in done.values() for s in each.value.scores if (s.model, s.split) == ("personal", "test")]
        samples, loss = sum(each.samples for each in tested), sum(each.samples * (each.loss or 0.0) for each in tested)
        return {"loss": loss / samples, "accuracy": sum(each.correct for each in tested) / samples}


def parse(raw: Mapping[str, Any]) -> Experiment:
    """The experiment that plain data describes; the divisions of the benchmark are known in it."""
    division.register()
    return experiment.parse(raw, "benchmark")
