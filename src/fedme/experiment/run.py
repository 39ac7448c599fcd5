"""The round loop: plan, dispatch, train, aggregate, evaluate, record, checkpoint.

States are values, so a run can stop anywhere: what is saved is always a whole number of rounds.
"""

import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedme
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.datasets.federation import Federation
from fedme.engines.batched import Batched
from fedme.engines.client import AnyMethod, Assessment, Finetune
from fedme.engines.drive import Done
from fedme.engines.inprocess import InProcess, one_by_one
from fedme.engines.round import play
from fedme.experiment import assemble, checkpoint, records, saved, summary
from fedme.experiment.config import Experiment, load, to_toml
from fedme.experiment.files import RunError, locked, replacing, write_json, write_text
from fedme.experiment.progress import Display
from fedme.experiment.summary import CONFIG

ENGINE = "engine.log"
FEW = 10  # test samples


class Interrupted(Exception):
    """Somebody asked the run to stop; what was finished is saved. The text says where, and how to go on."""


def start(experiment: Experiment, display: Display, notes: Sequence[str] = ()) -> Path:
    """Run an experiment in a directory of its own, which is returned; `notes` are kept with the results."""
    folder = _new_folder(experiment)
    display.note(f"run directory: {folder}")
    with locked(folder):
        write_json(folder / "environment.json", environment() | {"notes": list(notes)})
        config = experiment.plain() | {"output": str(folder)}
        write_text(folder / CONFIG, to_toml(config))
        try:
            _run(folder, display)
        except Exception as error:  # no round was finished: once the cause is mended, the same command must work
            if not isinstance(error, Interrupted) and not (folder / records.NAME).exists():
                shutil.rmtree(folder)
            raise
    return folder


def resume(folder: Path, display: Display) -> bool:
    """Continue a run from its last checkpoint; False if there was nothing left to do."""
    if not (folder / CONFIG).exists():
        raise RunError(f"{folder}: not a run directory (no {CONFIG}); `fedme run` starts one")
    with locked(folder):
        if (folder / summary.NAME).exists():
            config = load(folder / CONFIG)[0].plain()
            if summary.read(folder)["config"] != checkpoint.digest({k: v for k, v in config.items() if k != "seed"}):
                raise RunError(f"{folder}: finished, but with another configuration than config.toml now says; start a new run")
            return False
        _run(folder, display)
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
            elif folder.is_dir() and not any(folder.iterdir()):
                return folder
            else:
                hint = f"`fedme resume {folder}` continues it, or " if (folder / CONFIG).exists() else ""
                raise RunError(f"{folder}: exists already; {hint}choose another output") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be made: {error.strerror}") from error


def environment() -> dict[str, Any]:
    """What the results were made with."""
    packages = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
    return {
        "fedme": fedme.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in packages},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _run(folder: Path, display: Display) -> None:
    experiment, _ = load(folder / CONFIG)
    settings, config = experiment.settings, experiment.plain()
    torch.set_num_threads(settings.engine.threads)
    root = Key(settings.seed)
    with stopping() as stop, ExitStack() as cleanup:

        def tick() -> None:
            display.tick()
            stop()

        batched = Batched(tick, settings.engine.workers or os.cpu_count() or 1)
        cleanup.callback(batched.close)
        execute = batched if settings.engine.path == "auto" else one_by_one(tick)
        display.note(f"loading {experiment.data_name} ...")
        federation = assemble.gather(experiment)
        for note in [*federation.notes, *_cautions(experiment, federation)]:
            display.note(f"note: {note}", always=True)
        with replacing(folder / "partition.safetensors") as temporary:
            federation.partition.save(temporary)
        found = checkpoint.load_header(folder, config)
        header = found[0] if found else None
        prepared = assemble.prepare(
            experiment,
            federation,
            execute,
            header.assigned if header else None,
            lambda total: display.start("choosing architectures: training", total, by_operation=True),
        )
        if prepared.selection:
            write_json(folder / "selection.json", prepared.selection)
        assigned = {client: member.arch.name for client, member in prepared.task.members.items()}
        method: AnyMethod = experiment.method
        if found and header:
            at = checkpoint.load_states(folder, header, found[1], found[2], method, prepared.archs)
        else:
            head = checkpoint.Header(0, 0, assigned)
            at = checkpoint.Checkpoint(head, method.init_server(prepared.task, root.at("init")), {})
            checkpoint.save(folder, at, config)
        engine = InProcess(method, prepared.task, federation.clients, root, execute)
        Loop(folder, experiment, prepared, engine, display).run(at, config)
        write_text(folder / ENGINE, "".join(f"{line}\n" for line in batched.explain()))
    summary.write(folder, config)


