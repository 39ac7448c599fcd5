"""From an experiment to what a run needs: the federation's data, the task, and every architecture by name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedme import networks
from fedme.config.experiment import ConfigError, Experiment, parse
from fedme.config.settings import EngineOptions, Spec
from fedme.core.data import ClientId, Inputs, Schema
from fedme.core.key import Key
from fedme.core.method import Member, Task
from fedme.core.model import Arch
from fedme.core.processors import processors
from fedme.datasets.download import root as data_root
from fedme.datasets.federated_dataset import Federation, federate
from fedme.datasets.preprocessing import Preparation
from fedme.execution.device import missing
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.lockstep import Executor, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.learning.architecture_selection import best_local

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Prepared:
    """Data and task of an experiment; `archs` are all architectures that may occur in its states and messages."""

    federation: Federation
    task: Task
    archs: Mapping[str, Arch]
    selection: Mapping[ClientId, Mapping[str, float]]  # "best-local": validation accuracy of every architecture


def executor(
    engine: EngineOptions, tick: Callable[[], None] = lambda: None, before_fork: Callable[[], None] = lambda: None
) -> Dispatcher:
    """What executes the operations of a run, as configured."""
    if reason := missing(engine.device):
        raise ConfigError(f"engine.device: {reason}")
    torch.set_num_threads(engine.threads)
    return Dispatcher(tick, engine.workers or processors(), engine.path, engine.device, before_fork)


def gather(experiment: Experiment) -> Federation:
    """Load the data and cut it among the clients."""
    dataset = experiment.supplied.dataset if experiment.supplied else experiment.dataset.load(data_root())
    if "form" not in dataset.schema.preprocessing:  # what a saved model has to know about samples
        known = {**dataset.schema.preprocessing, **Preparation.of(dataset.source).plain()}
        dataset = replace(dataset, schema=replace(dataset.schema, preprocessing=known))
    root = Key(experiment.settings.seed)
    federation = federate(dataset, experiment.partition, experiment.data, root.at("partition"))
    attack = experiment.settings.attack
    try:
        malicious = attack.malicious(list(federation.clients), root)
    except ValueError as error:
        raise ConfigError(f"attack.clients: {error}") from error
    poisoned = {each: attack.poisoned(federation.clients[each], federation.classes[each]) for each in malicious}
    return replace(federation, clients={**federation.clients, **poisoned})


def prepare(
    experiment: Experiment,
    federation: Federation,
    execute: Executor,
    assigned: Mapping[ClientId, str] | None = None,
    choosing: Callable[[int], None] = lambda operations: None,
) -> Prepared:
    """Give every client its architecture (`assigned` when they are known from before) and check that all fit the data."""
    schema, models = federation.dataset.schema, experiment.settings.models
    dtype = DTYPES[experiment.settings.engine.dtype]
    more = experiment.supplied.archs if experiment.supplied else {}
    own = {client: spec for client, spec in experiment.own_models.items() if client in federation.clients}
    offered = models.pool if len(own) < len(federation.clients) else ()  # nobody chooses where everybody has brought one
    pool = {_fit(spec, schema, more=more).name: spec for spec in offered}
    archs: dict[str, Arch] = {}

    def fitted(spec: Spec, classes: int) -> Arch:
        arch = _fit(spec, schema, classes, more)
        archs.setdefault(arch.name, arch)
        return archs[arch.name]

    two = _two(federation)
    _check_own(own, federation, fitted, two)
    default = next(iter(own.values()), models.pool[0])
    shared = _fit(models.shared if models.shared is not None else default, schema, more=more)
    archs.setdefault(shared.name, shared)
    for classes in sorted(set(federation.classes.values())):
        for spec in [*offered, shared.name]:
            networks.check(fitted(spec, classes), schema, classes, two)
    if len(pool) < len(offered):
        raise ConfigError("models.pool: names an architecture twice")
    room = _room(models.max_parameters, federation)
    public = len(federation.public) if federation.public is not None else 0

    def task_of(chosen: Mapping[ClientId, Arch]) -> Task:
        members = {
            client: Member(client, chosen[client], label_space(experiment, schema, client), room.get(client))
            for client in federation.clients
        }
        return Task(schema, members, shared, fitted, federation.unlabeled, public, dtype)

    same = {client: fitted(shared.name, federation.classes[client]) for client in federation.clients}
    experiment.method.check(task_of(same))  # before anything is trained
    selection: dict[ClientId, dict[str, float]] = {}
    if assigned is not None:
        chosen = {client: archs[name] for client, name in assigned.items()}
    elif not experiment.method.own_architectures:
        chosen = same
    else:
        rest = replace(federation, clients={c: data for c, data in federation.clients.items() if c not in own})
        mine = {client: fitted(spec, federation.classes[client]) for client, spec in own.items()}
        others: dict[ClientId, Arch] = {}
        if rest.clients and models.assign == "best-local":
            others, selection = _by_best_local(experiment, rest, pool, fitted, execute, choosing, dtype, room)
        elif rest.clients:
            names = _assigned(models.assign, list(pool), list(rest.clients))
            others = {client: fitted(pool[name], federation.classes[client]) for client, name in names.items()}
        chosen = {client: (mine | others)[client] for client in federation.clients}
    task = task_of(chosen)
    experiment.method.check(task)
    return Prepared(federation, task, archs, selection)


def reopened(config: str, assigned: str) -> tuple[Experiment, Prepared]:
    """An experiment as another process sees it: from its configuration and every client's architecture, both as JSON."""
    experiment = parse(json.loads(config))
    torch.set_num_threads(experiment.settings.engine.threads)
    return experiment, prepare(experiment, gather(experiment), one_by_one, json.loads(assigned))


