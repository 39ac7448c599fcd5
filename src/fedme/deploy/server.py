"""The server app: the same rounds as everywhere, with sites for clients. It can be started again after a crash."""

import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedme.core.data import Arrays, Scaling, Split
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.core.model import Model
from fedme.datasets import samples
from fedme.deploy.audit import models_in
from fedme.deploy.engine import SITES, Deployed
from fedme.deploy.federation import FOLDER, Federation
from fedme.deploy.site import agreed
from fedme.engines.flower.apps import server_app
from fedme.engines.flower.link import Link
from fedme.experiment import checkpoint, saved, summary
from fedme.experiment.config import Experiment, load
from fedme.experiment.files import RunError, locked
from fedme.experiment.progress import Display
from fedme.experiment.run import Loop
from fedme.experiment.store import Store
from fedme.learn.part import Part

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
        Loop(folder, experiment, engine, store, display).run(at, config)
        done = checkpoint.load(folder, config)
        assert done is not None
        save_shared(folder, experiment, task, checkpoint.states(folder, store, done, experiment.method, archs).server)
    finally:
        store.close()
    summary.write(folder, config)


def save_shared(folder: Path, experiment: Experiment, task: Task, server: Any) -> None:
    """What the server was sent and made of it: nothing, one model, or the sites' models, as the method has it."""
    found = dict(models_in(server))
    if isinstance(server, Part) and server.params.keys() == Model.init(task.shared, Key(0)).params.keys():
        found = {"meme": Model(task.shared, server.params, server.buffers)}
    for place, model in found.items():
        about = {"model": place, "method": experiment.method_name, "rounds": experiment.settings.rounds}
        saved.save(folder / "server", place.removeprefix("models."), model, task.schema, list(task.schema.classes), about)


def _names(federation: Federation) -> dict[int, str]:
    """Whose key a node has, as it was registered."""
    path = federation.server / NODES
    return {int(node): name for name, node in json.loads(path.read_text()).items()} if path.exists() else {}


def with_unlabeled(task: Task, federation: Federation, experiment: Experiment) -> Task:
    """The same federation with the server's own unlabeled samples, if it has any."""
    name = experiment.dataset.unlabeled_file
    if name is None:
        return task
    x, _ = samples.read(federation.folder / name, experiment.dataset.shape, None)
    source = Arrays(x, torch.zeros(len(x), dtype=torch.int64), Scaling(experiment.dataset.scale))
    return Task(task.schema, {}, task.shared, task.resolve, Split(source, torch.arange(len(x))), 0, task.dtype)


app = server_app(main)
