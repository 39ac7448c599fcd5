"""A run and its directory: start, resume, stop. What a run needs is assembled here; its rounds are in `round_loop.py`."""

import errno
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedme
from fedme.config.experiment import ConfigError, Experiment, to_toml
from fedme.config.identity import MACHINE, changed_keys, identity, source_digests
from fedme.config.named_code import CONFIG, command_for, load_saved
from fedme.core.atomic_files import InUse, RunError, locked, replacing, sealed, write_json, write_text
from fedme.core.key import Key
from fedme.core.processors import processors
from fedme.datasets.federated_dataset import Federation
from fedme.federation.client_work import AnyMethod
from fedme.federation.failures import FailingClients
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import Engine
from fedme.learning.exchanged_part import exchanged_part
from fedme.learning.robust_aggregation import defence_of, require_enough_copies
from fedme.results import loggers, records, run_directory, summary
from fedme.running import assembly, checkpoint, extension, privacy_budget
from fedme.running.chosen_architectures import SharedChoices
from fedme.running.deferred_work import DeferredWork
from fedme.running.flower_run import on_flower, require_flower
from fedme.running.local_training_name import FOLDER as LOCAL
from fedme.running.progress import Display
from fedme.running.ray_run import require_ray, started_executor
from fedme.running.round_loop import Interrupted, RoundLoop
from fedme.running.weight_store import Store

ENGINE = "engine.log"
LABELS = "labels.json"  # label counts of every client, so that reports need no data
MOST_DIFFERENCES = 5  # that an error lists
FEW = 10  # clients with fewer test samples are mentioned in a note
BEFORE = (
    ".lock",
    "environment.json",
    ".environment.json.partial",
    ".config.toml.partial",
)  # of a run not begun
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # errors of a disk that cannot be written to


def start(experiment: Experiment, display: Display, notes: Sequence[str] = ()) -> Path:
    """Run an experiment in a new directory, and return the directory; `notes` are saved with the results."""
    folder = _new_folder(experiment)
    display.note(f"run directory: {folder}")
    with locked(folder), on_disk(folder):
        try:
            config = experiment.plain() | {"output": str(folder)}
            about = environment() | {"sources": source_digests(config), "notes": list(notes)}
            write_json(folder / run_directory.ENVIRONMENT, sealed(about))
            write_text(folder / CONFIG, to_toml(config))
            _run_experiment(folder, display, experiment, config)
        except Exception as error:  # if no round was finished, the same command must work once the cause is mended
            metrics = folder / records.NAME
            begun = metrics.exists() and (isinstance(error, OSError) or metrics.stat().st_size)
            if not isinstance(error, Interrupted) and not begun:
                shutil.rmtree(folder)
            raise
    return folder


def start_or_resume(folder: Path, experiment: Experiment, display: Display, notes: Sequence[str] = ()) -> None:
    """Start a run in this directory, or go on with the one that is there if it is the same."""
    plain = experiment.plain() | {"output": str(folder)}
    if not (folder / CONFIG).exists():
        start(replace(experiment, settings=replace(experiment.settings, output=str(folder))), display, notes)
        return
    before = summary.config_of(folder)
    rounds = plain["rounds"]
    if identity(before | {"rounds": rounds}) != identity(plain) or rounds < before["rounds"]:
        raise RunError(f"{folder}: holds another run: {_differences(before, plain)}; choose another output")
    resume(folder, display, experiment, rounds=rounds)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The settings in which two configurations differ, with both values, and whether the samples do."""
    old, new = summary.flattened(before), summary.flattened(after)
    names = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    parts = [
        f"{name} is {_value(old.get(name))} there and {_value(new.get(name))} here"
        for name in names
        if name not in ("output", "name", "checkpoint_every", "log", "data.fingerprint")
    ]
    parts = parts[:MOST_DIFFERENCES] + [f"{len(parts) - MOST_DIFFERENCES} more differ"] * (len(parts) > MOST_DIFFERENCES)
    return "; ".join([*parts, *(["the samples differ"] if "data.fingerprint" in names else [])])


def _value(value: Any) -> str:
    text = "not set" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def resume(
    folder: Path,
    display: Display,
    experiment: Experiment | None = None,
    imports: bool = False,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
) -> bool:
    """Continue a run from its last checkpoint. Returns False if it is already finished.

    The experiment is the one in `config.toml`, unless a program supplies it together with its samples. Code that it names is
    imported only with `imports`. With `rounds`, the run gets more rounds first (`extension.py`). `overrides` may say where it
    is computed (`engine.workers=4`), and change nothing else; that is not written to `config.toml`.
    """
    if not (folder / CONFIG).exists():
        if _unbegun(folder):
            raise RunError(f"{folder}: the run was stopped before it began; repeat the command that started it")
        raise RunError(f"{folder}: not a run directory{run_directory.similar_run(folder) or '; `fedme run` starts one'}")
    with locked(folder), on_disk(folder):
        run_directory.require_readable(folder)
        if experiment is None:
            experiment = load_saved(folder / CONFIG, imports)
            if overrides:
                changed = load_saved(folder / CONFIG, imports, overrides=overrides)
                _require_same_results(folder, experiment.plain(), changed.plain())
                experiment = changed
        run_directory.require_same_sources(folder, experiment.plain())
        if rounds is not None:
            extension.extend(folder, experiment, rounds)
            experiment = replace(experiment, settings=replace(experiment.settings, rounds=rounds))
        if (folder / summary.NAME).exists():
            summary.verified_config(folder, summary.read(folder))
            return False
        if note := run_directory.version_note(folder):
            display.note(note)
        extension.remove_models(folder)
        _run_experiment(folder, display, experiment, _as_begun(folder, experiment.plain()))
    return True


def _as_begun(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run that is continued elsewhere, with the settings of the machine where it began."""
    begun = summary.config_of(folder).get("engine", {})
    engine = {key: value for key, value in config["engine"].items() if key not in MACHINE}
    return {**config, "engine": engine | {key: begun[key] for key in MACHINE if key in begun}}