def _cautions(experiment: Experiment, federation: Federation) -> list[str]:
    """What a reader of the results should know about the data."""
    notes = []
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
        self, folder: Path, experiment: Experiment, prepared: assemble.Prepared, engine: InProcess, display: Display
    ) -> None:
        self.folder, self.experiment, self.prepared, self.engine, self.display = folder, experiment, prepared, engine, display
        self.method: AnyMethod = experiment.method
        self.root = Key(experiment.settings.seed)
        self.members = list(prepared.task.members)
        self.samples = {client: len(data.train) for client, data in engine.clients.items()}
        self.shown = ""

    def run(self, at: checkpoint.Checkpoint, config: Mapping[str, Any]) -> None:
        """Go on from `at` to the last round."""
        settings = self.experiment.settings
        self.engine.states = dict(at.clients)
        book = records.Records(self.folder, at.header.metrics_bytes)
        self.display.start("round", settings.rounds, at.header.round)
        saved_round = at.header.round
        try:
            for t in range(at.header.round, settings.rounds):
                server = self._round(at.server, t, book)
                header = checkpoint.Header(t + 1, book.size(), at.header.assigned)
                at = checkpoint.Checkpoint(header, server, dict(self.engine.states))
                if (t + 1) % settings.checkpoint_every == 0 or t + 1 == settings.rounds:
                    checkpoint.save(self.folder, at, config)
                    saved_round = t + 1
                self.display.advance(self.shown)
        except Interrupted:
            if saved_round != at.header.round:
                checkpoint.save(self.folder, at, config)
            again = shlex.quote(str(self.folder))
            raise Interrupted(
                f"stopped after {at.header.round} of {settings.rounds} rounds; `fedme resume {again}` goes on"
            ) from None
        finally:
            book.close()

    def _round(self, server: Any, t: int, book: records.Records) -> Any:
        settings = self.experiment.settings
        played = play(self.method, self.prepared.task, self.engine, server, t, settings.rounds, self.root)
        last = t + 1 == settings.rounds
        scored: dict[ClientId, Done[Assessment]] = {}
        if last or (t + 1) % settings.evaluate_every == 0:
            tune = settings.finetune.epochs and (last or settings.finetune.when == "always")
            finetune = Finetune(settings.train, settings.finetune.epochs) if tune else None
            deliveries = {client: self.method.deliver(self.prepared.task, played.server, client) for client in self.members}
            scored = self.engine.assess(deliveries, Round(t, settings.rounds), finetune)
            self.shown = _headline(scored)
        scores = {client: done.value.scores for client, done in scored.items()}
        book.write(records.rows(t, played.traffic, scores, self.samples, played.server_seconds))
        if last:
            self._save_models({client: done.value for client, done in scored.items()})
        return played.server

    def _save_models(self, assessed: Mapping[ClientId, Assessment]) -> None:
        schema, rounds = self.prepared.task.schema, self.experiment.settings.rounds
        for client, assessment in assessed.items():
            classes = list(self.prepared.task.members[client].labels)
            for name, file, stage in (("personal", "model", "round"), ("finetuned", "finetuned", "finetuned")):
                if name not in assessment.models:
                    continue
                mine = [s for s in assessment.scores if s.model == "personal" and s.stage == stage]
                about = {
                    "client": client,
                    "model": "personal",
                    "stage": stage,
                    "method": self.experiment.method_name,
                    "rounds": rounds,
                    "accuracy": {s.split: s.metrics.accuracy for s in mine},
                }
                saved.save(saved.folder_of(self.folder, client), file, assessment.models[name], schema, classes, about)


def _headline(scored: Mapping[ClientId, Done[Assessment]]) -> str:
    """The client-mean accuracy of the personal models, on validation data where there is any."""
    for split, word in (("val", "validation"), ("test", "test")):
        found = [
            s.metrics.accuracy
            for done in scored.values()
            for s in done.value.scores
            if s.model == "personal" and s.stage == "round" and s.split == split and s.metrics.accuracy is not None
        ]
        if found:
            return f"{word} {100 * sum(found) / len(found):.2f} %"
    return ""


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
