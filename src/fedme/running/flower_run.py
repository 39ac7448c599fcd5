"""An experiment on Flower's simulation runtime: the same rounds, the clients in other processes."""

import functools
import json
from collections.abc import Callable
from typing import Any

from fedme.config.experiment import ConfigError, Experiment
from fedme.core.key import Key
from fedme.core.processors import processors
from fedme.federation import flower
from fedme.federation.in_process import InProcessEngine
from fedme.running import assembly
from fedme.running.privacy_budget import policies


def require_flower(experiment: Experiment) -> None:
    """Refuse what cannot run on Flower before anything is trained."""
    if experiment.supplied is not None:
        raise ConfigError(
            "engine.name: Flower's processes read samples from files, but these are a program's own; leave it out"
        )
    flower.part("simulation")


def on_flower(
    experiment: Experiment,
    prepared: assembly.Prepared,
    work: Callable[[Any], None],
    tick: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Do `work` with Flower as its engine. `tick` is called at every reply, `stop` while waiting."""
    simulation, engine = flower.part("simulation"), experiment.settings.engine
    assigned = {client: member.arch.name for client, member in prepared.task.members.items()}
    simulation.run(
        work,
        _room(experiment, prepared),
        functools.partial(_opened, json.dumps(experiment.plain()), json.dumps(assigned)),
        tick,
        stop,
        engine.workers or processors(),
        engine.threads,
        engine.address,
    )


@functools.lru_cache(maxsize=1)
def _opened(config: str, assigned: str) -> Any:
    return _room(*assembly.reopened(config, assigned))


def _room(experiment: Experiment, prepared: assembly.Prepared) -> Any:
    clients, key = prepared.federation.clients, Key(experiment.settings.seed)
    engine = InProcessEngine(experiment.method, prepared.task, clients, key, policies=policies(experiment))
    return flower.part("simulation").Room(engine, prepared.archs)
