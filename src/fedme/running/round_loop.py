"""The round loop: plan, dispatch, train, aggregate, evaluate, record, checkpoint.

States are values, so a run can stop anywhere: what is saved is always a whole number of rounds.
"""

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedme.artifacts import model_cards, model_choice, model_pack, outputs as model_outputs, saved_models, unseen_clients
from fedme.artifacts.model_pack import PackWriter
from fedme.config.experiment import Experiment
from fedme.config.named_code import command_for
from fedme.core.atomic_files import finite, together
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.metrics import MEASURES, Measure
from fedme.core.model import LARGE_NETWORK, Model
from fedme.federation.client_work import GLOBAL, AnyMethod, Evaluation, Finetune, ModelScore
from fedme.federation.malicious_clients import MaliciousClients
from fedme.federation.offences import OffenceRecord
from fedme.federation.round import Engine, Traffic, run_round
from fedme.learning.accountant import Ledger
from fedme.learning.exchanged_part import exchanged_part
from fedme.learning.robust_aggregation import defence_of
from fedme.results import loggers, records, summary
from fedme.results.lineage import Lineage, lineages
from fedme.running import checkpoint, privacy_budget
from fedme.running.alarm import NOTE, alarm
from fedme.running.best_round import BEST, BestRound, better, with_best_round
from fedme.running.deferred_work import DeferredWork
from fedme.running.divergence import DivergenceWatch
from fedme.running.garbage_collection import existing_objects_left_out, rare_collections
from fedme.running.large_models import LargeModels
from fedme.running.observers import Observers
from fedme.running.progress import Display
from fedme.running.weight_store import Store

COPIES = 4  # of a client's weights during evaluation: personal and shared model, fine-tuned copy, its momentum
REPEATED = 2.0  # seconds: a longer round is recorded at once, so that a power cut never costs more than this
PART = 4  # a group of clients may take 1 / PART of the memory budget during evaluation

Scores = dict[ClientId, list[ModelScore]]


class Interrupted(Exception):
    """The run was asked to stop. Finished rounds are saved; the text says where, and how to continue."""


@dataclass(frozen=True)
class PlayedRound:
    """A round after training, aggregation and evaluation, and the clients' states after it; `seconds` are of the training."""

    t: int
    task: Task
    server: Any
    traffic: dict[ClientId, Traffic]
    scores: Callable[[], Scores]
    states: Mapping[ClientId, Any]
    ledgers: Mapping[ClientId, Ledger]
    offences: Mapping[ClientId, OffenceRecord]
    server_seconds: float
    seconds: float


