"""Run an experiment with its operations on a Ray cluster: clients, rounds, store and checkpoint stay in this process."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fedme.config.experiment import ConfigError, Experiment, parse
from fedme.config.identity import user_files
from fedme.config.settings import EngineOptions
from fedme.core.data import ClientData, ClientId, Split
from fedme.core.method import POOL
from fedme.core.processors import processors
from fedme.datasets.federated_dataset import Federation
from fedme.execution import ray
from fedme.execution.device import given, gpus
from fedme.execution.dispatcher import Dispatcher
from fedme.federation.in_process import InProcessEngine, pooled
from fedme.running import assembly

PARTS = {"train": "training samples", "val": "validation samples", "test": "test samples"}


def require_ray(experiment: Experiment) -> None:
    """Reject an experiment whose operations cannot run on Ray, before training starts."""
    engine = experiment.settings.engine
    if experiment.supplied is not None:
        raise ConfigError(
            f"engine.name: '{engine.name}' needs data in files, because its processes cannot see the arrays of this program; "
            "leave engine.name out"
        )
    if engine.address is None:
        ray.keep_ray_private()  # before Ray is imported
    ray.load_module("execution.ray.cluster")


@contextlib.contextmanager
def started_executor(
    experiment: Experiment,
    federation: Federation,
    engine: InProcessEngine,
    router: Dispatcher,
    tick: Callable[[], None],
    poll: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[Any]:
    """An executor on Ray while the block runs. `router` is the one of this process; `poll` may raise to stop the run."""
    settings = experiment.settings.engine
    modules = {
        name: ray.load_module(f"execution.ray.{name}") for name in ("cluster", "actor", "actors", "messages", "executor")
    }
    splits = modules["messages"].Splits(named_splits(engine.clients, federation))
    config = experiment.plain()
    needs = {"CPU": settings.threads, "GPU": gpus(settings.device)}
    visible = torch.cuda.device_count() if needs["GPU"] else 0
    own = settings.workers or max(1, processors() // settings.threads)
    with modules["cluster"].joined(settings.address, own * settings.threads, user_files(config), visible):
        needed = {name: number for name, number in needs.items() if number}
        fitting = modules["cluster"].places(needed)
        if not fitting and (settings.address is None or settings.workers is None):  # with a number, nodes may still come
            wanted = " and ".join(f"{number} {name}" for name, number in needed.items())
            raise ray.EngineError(
                f"no machine of the Ray cluster has {wanted}, which a process needs with these engine.threads and engine.device"
            )
        count = settings.workers or fitting
        actors = modules["actors"].Actors(
            count,
            functools.partial(open_data, json.dumps(config)),
            {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"], "scheduling_strategy": "SPREAD"},
            modules["actor"].Identity.of(splits),
            poll,
            note,
        )
        memory, separate = int(settings.memory * 2**30), settings.device != "cpu"
        execute = modules["executor"].RayExecutor(actors, router, splits, tick, poll, memory, separate)
        try:
            yield execute
        finally:
            execute.close()


def process_settings(experiment: Experiment) -> EngineOptions:
    """The settings of one process of a cluster: it has one worker, itself, and sees one device."""
    engine = experiment.settings.engine
    return replace(engine, workers=1, device=given(engine.device))


def open_data(config: str) -> Any:
    """What an actor works with, from the configuration of the experiment as JSON."""
    experiment = parse(json.loads(config))
    engine = process_settings(experiment)
    torch.set_num_threads(engine.threads)
    federation = assembly.gather(experiment)
    clients = dict(federation.clients)
    if experiment.method.pooled:
        clients[POOL] = pooled(federation.clients)
    return ray.load_module("execution.ray.actor").Opened(named_splits(clients, federation), assembly.executor(engine))


def named_splits(clients: Mapping[ClientId, ClientData], federation: Federation) -> dict[str, Split]:
    """The splits that operations use, by the names that errors give them."""
    named = {
        f"the {words} of client {client}": getattr(data, part)
        for client, data in clients.items()
        for part, words in PARTS.items()
    }
    of_all = {"the unlabeled samples": federation.unlabeled, "the public samples": federation.public}
    return named | {name: split for name, split in of_all.items() if split is not None}
