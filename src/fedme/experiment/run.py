"""The round loop: plan, dispatch, train, aggregate, evaluate, record, checkpoint.

States are values, so a run can stop anywhere: what is saved is always a whole number of rounds.
"""

import errno
import functools
import itertools
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedme
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.metrics import MEASURES, Measure
from fedme.core.processors import processors
from fedme.datasets.federation import Federation
from fedme.engines.attack import Hostile
from fedme.engines.client import AnyMethod, Assessment, Finetune, Scored
from fedme.engines.conduct import Conduct
from fedme.engines.faults import Faulty
from fedme.engines.inprocess import InProcess
from fedme.engines.round import Traffic, play
from fedme.experiment import assemble, cards, checkpoint, newcomers, privacy, records, saved, sinks, summary
from fedme.experiment.config import Experiment, load, to_toml
from fedme.experiment.files import RunError, locked, replacing, sealed, write_json, write_text
from fedme.experiment.lineage import Lineage, lineages
from fedme.experiment.progress import Display
from fedme.experiment.remote import on_flower, require_flower
from fedme.experiment.store import Store
from fedme.experiment.summary import CONFIG

ENGINE = "engine.log"
LABELS = "labels.json"  # who has how many samples of what: reports need no data
FEW = 10  # test samples
BEFORE = (".lock", "environment.json", ".environment.json.partial", ".config.toml.partial")  # all there is until it begins
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # what a disk says that takes no more
COPIES = 4  # of a client's weights while it is assessed: personal and shared model, fine-tuned copy, its momentum
PART = 4  # the share of the memory for weights that one group of clients may take while it is assessed


class Interrupted(Exception):
    """Somebody asked the run to stop; what was finished is saved. The text says where, and how to go on."""


def start(experiment: Experiment, display: Display, notes: Sequence[str] = ()) -> Path:
    """Run an experiment in a directory of its own, which is returned; `notes` are kept with the results."""
    folder = _new_folder(experiment)
    display.note(f"run directory: {folder}")
    with locked(folder), on_disk(folder):
        try:
            write_json(folder / "environment.json", sealed(environment() | {"notes": list(notes)}))
            config = experiment.plain() | {"output": str(folder)}
            write_text(folder / CONFIG, to_toml(config))
            _run(folder, display, experiment)
        except Exception as error:  # no round was finished: once the cause is mended, the same command must work
            if not isinstance(error, Interrupted) and not (folder / records.NAME).exists():
                shutil.rmtree(folder)
            raise
    return folder


def resume(folder: Path, display: Display, experiment: Experiment | None = None) -> bool:
    """Continue a run from its last checkpoint; False if there was nothing left to do.

    The experiment is that of `config.toml`, unless a program hands it over with its samples.
    """
    if not (folder / CONFIG).exists():
        if _unbegun(folder):
            raise RunError(f"{folder}: the run was stopped before it began; give the command that started it again")
        raise RunError(f"{folder}: not a run directory (no {CONFIG}); `fedme run` starts one")
    with locked(folder), on_disk(folder):
        experiment = experiment or load(folder / CONFIG)[0]
        if (folder / summary.NAME).exists():
            config = experiment.plain()
            if summary.read(folder)["config"] != checkpoint.digest({k: v for k, v in config.items() if k != "seed"}):
                raise RunError(f"{folder}: finished, but with another configuration than config.toml now says; start a new run")
            return False
        _run(folder, display, experiment)
    return True


def _new_folder(experiment: Experiment) -> Path:
    """The output directory, which must be new; the default name is numbered if it is taken."""
    asked = experiment.settings.output
    folder = Path(asked) if asked is not None else Path("runs") / experiment.settings.name
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if asked is None:
                number += 1
                folder = folder.with_name(f"{experiment.settings.name}-{number}")
            elif folder.is_dir() and (_unbegun(folder) or not any(folder.iterdir())):
                return folder
            else:
                hint = f"`fedme resume {folder}` continues it, or " if (folder / CONFIG).exists() else ""
                raise RunError(f"{folder}: exists already; {hint}choose another output") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be made: {error.strerror}") from error