class RoundLoop:
    """The rounds of one run."""

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        engine: Engine,
        store: Store,
        display: Display,
        logs: loggers.Logs,
        clients: Mapping[ClientId, ClientData] | None = None,  # clients whose models are saved here
        malicious: tuple[ClientId, ...] = (),
        deferred: DeferredWork | None = None,  # where work can wait until clients compute in this process
    ) -> None:
        self.folder, self.experiment, self.malicious = folder, experiment, malicious
        self.engine, self.store, self.display, self.logs = engine, store, display, logs
        self.clients = clients or {}
        self.method: AnyMethod = experiment.method
        self.root = Key(experiment.settings.seed)
        self.observers = Observers(experiment, folder)
        self.headline = ""  # shown beside the progress
        self.offences: Mapping[ClientId, OffenceRecord] = {}
        self.small_bound_noted = False
        self.ancestry: Mapping[ClientId, Lineage] = {}  # known after the last round
        self.watch: DivergenceWatch | None = None
        self.fingerprints: dict[ClientId, str] = {}  # of the personal models that are saved, where clients have their own
        self.best: dict[ClientId, BestRound] = {}
        self.pack = PackWriter(folder / saved_models.CLIENTS) if len(self.clients) >= model_pack.PACKED_FROM else None
        self.deferred = deferred
        self.rounds = summary.Rounds()  # all that are recorded

    @existing_objects_left_out()
    def run(self, at: checkpoint.Checkpoint, config: Mapping[str, Any]) -> summary.Rounds:
        """Continue from `at` to the last round, and return what the summary needs of all rounds."""
        settings = self.experiment.settings
        self.engine.states.update(at.clients)
        self.engine.states.ledgers.update(at.header.spent)
        self.offences, self.best = at.header.offences, dict(at.best)
        book = records.Records(self.folder, at.header.metrics_bytes, at.header.metrics_check)
        self.rounds.add(records.read(self.folder))
        self.display.start("round", settings.rounds, at.header.round)
        self.at, self.saved_round = at, at.header.round
        server = at.server
        try:
            for t in range(at.header.round, settings.rounds):
                with rare_collections(settings.train.cohort or len(self.engine.current_task().members)):
                    played = self._train_and_evaluate(server, t)
                    server = played.server
                    finish = functools.partial(self._finish, played, config, book)
                    if self.deferred is not None and self._may_wait(played):
                        self.deferred.put(finish)
                    else:
                        finish()
            self.store.wait()
        except Interrupted:
            self._finish_last_round()
            self.store.wait()
            if self.saved_round != self.at.header.round:
                self.save(self.at, config, book)
            again = command_for(self.folder, config=config)
            raise Interrupted(
                f"stopped after {self.at.header.round} of {settings.rounds} rounds; `{again}` continues"
            ) from None
        except BaseException:
            self._finish_last_round()
            self.store.wait()  # a checkpoint needs the records open
            raise
        finally:
            book.close()
        return self.rounds

    def save(self, at: checkpoint.Checkpoint, config: Mapping[str, Any], book: records.Records) -> None:
        """Write a checkpoint."""
        book.sync()  # a checkpoint must not refer to metrics that are not on disk
        checkpoint.save(self.folder, self.store, at, config)

    def _may_wait(self, played: "PlayedRound") -> bool:
        """Whether records and checkpoint of a round may wait until clients compute the next: that round cannot see them."""
        settings = self.experiment.settings
        last = played.t + 1 == settings.rounds
        return not self.observers.callbacks and not last and played.seconds <= REPEATED

    def _finish_last_round(self) -> None:
        if self.deferred is not None:
            self.deferred.finish()

    def _finish(self, played: "PlayedRound", config: Mapping[str, Any], book: records.Records) -> None:
        """Scores, records and checkpoint of a round that was played."""
        settings, t, task, traffic = self.experiment.settings, played.t, played.task, played.traffic
        task_type = task.schema.task_type
        scores = played.scores()
        if scores:
            self.headline = _headline(scores, MEASURES[task_type][0])
            if wrong := alarm(scores, traffic, task.schema):
                self.display.note(wrong.text(t), always=True)
                for client in wrong.furthest:
                    traffic[client].note(NOTE, f"{wrong.reason}; its models moved by {wrong.furthest[client]:.3g}")
        if t + 1 == settings.rounds and settings.save == "all":
            self._note_identical_models(traffic)
        rows = records.rows(t, traffic, scores, self.engine.samples, played.server_seconds, task_type)
        if settings.privacy is not None:
            cost = privacy_budget.costs(settings.privacy, played.ledgers)
            rows = [finite(row | {"epsilon": cost[row["client"]]}) for row in rows]
        rows = self.observers.finished(t, rows)
        book.write(rows)
        self.rounds.add(rows)
        self.logs.write(t, rows)
        assigned, archs = self.at.header.assigned, self.at.archs
        header = checkpoint.Header(t + 1, book.size, assigned, played.ledgers, played.offences, book.check)
        self.at = checkpoint.Checkpoint(header, played.server, played.states, archs, dict(self.best))
        if (t + 1) % settings.checkpoint_every == 0 or t + 1 == settings.rounds:
            self.store.later(functools.partial(self.save, self.at, config, book))
            self.saved_round = t + 1
        self.display.advance(self.headline)

    def _train_and_evaluate(self, server: Any, t: int) -> "PlayedRound":
        """Round `t`: training, aggregation and evaluation."""
        settings = self.experiment.settings
        task = self.engine.current_task()
        attack, malicious = settings.attack, self.malicious
        engine = MaliciousClients(self.engine, self.method, attack, malicious) if malicious else self.engine
        quorum, defence = replace(settings.faults.needs, least=defence_of(self.method).fewest), settings.defence
        rest, began = self._at_rest(task), time.perf_counter()
        result = run_round(
            self.method, task, engine, server, t, settings.rounds, self.root, quorum, defence, self.offences, rest
        )
        seconds = time.perf_counter() - began
        self._finish_last_round()
        self.offences = result.offences
        traffic = dict(result.traffic)
        for client in malicious:  # also if it did not take part in this round
            traffic.setdefault(client, Traffic()).note("malicious", settings.attack.kind)
        for client, sent in result.traffic.items():
            if not sent.answered and sent.reason.startswith("refused"):
                self.display.note(f"round {t}: {client}: {sent.reason}")
        for client, reason in result.not_averaged.items():
            self.display.note(f"round {t}: {client}: not averaged: {reason}; the model stays as it is")
        self._note_small_bound(t, result.traffic)
        if result.short:
            self.display.note(f"round {t} does not count: {result.short}; the server keeps its state", always=True)
        self.observers.clients(t, traffic)
        self.watch = self.watch or DivergenceWatch(task.schema, settings.train)
        if warning := self.watch.check(t, traffic):
            self.display.note(warning, always=True)
        server = self.store.keep(result.server)
        self._store_states(result.traffic)
        scores: Callable[[], Scores] = dict
        last = t + 1 == settings.rounds
        if last and self.method.own_architectures:
            latest = records.rows(t, traffic, {}, self.engine.samples, 0.0, task.schema.task_type)
            self.ancestry = lineages(itertools.chain(records.read(self.folder), latest), task.members)
        if last or (t + 1) % settings.evaluate_every == 0:
            scores = self.evaluate_models(task, server, t, last)
        if last and settings.save == "all":
            offers = self.method.offers(server, task, self.root.at("init"))
            if (part := exchanged_part(self.method, task)) is not None:  # completed by random weights
                fresh = Model.init(task.shared, self.root.at("init", "newcomer"), task.dtype)
                offers = part.completed(offers, part.keep(None, fresh))
            unseen_clients.save_offers(self.folder, offers, task, self.experiment, self.ancestry, saved=self.clients)
        states = self.engine.states
        return PlayedRound(
            t, task, server, traffic, scores, dict(states), dict(states.ledgers), self.offences, result.server_seconds, seconds
        )

    def _at_rest(self, task: Task) -> LargeModels | None:
        """What keeps to the memory budget also within a round, if there are large networks and all their clients are here."""
        settings = self.experiment.settings
        if settings.engine.name != "inprocess" or settings.faults.simulates or self.malicious or not self.clients:
            return None
        large = frozenset(member.id for member in task.members.values() if member.arch.parameters >= LARGE_NETWORK)
        return LargeModels(self.store, large, self.engine.states) if large else None

    def _note_small_bound(self, t: int, traffic: Mapping[ClientId, Traffic]) -> None:
        """Say once if `defence.norm` has changed most replies of a round: it is meant for a few."""
        norm = self.experiment.settings.defence.norm
        distances = [sent.moved for sent in traffic.values() if sent.moved is not None]
        beyond = sum(distance > norm for distance in distances) if norm is not None else 0
        if 2 * beyond > len(distances) and not self.small_bound_noted:
            self.small_bound_noted = True
            words = f"defence.norm = {norm:g} has scaled back {beyond} of {len(distances)} replies"
            self.display.note(f"note: round {t}: {words}; a larger bound would slow training less")

    def _note_identical_models(self, traffic: Mapping[ClientId, Traffic]) -> None:
        """Say which clients ended with the same model, and note it in their records."""
        groups: dict[str, list[ClientId]] = {}
        for client, fingerprint in self.fingerprints.items():
            groups.setdefault(fingerprint, []).append(client)
        same = [clients for clients in groups.values() if len(clients) > 1]
        for clients in same:
            for client in clients[1:]:
                if client in traffic:
                    traffic[client].note(summary.SAME_MODEL, clients[0])
        if same:
            listed = "; ".join(", ".join(clients) for clients in same[: summary.MOST_GROUPS])
            listed += f"; and {len(same) - summary.MOST_GROUPS} more groups" if len(same) > summary.MOST_GROUPS else ""
            self.display.note(f"note: these clients ended with identical personal models: {listed}", always=True)

    def _store_states(self, clients: Iterable[ClientId]) -> None:
        """Hand the new states of these clients to the store, which keeps to its memory budget."""
        states = self.engine.states
        states.update({client: self.store.keep(states[client]) for client in clients if client in states})
        self.store.settle()

    def evaluate_models(self, task: Task, server: Any, t: int, last: bool) -> Callable[[], Scores]:
        """Evaluate the models of all clients, a few clients at a time so that their models fit in memory.

        Returns what gives their scores. If all models fit in memory and the next round needs nothing of it, the scores are
        computed only then.
        """
        settings = self.experiment.settings
        tune = settings.finetune.epochs and (last or settings.finetune.when == "always")
        finetune = Finetune(settings.train, settings.finetune.epochs) if tune else None
        scores: Scores = {}
        part, groups = exchanged_part(self.method, task), list(self._groups(task))
        for clients in groups:
            deliveries = {client: self.method.deliver(task, server, client) for client in clients}
            deliveries = part.stripped(deliveries) if part is not None else deliveries
            timed = self.engine.evaluate_models(deliveries, Round(t, settings.rounds), finetune)
            evaluations = {client: evaluation.value for client, evaluation in timed.items()}
            if len(groups) == 1 and not last:
                self._store_states(clients)
                return functools.partial(self._scores_of, evaluations, task, t)
            scores |= self._scores_of(evaluations, task, t)
            if last and settings.save == "all":
                self._save_models(task, evaluations)
            self._store_states(clients)
        if last and self.pack is not None and settings.save == "all":
            self.pack.close()
        return lambda: scores

    def _scores_of(self, evaluations: Mapping[ClientId, Evaluation], task: Task, t: int) -> Scores:
        """The scores of clients, after metrics and callbacks of a program; the best rounds are kept."""
        scores = {client: self.observers.evaluated(t, client, evaluation) for client, evaluation in evaluations.items()}
        if self._keeps_best_round(task):
            self._keep_best_rounds(evaluations, t)
        return scores

    def _keeps_best_round(self, task: Task) -> bool:
        """Whether a second model of every client takes at most a part of the memory budget."""
        parameters = sum(member.arch.parameters for member in task.members.values())
        return task.dtype.itemsize * parameters <= self.store.budget // PART

    def _keep_best_rounds(self, evaluations: Mapping[ClientId, Evaluation], t: int) -> None:
        before, improved = self.best, {}
        for client, evaluation in evaluations.items():
            best = better(before.get(client), evaluation, t) if evaluation.models else None
            if best is not None and best is not before.get(client):
                improved[client] = best
        # Of what has weights, and of all clients at once: they may have the same model.
        weights = self.store.keep({client: (best.model, best.outputs) for client, best in improved.items()})
        for client, best in improved.items():
            model, outputs = weights[client]
            self.best[client] = replace(best, model=model, outputs=outputs)

    def _groups(self, task: Task) -> Iterator[list[ClientId]]:
        """Groups of clients whose models, with copies for fine-tuning, take at most a part of the memory budget."""
        if not self.clients:  # their models are at sites, which need not wait for each other
            yield list(task.members)
            return
        limit = max(self.store.budget // PART, 1)
        group: list[ClientId] = []
        taken = 0
        for client, member in task.members.items():
            size = COPIES * task.dtype.itemsize * member.arch.parameters
            if group and taken + size > limit:
                yield group
                group, taken = [], 0
            group.append(client)
            taken += size
        yield group

    def _save_models(self, task: Task, evaluations: Mapping[ClientId, Evaluation]) -> None:
        notes: dict[str, None] = {}
        with together():
            for client, evaluation in evaluations.items():
                if evaluation.models:  # models of sites stay at the sites
                    folder, data = saved_models.folder_of(self.folder, client), self.clients[client]
                    lineage = self.ancestry.get(client)
                    if self.method.own_architectures:
                        self.fingerprints[client] = _fingerprint(evaluation.models["personal"])
                    best = self.best.get(client)
                    saved = save_models(folder, self.experiment, task, data, evaluation, lineage, best, self.pack)
                    notes |= dict.fromkeys(saved)
        for note in notes:
            self.display.note(f"note: {note}", always=True)


def save_models(
    folder: Path,
    experiment: Experiment,
    task: Task,
    data: ClientData,
    evaluation: Evaluation,
    lineage: Lineage | None = None,
    best: BestRound | None = None,
    pack: PackWriter | None = None,
) -> list[str]:
    """Save a client's models at the end, in its folder or in a pack, their outputs, and which one it chooses by validation.

    The personal and the fine-tuned model are always saved, the server's and that of the best round only if it is chosen.
    Returns notes for the user.
    """
    classes, rounds = list(task.members[data.id].labels), experiment.settings.rounds
    evaluation = with_best_round(evaluation, best, rounds - 1, task.schema.unit)
    outputs = model_outputs.by_file(evaluation.outputs)
    validated, targets = model_outputs.of_split(outputs, "val")
    choice = model_choice.choose(validated, targets)
    notes = []
    for name, file in model_outputs.FILES.items():
        if name in evaluation.models and (name not in (GLOBAL, BEST) or choice.name == file):
            stage = "finetuned" if name == "finetuned" else "round"
            trained = best.round + 1 if best is not None and name == BEST else rounds
            ancestry = None if name == BEST else lineage  # known of the last model only
            about = model_cards.about(
                data, stage, experiment.method_name, trained, evaluation.scores, ancestry, task.schema.task_type, name
            )
            notes.append(saved_models.save(folder, file, evaluation.models[name], task.schema, classes, about, pack))
    model_outputs.write(folder, outputs, pack)
    model_choice.write(folder, choice, pack)
    return [note for note in notes if note]


def _fingerprint(model: Model) -> str:
    digest = hashlib.sha256(model.arch.name.encode())
    for name in sorted(model.params):
        digest.update(model.params[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _headline(scores: Mapping[ClientId, list[ModelScore]], measure: Measure) -> str:
    """The mean over clients of the main measure of personal models, on validation data if there is any."""
    for split, word in (("val", "validation"), ("test", "test")):
        personal = [
            getattr(score.metrics, measure.key)
            for of_client in scores.values()
            for score in of_client
            if (score.model, score.stage, score.split) == ("personal", "round", split)
        ]
        values = [value for value in personal if value is not None]
        if values:
            return f"{word} {measure.with_title(sum(values) / len(values))}"
    return ""