def label_space(experiment: Experiment, schema: Schema, client: ClientId) -> tuple[str, ...]:
    """The classes of a client: the schema's, or its own groups of them."""
    groups = experiment.data.groups.get(client)
    return schema.classes if groups is None else tuple("+".join(schema.classes[c] for c in group) for group in groups)


def _two(federation: Federation) -> Inputs | None:
    """Two samples to try networks on, where they are more than one tensor."""
    sample = next(iter(federation.clients.values())).train.inputs(torch.zeros(2, dtype=torch.int64))
    return sample if isinstance(sample, Mapping) else None


def _check_own(
    own: Mapping[ClientId, Spec], federation: Federation, fitted: Callable[[Spec, int], Arch], two: Inputs | None
) -> None:
    """Try every client's own network; the error names the client."""
    schema, seen = federation.dataset.schema, set()
    for client, spec in own.items():
        try:
            arch = fitted(spec, federation.classes[client])
            if arch.name not in seen:
                networks.check(arch, schema, federation.classes[client], two)
        except (ConfigError, networks.ArchError) as error:
            raise ConfigError(f"client {client}: {str(error).removeprefix('models: ')}") from error
        seen.add(arch.name)


def _fit(spec: Spec, schema: Schema, classes: int | None = None, more: Mapping[str, networks.Entry] | None = None) -> Arch:
    try:
        return networks.arch(spec, schema, classes, more=more)
    except networks.ArchError as error:
        raise ConfigError(f"models: {error}") from error


def _assigned(assign: Any, pool: list[str], clients: list[ClientId]) -> dict[ClientId, str]:
    """The name of every client's architecture."""
    if assign == "round-robin":
        return {client: pool[index % len(pool)] for index, client in enumerate(clients)}
    table = {**dict.fromkeys(clients, assign)} if isinstance(assign, str) else dict(assign)
    for client, name in table.items():
        if client not in clients:
            raise ConfigError(f"models.assign.{client}: there is no such client; they are {', '.join(clients[:5])} ...")
        if name not in pool:
            known = ", ".join(["best-local", "round-robin", *pool] if isinstance(assign, str) else pool)
            raise ConfigError(f"models.assign: '{name}' is not in the pool; known: {known}")
    missing = [client for client in clients if client not in table]
    if missing:
        raise ConfigError(f"models.assign: no architecture for client {', '.join(missing[:5])}")
    return table


def _room(most: int | Mapping[ClientId, int] | None, federation: Federation) -> Mapping[ClientId, int]:
    """The largest guest of every client that has a limit."""
    if not isinstance(most, Mapping):
        return {} if most is None else dict.fromkeys(federation.clients, most)
    for client in most:
        if client not in federation.clients:
            there = ", ".join(list(federation.clients)[:5])
            raise ConfigError(f"models.max_parameters.{client}: there is no such client; they are {there} ...")
    return most


def _by_best_local(
    experiment: Experiment,
    federation: Federation,
    pool: Mapping[str, Spec],
    fitted: Callable[[Spec, int], Arch],
    execute: Executor,
    choosing: Callable[[int], None],
    dtype: torch.dtype,
    room: Mapping[ClientId, int],
) -> tuple[dict[ClientId, Arch], dict[ClientId, dict[str, float]]]:
    settings = experiment.settings
    rounds = settings.models.selection_rounds or settings.rounds
    if empty := [client for client, data in federation.clients.items() if not len(data.val)]:
        raise ConfigError(
            f"models.assign: 'best-local' compares on validation data, but client {empty[0]} has none; set data.val"
        )
    choosing(len(federation.clients) * len(pool) * (rounds + 1))
    key = Key(settings.seed).at("selection")

    def candidates(client: ClientId) -> list[Arch]:
        archs = [fitted(spec, federation.classes[client]) for spec in pool.values()]
        fitting = [arch for arch in archs if client not in room or arch.parameters <= room[client]]
        if not fitting:
            raise ConfigError(f"models.max_parameters: no architecture of the pool is small enough for client {client}")
        return fitting

    work = {
        client: best_local(
            candidates(client),
            data,
            settings.train,
            rounds,
            key.at(client),
            dtype,
        )
        for client, data in federation.clients.items()
    }
    done = run_in_lockstep(work, execute)
    loss = federation.dataset.schema.task_type == "regression"
    scores = {
        client: {name: score.loss if loss else score.accuracy for name, score in each.value.scores.items()}
        for client, each in done.items()
    }
    return {client: each.value.arch for client, each in done.items()}, scores