def _unbegun(folder: Path) -> bool:
    """Whether this is what a run leaves that was killed before its configuration was written."""
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return ".lock" in inside and inside <= set(BEFORE)


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """A disk that refuses to take a run is told in one line, with what is safe and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        mend = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to the disk"
        again = f"then `fedme resume {shlex.quote(str(folder))}` goes on from the last checkpoint, which is whole"
        what = f"{mend}, {again if (folder / checkpoint.NAME).exists() else 'then give the same command again'}"
        raise RunError(f"{folder}: cannot be written to: {error.strerror}; {what}") from error


def environment() -> dict[str, Any]:
    """What the results were made with."""
    packages = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
    return {
        "fedme": fedme.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": processors(),
        "packages": {name: metadata.version(name) for name in packages},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _run(folder: Path, display: Display, experiment: Experiment) -> None:
    settings, config = experiment.settings, experiment.plain()
    sinks.require_packages(settings.log)
    if settings.engine.name == "flower":
        require_flower(experiment)
    privacy.require_private(experiment)
    root = Key(settings.seed)
    with stopping() as stop, ExitStack() as cleanup:

        def tick() -> None:
            display.tick()
            stop()

        store = Store(folder, int(settings.engine.memory * 2**30))
        cleanup.callback(store.close)
        execute = assemble.executor(settings.engine, tick, store.wait)
        cleanup.callback(execute.close)
        display.note(f"loading {experiment.data_name} ...")
        federation = assemble.gather(experiment)
        for note in [*federation.notes, *_cautions(experiment, federation), *privacy.cautions(experiment, federation.clients)]:
            display.note(f"note: {note}", always=True)
        with replacing(folder / "partition.safetensors") as temporary:
            federation.partition.save(temporary)
        write_json(folder / LABELS, sealed(federation.division()))
        found = checkpoint.load(folder, config)
        secret = privacy.secret_of(folder, settings.privacy, begun=found is not None)
        prepared = assemble.prepare(
            experiment,
            federation,
            execute,
            found.header.assigned if found else None,
            lambda total: display.start("choosing architectures: training", total, by_operation=True),
        )
        if prepared.selection:
            write_json(folder / "selection.json", prepared.selection)
        settings.faults.check(prepared.task)
        privacy.require_private_training(experiment, prepared.archs.values(), federation.clients.values())
        assigned = {client: member.arch.name for client, member in prepared.task.members.items()}
        method: AnyMethod = experiment.method
        if found:
            at = checkpoint.states(folder, store, found, method, prepared.archs)
        else:
            head = checkpoint.Header(0, 0, assigned)
            at = checkpoint.Checkpoint(head, store.keep(method.init_server(prepared.task, root.at("init"))), {})
            checkpoint.save(folder, store, at, config)
        logs = cleanup.enter_context(sinks.opened(settings.log, folder, config, at.header.round))

        def work(engine: Any) -> None:
            engine = Faulty(engine, settings.faults, root) if settings.faults.simulates else engine
            Loop(folder, experiment, engine, store, display, logs).run(at, config)

        if settings.engine.name == "flower":
            display.note("starting Flower ...")
            on_flower(experiment, prepared, work, tick, stop)
        else:
            private = privacy.guards(experiment, secret)
            work(InProcess(method, prepared.task, federation.clients, root, execute, private))
        write_text(folder / ENGINE, "".join(f"{line}\n" for line in execute.explain()))
    summary.write(folder, config)
    privacy.forget_secret(folder)


def _cautions(experiment: Experiment, federation: Federation) -> list[str]:
    """What a reader of the results should know about the data."""
    notes = []
    schema = federation.dataset.schema
    if schema.kind != "classification" and getattr(experiment.dataset, "task", "") == "auto":
        seen = "0 or 1, several a sample" if schema.kind == "multi-label" else "numbers with fractions"
        notes.append(f"the labels are {seen}, so this is {schema.kind} of {_some(schema.classes)}; data.task can say otherwise")
    if schema.kind == "multi-label" and bool((torch.cat([d.train.y for d in federation.clients.values()]).sum(1) == 1).all()):
        notes.append(
            "every sample has exactly one label; to learn one class of several, give each sample the number of its class"
        )
    if len(schema.classes) == 1 and schema.kind == "classification":
        notes.append(f"there is only one class, {schema.classes[0]}: there is nothing to learn")
    few = [client for client, data in federation.clients.items() if len(data.test) < FEW]
    if few:
        many = f"{len(few)} of {len(federation.clients)} clients have fewer than {FEW} test samples"
        notes.append(f"{many}; in means over clients they weigh like the others")
    cohort = experiment.settings.train.cohort
    if cohort is not None and cohort > len(federation.clients):
        notes.append(f"train.cohort is {cohort}, but there are only {len(federation.clients)} clients: all take part")
    return notes


class Loop:
    """One run's rounds."""

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        engine: Any,
        store: Store,
        display: Display,
        logs: sinks.Logs,
    ) -> None:
        self.folder, self.experiment = folder, experiment
        self.engine, self.store, self.display, self.logs = engine, store, display, logs
        self.method: AnyMethod = experiment.method
        self.root = Key(experiment.settings.seed)
        self.shown = ""
        self.conduct: Mapping[ClientId, Conduct] = {}
        self.ancestry: Mapping[ClientId, Lineage] = {}  # known at the end

    def run(self, at: checkpoint.Checkpoint, config: Mapping[str, Any]) -> None:
        """Go on from `at` to the last round."""
        settings = self.experiment.settings
        self.engine.states, self.engine.spent = dict(at.clients), dict(at.header.spent)
        self.conduct = at.header.conduct
        book = records.Records(self.folder, at.header.metrics_bytes, at.header.metrics_check)
        self.display.start("round", settings.rounds, at.header.round)
        saved_round = at.header.round
        try:
            for t in range(at.header.round, settings.rounds):
                server = self._round(at.server, t, book)
                header = checkpoint.Header(
                    t + 1, book.size, at.header.assigned, dict(self.engine.spent), self.conduct, book.check
                )
                at = checkpoint.Checkpoint(header, server, dict(self.engine.states))
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
        task = self.engine.muster()
        hostile = settings.attack.hostile(list(task.members), self.root)
        engine = Hostile(self.engine, self.method, settings.attack, hostile) if hostile else self.engine
        rules = settings.faults.needs, settings.defence
        played = play(self.method, task, engine, server, t, settings.rounds, self.root, *rules, self.conduct)
        self.conduct = played.conduct
        traffic = dict(played.traffic)
        for client in hostile:  # whether it had a part in this round or not
            traffic.setdefault(client, Traffic()).note("hostile", settings.attack.kind)
        if played.short:
            self.display.note(f"round {t} does not count: {played.short}; the server goes on as it was", always=True)
        server = self.store.keep(played.server)
        self._rest(played.traffic)
        scores: dict[ClientId, list[Scored]] = {}
        last = t + 1 == settings.rounds
        if last and self.method.own_architectures:
            now = records.rows(t, traffic, {}, self.engine.samples, 0.0, task.schema.kind)
            self.ancestry = lineages(itertools.chain(records.read(self.folder), now), task.members)
        if last or (t + 1) % settings.evaluate_every == 0:
            scores = self.assess(task, server, t, last)
            self.shown = _headline(scores, MEASURES[task.schema.kind][0])
        if last:
            method, key = self.experiment.method_name, self.root.at("init")
            newcomers.save_offers(self.folder, server, task, method, settings.rounds, key)
        rows = records.rows(t, traffic, scores, self.engine.samples, played.server_seconds, task.schema.kind)
        if settings.privacy is not None:
            cost = privacy.costs(settings.privacy, self.engine.spent)
            rows = [row | {"epsilon": cost[row["client"]]} for row in rows]
        book.write(rows)
        self.logs.write(t, rows)
        return server

    def _rest(self, clients: Iterable[ClientId]) -> None:
        """Put the states of these clients, which have changed, in the care of the store, and keep to the memory it may use."""
        states = self.engine.states
        states.update({client: self.store.keep(states[client]) for client in clients if client in states})
        self.store.settle()

    def assess(self, task: Task, server: Any, t: int, last: bool) -> dict[ClientId, list[Scored]]:
        """The scores of all clients, a few clients at a time so that their models fit in memory."""
        settings = self.experiment.settings
        tune = settings.finetune.epochs and (last or settings.finetune.when == "always")
        finetune = Finetune(settings.train, settings.finetune.epochs) if tune else None
        scores: dict[ClientId, list[Scored]] = {}
        for clients in self._groups(task):
            deliveries = {client: self.method.deliver(task, server, client) for client in clients}
            done = self.engine.assess(deliveries, Round(t, settings.rounds), finetune)
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

    def _save_models(self, task: Task, assessed: Mapping[ClientId, Assessment]) -> None:
        notes: dict[str, bool] = {}
        for client, assessment in assessed.items():
            if assessment.models:  # those of sites stay there
                folder, data = saved.folder_of(self.folder, client), self.engine.clients[client]
                said = save_models(folder, self.experiment, task, data, assessment, self.ancestry.get(client))
                notes |= dict.fromkeys(said, True)
        for note in notes:
            self.display.note(f"note: {note}", always=True)


