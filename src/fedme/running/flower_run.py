"""Run an experiment on Flower's simulation runtime: the same rounds, with the clients in other processes."""

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

SIMULATION = "federation.flower.simulation"


def require_flower(experiment: Experiment) -> None:
    """Reject an experiment that cannot run on Flower, before training starts."""
    if experiment.supplied is not None:
        raise ConfigError(
            "engine.name: 'flower' needs data in files, because its processes cannot see the arrays of this program; "
            "leave engine.name out"
        )
    if experiment.settings.engine.address is None:
        flower.keep_ray_private()  # before Ray is imported
    flower.load_module(SIMULATION)


def on_flower(
    experiment: Experiment,
    prepared: assembly.Prepared,
    work: Callable[[Any], None],
    on_reply: Callable[[], None],
    on_poll: Callable[[], None],
) -> None:
    """Call `work` with an engine on Flower. `on_reply` is called at every reply, `on_poll` while waiting."""
    engine = experiment.settings.engine
    if engine.address is None:
        flower.keep_ray_private()
    assigned = {client: member.arch.name for client, member in prepared.task.members.items()}
    flower.load_module(SIMULATION).run(
        work,
        _actor(experiment, prepared),
        functools.partial(_open_actor, json.dumps(experiment.plain()), json.dumps(assigned)),
        on_reply,
        on_poll,
        engine.workers or processors(),
        engine.threads,
        engine.address,
    )


@functools.lru_cache(maxsize=1)
def _open_actor(config: str, assigned: str) -> Any:
    return _actor(*assembly.reopened(config, assigned))


def _actor(experiment: Experiment, prepared: assembly.Prepared) -> Any:
    clients, key, update_bn = prepared.federation.clients, Key(experiment.settings.seed), experiment.settings.models.update_bn
    policy = policies(experiment)
    engine = InProcessEngine(experiment.method, prepared.task, clients, key, policies=policy, update_bn=update_bn)
    return flower.load_module(SIMULATION).ActorContext(engine, prepared.archs)
