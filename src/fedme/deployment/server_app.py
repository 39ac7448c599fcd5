"""The server app: the round loop of every run, with sites as clients. It resumes from its checkpoint after a crash."""

import functools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from fedme.core.atomic_files import RunError, locked_patiently
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.deployment import attempts, proxy_files, submitted_runs
from fedme.deployment.operator_folder import FOLDER, Federation
from fedme.deployment.site_data import fingerprint, public_samples, with_server_data
from fedme.deployment.site_engine import SiteEngine
from fedme.deployment.site_settings import agreed_task, with_members
from fedme.deployment.submitted_runs import LOG, SITES
from fedme.federation.flower import EngineError
from fedme.federation.flower.flower_apps import server_app
from fedme.federation.flower.internals import push_error
from fedme.federation.flower.requests import GridRequests
from fedme.results import loggers, records, run_directory, summary
from fedme.running import checkpoint
from fedme.running.progress import Display
from fedme.running.round_loop import RoundLoop
from fedme.running.weight_store import Store

POLL_INTERVAL = 0.3  # seconds between two polls for replies
LOCK_PATIENCE = 5.0  # seconds


def main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """Start or resume the submitted run."""
    federation = Federation.read(Path(os.environ[FOLDER]))
    folder = federation.runs / Path(str(run_config["run"])).name
    if not (folder / summary.CONFIG).exists():
        raise RunError(f"{folder}: no run to start here; it needs the experiment as {summary.CONFIG}")
    with locked_patiently(folder, LOCK_PATIENCE), (folder / LOG).open("a", encoding="utf-8") as log:
        number = attempts.record_start(folder)
        try:
            with Display(Console(file=log, width=160)) as display:
                run(federation, folder, grid, display)
        except BaseException as error:
            ended = not isinstance(error, Exception)  # by a signal, for instance because the superexec has ended
            passes = ended or isinstance(error, (EngineError, OSError, httpx.HTTPError, push_error()))
            reason = "its server app was ended" if ended else str(error) or type(error).__name__
            # `fedme deploy stop` writes its reason before it stops the run.
            if attempts.failure(folder) is None and not attempts.superseded(folder, number):
                with suppress(OSError):  # the disk may be full
                    attempts.record_failure(folder, reason, "outage" if passes else "error")
            raise


def run(federation: Federation, folder: Path, grid: Any, display: Display) -> None:
    """Run the remaining rounds of the run in `folder`. If all are done, deliver models to sites that missed the end."""
    if note := run_directory.version_note(folder):
        display.note(note)
    experiment = submitted_runs.read(federation, folder / summary.CONFIG)
    config, settings = experiment.plain(), experiment.settings
    torch.set_num_threads(settings.engine.threads)
    task, archs = agreed_task(experiment)
    engine = SiteEngine(
        folder,
        submitted_runs.token(folder),
        experiment,
        with_server_data(task, federation.folder, experiment),
        archs,
        GridRequests(grid, POLL_INTERVAL, federation.settings.timeout, refusals=proxy_files.Refusals(federation.server)),
        federation.settings,
        None if federation.settings.insecure else federation.nodes,  # a function: keys may be registered later
        display.note,
        fingerprint(public_samples(experiment, federation.folder)),
        functools.partial(proxy_files.announce_limit, federation.server, folder.name),
    )
    store = Store(folder, int(settings.engine.memory * 2**30))
    try:
        file = checkpoint.load(folder, config)
        if file and (folder / SITES).exists():
            engine.restore(json.loads((folder / SITES).read_text()), file.header.round)
        done = submitted_runs.done(folder)
        late = engine.without_model() if done else []
        if late:
            engine.wait_for_any(late)
        elif file is None or file.header.round < settings.rounds:
            engine.current_task()
        if file:
            at = checkpoint.states(folder, store, file, experiment.method, archs)
        else:
            server = experiment.method.init_server(engine.task, Key(settings.seed).at("init"))
            at = checkpoint.Checkpoint(checkpoint.Header(0, 0, {}), store.keep(server), {}, archs)
            checkpoint.save(folder, store, at, config)
        with loggers.opened(settings.log, folder, config, at.header.round) as logs:
            loop = RoundLoop(folder, experiment, engine, store, display, logs)
            if late:
                deliver_late(loop, engine, at, late, config)
            else:
                loop.run(at, config)
    finally:
        store.close()
        proxy_files.withdraw_limit(federation.server, folder.name)
    summary.write(folder, config)
    if late := engine.without_model():
        display.note(f"not connected at the end: {', '.join(late)}; they get their models when they are back")


def deliver_late(
    loop: RoundLoop, engine: SiteEngine, at: checkpoint.Checkpoint, late: list[ClientId], config: Mapping[str, Any]
) -> None:
    """Let sites that missed the end of the run evaluate and save their models, and add their scores to the last round."""
    t = loop.experiment.settings.rounds - 1
    task = with_members(engine.task, {client: engine.task.members[client] for client in late})
    *_, last_row = records.read(loop.folder)
    book = records.Records(loop.folder, at.header.metrics_bytes, at.header.metrics_check)
    try:
        scores_of = loop.evaluate_models(task, at.server, t, last=True)
        book.write(records.rows(t, {}, scores_of(), engine.samples, last_row["server_seconds"]))
        loop.save(replace(at, header=replace(at.header, metrics_bytes=book.size, metrics_check=book.check)), config, book)
    finally:
        book.close()


app = server_app(main)
