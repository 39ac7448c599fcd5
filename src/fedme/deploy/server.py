"""The server app: the same rounds as everywhere, with sites for clients. It can be started again after a crash."""

import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedme.core.data import Arrays, ClientId, Scaling, Split
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.deploy.engine import SITES, Deployed
from fedme.deploy.federation import FOLDER, Federation
from fedme.deploy.site import agreed
from fedme.engines.flower.apps import server_app
from fedme.engines.flower.link import Link
from fedme.experiment import checkpoint, newcomers, saved, sinks, summary
from fedme.experiment.config import Experiment, load
from fedme.experiment.files import RunError, locked
from fedme.experiment.lineage import Lineage
from fedme.experiment.progress import Display
from fedme.experiment.run import Loop
from fedme.experiment.store import Store

LOG, TOKEN, NODES, FAILED = "server.log", "run.json", "nodes.json", "failed.txt"
PAUSE = 0.3  # seconds between two looks for replies


def main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """Run, or go on with, the run that was submitted."""
    federation = Federation.read(Path(os.environ[FOLDER]))
    folder = federation.runs / Path(str(run_config["run"])).name
    with _own(folder), (folder / LOG).open("a", encoding="utf-8") as log:
        (folder / FAILED).unlink(missing_ok=True)
        try:
            with Display(Console(file=log, width=160)) as display:
                play(federation, folder, grid, display)
        except BaseException as error:
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
    """All rounds of the run in `folder`."""
    experiment, _ = load(folder / summary.CONFIG)
    config, settings = experiment.plain(), experiment.settings
    torch.set_num_threads(settings.engine.threads)
    task, archs = agreed(experiment)
    link = Link(grid, PAUSE, federation.settings.timeout)
    token = json.loads((folder / TOKEN).read_text())["run"]
    names = None if federation.settings.insecure else functools.partial(_names, federation)  # keys may be registered later
    engine = Deployed(
        folder,
        token,
        experiment,
        with_unlabeled(task, federation, experiment),
        archs,
        link,
        federation.settings,
        names,
        display.note,
    )
    store = Store(folder, int(settings.engine.memory * 2**30))
    try:
        found = checkpoint.load(folder, config)
        if found and (folder / SITES).exists():
            engine.recall(json.loads((folder / SITES).read_text()), found.header.round)
        task = engine.muster()
        if found:
            at = checkpoint.states(folder, store, found, experiment.method, archs)
        else:
            server = experiment.method.init_server(task, Key(settings.seed).at("init"))
            at = checkpoint.Checkpoint(checkpoint.Header(0, 0, {}), store.keep(server), {})
            checkpoint.save(folder, store, at, config)
        with sinks.opened(settings.log, folder, config, at.header.round) as logs:
            loop = Loop(folder, experiment, engine, store, display, logs)
            loop.run(at, config)
        done = checkpoint.load(folder, config)
        assert done is not None
        server = checkpoint.states(folder, store, done, experiment.method, archs).server
        save_lent(folder, experiment, engine.task, server, loop.ancestry)
    finally:
        store.close()
    summary.write(folder, config)


def save_lent(folder: Path, experiment: Experiment, task: Task, server: Any, ancestry: Mapping[ClientId, Lineage]) -> None:
    """The models that sites sent to be lent (FedMe's), beside what every run keeps of its server for newcomers."""
    models = getattr(server, "models", None)
    for client, model in models.items() if isinstance(models, Mapping) else ():
        about: dict[str, Any] = {
            "model": client,
            "stage": "round",
            "method": experiment.method_name,
            "rounds": experiment.settings.rounds,
        }
        about |= {"lineage": asdict(ancestry[client])} if client in ancestry else {}
        classes = list(task.members[client].labels)
        saved.save(saved.folder_of(folder, client, newcomers.SHARED), "model", model, task.schema, classes, about)


def _names(federation: Federation) -> dict[int, str]:
    """Whose key a node has, as it was registered."""
    path = federation.server / NODES
    return {int(node): name for name, node in json.loads(path.read_text()).items()} if path.exists() else {}


def with_unlabeled(task: Task, federation: Federation, experiment: Experiment) -> Task:
    """The same federation with the server's own unlabeled samples, if it has any."""
    name = experiment.dataset.unlabeled_file
    if name is None:
        return task
    x, _ = experiment.dataset.read(federation.folder / name)
    source = Arrays(x, torch.zeros(len(x), dtype=torch.int64), Scaling(experiment.dataset.scale))
    return Task(task.schema, {}, task.shared, task.resolve, Split(source, torch.arange(len(x))), 0, task.dtype)


app = server_app(main)
