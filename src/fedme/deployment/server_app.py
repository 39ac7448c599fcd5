"""The server app: the same rounds as everywhere, with sites for clients. It can be started again after a crash."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedme.core.atomic_files import RunError, locked
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.deployment import submitted_runs
from fedme.deployment.operator_folder import FOLDER, Federation
from fedme.deployment.site_data import fingerprint, public_samples, with_own_data
from fedme.deployment.site_engine import SiteEngine
from fedme.deployment.site_settings import agreed, with_members
from fedme.deployment.submitted_runs import FAILED, LOG, SITES
from fedme.federation.flower.flower_apps import server_app
from fedme.federation.flower.requests import Link
from fedme.results import loggers, records, summary
from fedme.running import checkpoint
from fedme.running.progress import Display
from fedme.running.round_loop import RoundLoop
from fedme.running.weight_store import Store

PAUSE = 0.3  # seconds between two looks for replies


def main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """Run, or go on with, the run that was submitted."""
    federation = Federation.read(Path(os.environ[FOLDER]))
    folder = federation.runs / Path(str(run_config["run"])).name
    if not (folder / summary.CONFIG).exists():
        raise RunError(f"{folder}: no run to begin here; it needs the experiment as {summary.CONFIG}")
    with _own(folder), (folder / LOG).open("a", encoding="utf-8") as log:
        (folder / FAILED).unlink(missing_ok=True)
        try:
            with Display(Console(file=log, width=160)) as display:
                play(federation, folder, grid, display)
        except BaseException as error:
            if not (folder / FAILED).exists():  # somebody who stops the run says so there
                (folder / FAILED).write_text(f"{error}\n")
            raise


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Keep others out of the run. Whoever looks whether it is running has it for a moment: that is waited for."""
    with ExitStack() as held:
        for left in reversed(range(50)):
            try:
                held.enter_context(locked(folder))
                break
            except RunError:
                if not left:
                    raise
                time.sleep(0.1)
        yield


def play(federation: Federation, folder: Path, grid: Any, display: Display) -> None:
    """All rounds of the run in `folder`; those who were away at the end of one that is done get their models."""
    experiment = submitted_runs.read(federation, folder / summary.CONFIG)
    config, settings = experiment.plain(), experiment.settings
    torch.set_num_threads(settings.engine.threads)
    task, archs = agreed(experiment)
    engine = SiteEngine(
        folder,
        submitted_runs.token(folder),
        experiment,
        with_own_data(task, federation.folder, experiment),
        archs,
        Link(grid, PAUSE, federation.settings.timeout),
        federation.settings,
        None if federation.settings.insecure else federation.nodes,  # keys may be registered later
        display.note,
        fingerprint(public_samples(experiment, federation.folder)),
    )
    store = Store(folder, int(settings.engine.memory * 2**30))
    try:
        found = checkpoint.load(folder, config)
        if found and (folder / SITES).exists():
            engine.recall(json.loads((folder / SITES).read_text()), found.header.round)
        done = submitted_runs.done(folder)
        owed = engine.without_model() if done else []
        if owed:
            engine.wait_for(owed)
        elif found is None or found.header.round < settings.rounds:
            engine.current_task()
        if found:
            at = checkpoint.states(folder, store, found, experiment.method, archs)
        else:
            server = experiment.method.init_server(engine.task, Key(settings.seed).at("init"))
            at = checkpoint.Checkpoint(checkpoint.Header(0, 0, {}), store.keep(server), {}, archs)
            checkpoint.save(folder, store, at, config)
        with loggers.opened(settings.log, folder, config, at.header.round) as logs:
            loop = RoundLoop(folder, experiment, engine, store, display, logs)
            if owed:
                hand_over(loop, engine, at, owed, config)
            else:
                loop.run(at, config)
    finally:
        store.close()
    summary.write(folder, config)
    if owed := engine.without_model():
        display.note(
            f"without their models, as they were away: {', '.join(owed)}; `fedme deploy submit --resume` hands them over"
        )


def hand_over(
    loop: RoundLoop, engine: SiteEngine, at: checkpoint.Checkpoint, owed: list[ClientId], config: Mapping[str, Any]
) -> None:
    """Let sites that were away at the end score and keep their models now; the records of the last round get their rows."""
    t = loop.experiment.settings.rounds - 1
    task = with_members(engine.task, {client: engine.task.members[client] for client in owed})
    before = list(records.read(loop.folder))
    scores = loop.evaluate_models(task, at.server, t, last=True)
    book = records.Records(loop.folder, at.header.metrics_bytes)
    try:
        book.write(records.rows(t, {}, scores, engine.samples, before[-1]["server_seconds"]))
        loop.save(replace(at, header=replace(at.header, metrics_bytes=book.size)), config, book)
    finally:
        book.close()


app = server_app(main)