def _require_same_results(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse to continue a run with settings that change its results."""
    allowed = [f"engine.{key}" for key in MACHINE]
    if others := [name for name in changed_keys(before, after) if name not in allowed]:
        listed = ", ".join(["rounds", *allowed[:-1]]) + f" and {allowed[-1]}"
        raise ConfigError(f"{', '.join(others)}: cannot change when {folder} is continued, only {listed} can; start a new run")


def _new_folder(experiment: Experiment) -> Path:
    """Make the output directory, which must be new; the default name gets a number if it exists."""
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
                begun = (folder / CONFIG).exists()
                hint = f"`fedme resume {shlex.quote(str(folder))}` continues it, or " if begun else ""
                raise (InUse if begun else RunError)(f"{folder}: already exists; {hint}choose another output") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be made: {error.strerror}") from error


def _unbegun(folder: Path) -> bool:
    """Whether the directory is that of a run that was killed before its configuration was written."""
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return ".lock" in inside and inside <= set(BEFORE)


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one line that says what is safe and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
        again = f"then `{command_for(folder)}` continues from the last checkpoint, which is intact"
        what = f"{remedy}, {again if (folder / checkpoint.NAME).exists() else 'then repeat the command'}"
        raise RunError(f"{folder}: cannot be written to: {error.strerror}; {what}") from error


def environment() -> dict[str, Any]:
    """The software and hardware that the results were made with."""
    packages = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
    return {
        "format": run_directory.FORMAT,
        "fedme": fedme.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": processors(),
        "packages": {name: metadata.version(name) for name in packages},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _run_experiment(folder: Path, display: Display, experiment: Experiment, config: Mapping[str, Any]) -> None:
    """Run or continue; `config` is what `config.toml` says."""
    settings = experiment.settings
    loggers.require_packages(settings.log)
    if settings.engine.name == "flower":
        require_flower(experiment)
    if settings.engine.name == "ray":
        require_ray(experiment)
    privacy_budget.require_private(experiment)
    root, rounds = Key(settings.seed), list[summary.Rounds]()
    with stopping(f"`{command_for(folder, config=config)}`") as stop, ExitStack() as cleanup:

        def tick() -> None:
            display.tick()
            deferred.finish()
            stop()

        deferred = DeferredWork()
        store = Store(folder, int(settings.engine.memory * 2**30))
        cleanup.callback(store.close)
        # The devices of a cluster are those of its nodes.
        local = replace(settings.engine, device="cpu", precision=None) if settings.engine.name == "ray" else settings.engine
        execute = assembly.executor(local, tick, store.wait)
        cleanup.callback(execute.close)
        if experiment.data_name != "given":  # in memory already
            display.note(f"loading {experiment.data_name} ...")
        federation = assembly.gather(experiment)
        notes = [*federation.notes, *_data_notes(experiment, federation)]
        for note in notes + privacy_budget.cautions(experiment, federation.clients):
            display.note(f"note: {note}", always=True)
        with replacing(folder / "partition.safetensors") as temporary:
            federation.partition.save(temporary)
        write_json(folder / LABELS, sealed(federation.label_counts()))
        saved = checkpoint.load(folder, config, run_directory.earlier_rounds(folder))
        secret = privacy_budget.secret_of(folder, settings.privacy, begun=saved is not None)
        choices = SharedChoices(
            folder.resolve().parent / LOCAL,
            lambda total: display.start("choosing architectures: training", total, by_operation=True),
            tick,
            display.note,
        )
        prepared = assembly.prepare(experiment, federation, execute, saved.header.assigned if saved else None, choices)
        for note in assembly.changing_attributes(prepared):
            display.note(f"note: {note}", always=True)
        if prepared.selection:
            write_json(folder / "selection.json", prepared.selection)
        settings.faults.check(prepared.task)
        require_enough_copies(defence_of(experiment.method), settings.train.cohort or len(prepared.task.members))
        privacy_budget.require_private_training(experiment, prepared.archs.values(), federation.clients.values())
        assigned = {client: member.arch.name for client, member in prepared.task.members.items()}
        method: AnyMethod = experiment.method
        if saved:
            at = checkpoint.states(folder, store, saved, method, prepared.archs, prepared.task.resolve)
        else:
            head = checkpoint.Header(0, 0, assigned)
            server = method.init_server(prepared.task, root.at("init"))
            part = exchanged_part(method, prepared.task)
            server = store.keep(server if part is None else part.stripped(server))
            at = checkpoint.Checkpoint(head, server, {}, prepared.archs)
            checkpoint.save(folder, store, at, config)
        logs = cleanup.enter_context(loggers.opened(settings.log, folder, config, at.header.round))

        def loop(engine: Engine) -> RoundLoop:
            engine = FailingClients(engine, settings.faults, root) if settings.faults.simulates else engine
            clients, malicious = federation.clients, federation.malicious
            here = deferred if settings.engine.name == "inprocess" else None
            return RoundLoop(folder, experiment, engine, store, display, logs, clients, malicious, here)

        if settings.engine.name == "flower":
            display.note("starting Flower ...")
            on_flower(experiment, prepared, lambda engine: rounds.append(loop(engine).run(at, config)), tick, stop)
        else:
            policies = privacy_budget.policies(experiment, secret)
            engine = InProcessEngine(
                method,
                prepared.task,
                federation.clients,
                root,
                execute,
                policies,
                update_bn=settings.models.update_bn,
                score_trained_every=settings.evaluate_every if settings.evaluate_trained else None,
            )
            if settings.engine.name == "ray":
                display.note("starting Ray ...")
                execute = cleanup.enter_context(
                    started_executor(experiment, federation, engine, execute, tick, stop, display.note)
                )
                engine.execute = execute
                cleanup.callback(store.wait)  # a checkpoint may need weights that are still there
            rounds.append(loop(engine).run(at, config))
        write_text(folder / ENGINE, "".join(f"{line}\n" for line in execute.explain()))
    summary.write(folder, config, rounds[0])
    privacy_budget.forget_secret(folder)


def _data_notes(experiment: Experiment, federation: Federation) -> list[str]:
    """What a reader of the results should know about the data."""
    notes = []
    schema = federation.dataset.schema
    if schema.task_type != "classification" and getattr(experiment.dataset, "task", "") == "auto":
        seen = "0 or 1, several per sample" if schema.task_type == "multi-label" else "numbers with fractions"
        notes.append(
            f"the labels are {seen}, so this is {schema.task_type} of {_first_few(schema.classes)}; data.task can say otherwise"
        )
    if schema.task_type == "multi-label" and bool(
        (torch.cat([d.train.y for d in federation.clients.values()]).sum(1) == 1).all()
    ):
        notes.append(
            "every sample has exactly one label; to learn one class of several, give each sample the number of its class"
        )
    if len(schema.classes) == 1 and schema.task_type == "classification":
        notes.append(f"there is only one class, {schema.classes[0]}: there is nothing to learn")
    few = [client for client, data in federation.clients.items() if len(data.test) < FEW]
    if few:
        have, count = ("has", "it counts") if len(few) == 1 else ("have", "they count")
        many = f"{len(few)} of {len(federation.clients)} clients {have} fewer than {FEW} test samples"
        notes.append(f"{many}; in means over clients {count} like the others")
    cohort = experiment.settings.train.cohort
    if cohort is not None and cohort > len(federation.clients):
        notes.append(f"train.cohort is {cohort}, but there are only {len(federation.clients)} clients: all take part")
    return notes


def _first_few(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def stopping(again: str = "the same command") -> Iterator[Any]:
    """Turn Ctrl-C and SIGTERM into `Interrupted`, raised at the next call of `stop()`. `again` starts the work again."""
    asked: list[int] = []

    def remember(number: int, frame: object) -> None:
        if asked:  # a second Ctrl-C stops immediately
            raise KeyboardInterrupt
        asked.append(number)

    def stop() -> None:
        if asked:
            raise Interrupted(f"stopped before the first round; {again} starts it again")

    try:
        before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are handled elsewhere
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