def save_models(
    folder: Path,
    experiment: Experiment,
    task: Task,
    data: ClientData,
    assessment: Assessment,
    lineage: Lineage | None = None,
) -> list[str]:
    """A client's models at the end: the personal one, and that after fine-tuning; what the user should know about them."""
    classes, rounds = list(task.members[data.id].labels), experiment.settings.rounds
    notes = []
    for name, file, stage in (("personal", "model", "round"), ("finetuned", "finetuned", "finetuned")):
        if name in assessment.models:
            about = cards.about(data, stage, experiment.method_name, rounds, assessment.scores, lineage, task.schema.kind)
            notes.append(saved.save(folder, file, assessment.models[name], task.schema, classes, about))
    return [note for note in notes if note]


def _headline(scores: Mapping[ClientId, list[Scored]], measure: Measure) -> str:
    """The client mean of what counts, of the personal models, on validation data where there is any."""
    for split, word in (("val", "validation"), ("test", "test")):
        mine = [s for each in scores.values() for s in each if (s.model, s.stage, s.split) == ("personal", "round", split)]
        found = [value for s in mine if (value := getattr(s.metrics, measure.key)) is not None]
        if found:
            return f"{word} {measure.shown(sum(found) / len(found))}"
    return ""


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def stopping() -> Iterator[Any]:
    """Turn Ctrl-C and a request to terminate into `Interrupted`, raised where `stop()` is called next."""
    asked: list[int] = []

    def remember(number: int, frame: object) -> None:
        if asked:  # a second Ctrl-C: at once
            raise KeyboardInterrupt
        asked.append(number)

    def stop() -> None:
        if asked:
            raise Interrupted("stopped before the first round; `fedme resume` with the run directory begins again")

    try:
        before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: somebody else handles signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
