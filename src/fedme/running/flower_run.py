"""Run an experiment on Flower's simulation runtime: the same rounds, with the clients in other processes."""

import functools
import json
from collections.abc import Callable
from typing import Any

from fedme.config.experiment import Experiment
from fedme.config.identity import user_files
from fedme.core.key import Key
from fedme.core.processors import processors
from fedme.execution.device import gpus
from fedme.federation import flower
from fedme.federation.in_process import InProcessEngine
from fedme.running import assembly
from fedme.running.privacy_budget import policies
from fedme.running.ray_run import process_settings, require_ray

SIMULATION = "federation.flower.simulation"


def require_flower(experiment: Experiment) -> None:
    """Reject an experiment that cannot run on Flower, before training starts."""
    require_ray(experiment)
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
        user_files(experiment.plain()),
        gpus(engine.device),
    )


@functools.lru_cache(maxsize=1)
def _open_actor(config: str, assigned: str) -> Any:
    return _actor(*assembly.reopened(config, assigned))


def _actor(experiment: Experiment, prepared: assembly.Prepared) -> Any:
    clients, key, update_bn = prepared.federation.clients, Key(experiment.settings.seed), experiment.settings.models.update_bn
    policy, execute = policies(experiment), assembly.executor(process_settings(experiment))
    every = experiment.settings.evaluate_every if experiment.settings.evaluate_trained else None
    engine = InProcessEngine(
        experiment.method, prepared.task, clients, key, execute, policy, update_bn=update_bn, score_trained_every=every
    )
    return flower.load_module(SIMULATION).ActorContext(engine, prepared.archs)
