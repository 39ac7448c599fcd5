"""The round loop: plan, dispatch, train, aggregate, evaluate, record, checkpoint.

States are values, so a run can stop anywhere: what is saved is always a whole number of rounds.
"""

import functools
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedme.artifacts import model_cards, saved_models, unseen_clients
from fedme.config.experiment import Experiment
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.metrics import MEASURES, Measure
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune, ModelScore
from fedme.federation.malicious_clients import MaliciousClients
from fedme.federation.offences import OffenceRecord
from fedme.federation.round import Engine, Traffic, run_round
from fedme.results import loggers, records
from fedme.results.lineage import Lineage, lineages
from fedme.running import checkpoint, privacy_budget
from fedme.running.progress import Display
from fedme.running.weight_store import Store

COPIES = 4  # of a client's weights while it is assessed: personal and shared model, fine-tuned copy, its momentum
PART = 4  # the share of the memory for weights that one group of clients may take while it is assessed


class Interrupted(Exception):
    """Somebody asked the run to stop; what was finished is saved. The text says where, and how to go on."""


class Loop:
    """One run's rounds."""

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        engine: Engine,
        store: Store,
        display: Display,
        logs: loggers.Logs,
        clients: Mapping[ClientId, ClientData] | None = None,  # those whose models are saved here
        malicious: tuple[ClientId, ...] = (),
    ) -> None:
        self.folder, self.experiment, self.malicious = folder, experiment, malicious
        self.engine, self.store, self.display, self.logs = engine, store, display, logs
        self.clients = clients or {}
        self.method: AnyMethod = experiment.method
        self.root = Key(experiment.settings.seed)
        self.shown = ""
        self.offences: Mapping[ClientId, OffenceRecord] = {}
        self.ancestry: Mapping[ClientId, Lineage] = {}  # known at the end

    def run(self, at: checkpoint.Checkpoint, config: Mapping[str, Any]) -> None:
        """Go on from `at` to the last round."""
        settings = self.experiment.settings
        self.engine.states.update(at.clients)
        self.engine.states.ledgers.update(at.header.spent)
        self.offences = at.header.offences
        book = records.Records(self.folder, at.header.metrics_bytes, at.header.metrics_check)
        self.display.start("round", settings.rounds, at.header.round)
        saved_round = at.header.round
        try:
            for t in range(at.header.round, settings.rounds):
                server = self._round(at.server, t, book)
                header = checkpoint.Header(
                    t + 1, book.size, at.header.assigned, dict(self.engine.states.ledgers), self.offences, book.check
                )
                at = checkpoint.Checkpoint(header, server, dict(self.engine.states), at.archs)
                if (t + 1) % settings.checkpoint_every == 0 or t + 1 == settings.rounds:
                    self.store.later(functools.partial(self.save, at, config, book))
                    saved_round = t + 1
                self.display.advance(self.shown)
            self.store.wait()
        except Interrupted:
            self.store.wait()
            if saved_round != at.header.round:
                self.save(at, config, book)
            again = shlex.quote(str(self.folder))
            raise Interrupted(
                f"stopped after {at.header.round} of {settings.rounds} rounds; `fedme resume {again}` goes on"
            ) from None
        finally:
            book.close()

    def save(self, at: checkpoint.Checkpoint, config: Mapping[str, Any], book: records.Records) -> None:
        """Write a checkpoint."""
        book.sync()  # a checkpoint never counts on metrics that are not on disk
        checkpoint.save(self.folder, self.store, at, config)

    def _round(self, server: Any, t: int, book: records.Records) -> Any:
        settings = self.experiment.settings
        task = self.engine.current_task()
        attack = settings.attack
        engine = MaliciousClients(self.engine, self.method, attack, self.malicious) if self.malicious else self.engine
        rules = settings.faults.needs, settings.defence
        played = run_round(self.method, task, engine, server, t, settings.rounds, self.root, *rules, self.offences)
        self.offences = played.offences
        traffic = dict(played.traffic)
        for client in self.malicious:  # whether it had a part in this round or not
            traffic.setdefault(client, Traffic()).note("malicious", settings.attack.kind)
        if played.short:
            self.display.note(f"round {t} does not count: {played.short}; the server goes on as it was", always=True)
        server = self.store.keep(played.server)
        self._rest(played.traffic)
        scores: dict[ClientId, list[ModelScore]] = {}
        last = t + 1 == settings.rounds
        if last and self.method.own_architectures:
            now = records.rows(t, traffic, {}, self.engine.samples, 0.0, task.schema.task_type)
            self.ancestry = lineages(itertools.chain(records.read(self.folder), now), task.members)
        if last or (t + 1) % settings.evaluate_every == 0:
            scores = self.evaluate_models(task, server, t, last)
            self.shown = _headline(scores, MEASURES[task.schema.task_type][0])
        if last:
            offers = self.method.offers(server, task, self.root.at("init"))
            unseen_clients.save_offers(self.folder, offers, task, self.experiment, self.ancestry, saved=self.clients)
        rows = records.rows(t, traffic, scores, self.engine.samples, played.server_seconds, task.schema.task_type)
        if settings.privacy is not None:
            cost = privacy_budget.costs(settings.privacy, self.engine.states.ledgers)
            rows = [row | {"epsilon": cost[row["client"]]} for row in rows]
        book.write(rows)
        self.logs.write(t, rows)
        return server

    def _rest(self, clients: Iterable[ClientId]) -> None:
        """Put the states of these clients, which have changed, in the care of the store, and keep to the memory it may use."""
        states = self.engine.states
        states.update({client: self.store.keep(states[client]) for client in clients if client in states})
        self.store.settle()

    def evaluate_models(self, task: Task, server: Any, t: int, last: bool) -> dict[ClientId, list[ModelScore]]:
        """The scores of all clients, a few clients at a time so that their models fit in memory."""
        settings = self.experiment.settings
        tune = settings.finetune.epochs and (last or settings.finetune.when == "always")
        finetune = Finetune(settings.train, settings.finetune.epochs) if tune else None
        scores: dict[ClientId, list[ModelScore]] = {}
        for clients in self._groups(task):
            deliveries = {client: self.method.deliver(task, server, client) for client in clients}
            done = self.engine.evaluate_models(deliveries, Round(t, settings.rounds), finetune)
            scores |= {client: each.value.scores for client, each in done.items()}
            if last:
                self._save_models(task, {client: each.value for client, each in done.items()})
            self._rest(clients)
        return scores

    def _groups(self, task: Task) -> Iterator[list[ClientId]]:
        """The clients in groups whose models, with copies for fine-tuning, take at most a part of the memory."""
        room = max(self.store.budget // PART, 1)
        group: list[ClientId] = []
        taken = 0
        for client, member in task.members.items():
            size = COPIES * task.dtype.itemsize * member.arch.parameters
            if group and taken + size > room:
                yield group
                group, taken = [], 0
            group.append(client)
            taken += size
        yield group

    def _save_models(self, task: Task, assessed: Mapping[ClientId, Evaluation]) -> None:
        notes: dict[str, bool] = {}
        for client, assessment in assessed.items():
            if assessment.models:  # those of sites stay there
                folder, data = saved_models.folder_of(self.folder, client), self.clients[client]
                said = save_models(folder, self.experiment, task, data, assessment, self.ancestry.get(client))
                notes |= dict.fromkeys(said, True)
        for note in notes:
            self.display.note(f"note: {note}", always=True)


def save_models(
    folder: Path,
    experiment: Experiment,
    task: Task,
    data: ClientData,
    assessment: Evaluation,
    lineage: Lineage | None = None,
) -> list[str]:
    """A client's models at the end: the personal one, and that after fine-tuning; what the user should know about them."""
    classes, rounds = list(task.members[data.id].labels), experiment.settings.rounds
    notes = []
    for name, file, stage in (("personal", "model", "round"), ("finetuned", "finetuned", "finetuned")):
        if name in assessment.models:
            about = model_cards.about(
                data, stage, experiment.method_name, rounds, assessment.scores, lineage, task.schema.task_type
            )
            notes.append(saved_models.save(folder, file, assessment.models[name], task.schema, classes, about))
    return [note for note in notes if note]


def _headline(scores: Mapping[ClientId, list[ModelScore]], measure: Measure) -> str:
    """The client mean of what counts, of the personal models, on validation data where there is any."""
    for split, word in (("val", "validation"), ("test", "test")):
        mine = [s for each in scores.values() for s in each if (s.model, s.stage, s.split) == ("personal", "round", split)]
        found = [value for s in mine if (value := getattr(s.metrics, measure.key)) is not None]
        if found:
            return f"{word} {measure.shown(sum(found) / len(found))}"
    return ""
