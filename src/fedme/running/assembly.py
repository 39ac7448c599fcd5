"""Prepare a run from an experiment: the data of the clients, the task, and every architecture by name."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedme import networks
from fedme.config.experiment import ConfigError, Experiment, parse
from fedme.config.settings import EngineOptions, Spec
from fedme.core.data import ClientData, ClientId, Inputs, Schema
from fedme.core.global_generators import seeded
from fedme.core.key import Key
from fedme.core.method import Member, Task
from fedme.core.model import Arch, template
from fedme.core.operations import Computation
from fedme.core.own_attributes import changing_attribute
from fedme.core.processors import processors
from fedme.datasets.download import root as data_root
from fedme.datasets.federated_dataset import Federation, federate
from fedme.datasets.preprocessing import Preparation
from fedme.execution.device import chosen, missing
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.lockstep import Executor, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.reply_validation import MessageTypes
from fedme.learning.architecture_selection import Choice, best_local
from fedme.learning.exchanged_part import exchanged_part, require_equal_parts
from fedme.learning.own_statistics import with_own_statistics
from fedme.running.chosen_architectures import ChosenArchitectures, SharedChoices
from fedme.running.local_training_name import local_training_name

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Prepared:
    """Data and task of an experiment; `archs` are all architectures that may occur in its states and messages."""

    federation: Federation
    task: Task
    archs: Mapping[str, Arch]
    selection: Mapping[ClientId, Mapping[str, float | None]]  # "best-local": validation score per client and architecture


def executor(
    engine: EngineOptions, tick: Callable[[], None] = lambda: None, before_fork: Callable[[], None] = lambda: None
) -> Dispatcher:
    """The dispatcher that executes the operations of a run, as configured."""
    if reason := missing(engine.device):
        raise ConfigError(f"engine.device: {reason}")
    torch.set_num_threads(engine.threads)
    memory = None if engine.device_memory is None else int(engine.device_memory * 2**30)
    device, workers = chosen(engine.device), engine.workers or processors()
    return Dispatcher(tick, workers, engine.path, device, before_fork, engine.precision, memory)


def gather(experiment: Experiment) -> Federation:
    """Load the data, divide it among the clients, and draw the malicious clients of an attack."""
    dataset = experiment.supplied.dataset if experiment.supplied else experiment.dataset.load(data_root())
    if "form" not in dataset.schema.preprocessing:  # a saved model needs the form of its samples
        preprocessing = {**dataset.schema.preprocessing, **Preparation.of(dataset.source).plain()}
        dataset = replace(dataset, schema=replace(dataset.schema, preprocessing=preprocessing))
    root = Key(experiment.settings.seed)
    federation = federate(dataset, experiment.partition, experiment.data, experiment.partition_key)
    attack = experiment.settings.attack
    try:
        malicious = attack.malicious(list(federation.clients), root)
    except ValueError as error:
        raise ConfigError(f"attack.clients: {error}") from error
    poisoned = {client: attack.poisoned(federation.clients[client], federation.classes[client]) for client in malicious}
    return replace(federation, clients={**federation.clients, **poisoned}, malicious=malicious)


def prepare(
    experiment: Experiment,
    federation: Federation,
    execute: Executor,
    assigned: Mapping[ClientId, str] | None = None,
    choices: SharedChoices | None = None,
) -> Prepared:
    """Give every client its architecture (`assigned`, if an earlier call has chosen them) and check that all fit the data.

    Without `choices`, those of "best-local" are made anew and not kept.
    """
    schema, models = federation.dataset.schema, experiment.settings.models
    dtype = DTYPES[experiment.settings.engine.dtype]
    more = experiment.supplied.archs if experiment.supplied else {}
    own = {client: spec for client, spec in experiment.own_models.items() if client in federation.clients}
    offered = models.pool if len(own) < len(federation.clients) else ()  # unused if every client has its own architecture
    pool = {_fit(spec, schema, more=more).name: spec for spec in offered}
    archs: dict[str, Arch] = {}
    known: dict[tuple[str, int | None, bool], Arch] = {}  # there may be fifty thousand clients, and few architectures

    def fitted(spec: Spec, classes: int | None, imports: bool = True) -> Arch:
        asked = _spelled(spec), classes, imports
        if asked not in known:
            arch = _fit(spec, schema, classes, more, imports)
            known[asked] = archs.setdefault(arch.name, arch)
        return known[asked]

    def resolve(name: str, classes: int | None) -> Arch:
        # The name may come from a checkpoint, so it must not import anything that the configuration does not name.
        return fitted(name, classes, imports=_without_options(name) in map(_without_options, archs))

    sample = _two_samples(federation)
    _check_own(own, federation, fitted, sample, dtype)
    default = next(iter(own.values()), models.pool[0])
    shared = fitted(models.shared if models.shared is not None else default, None)
    for classes in sorted(set(federation.classes.values())):
        for spec in [*offered, shared.name]:
            networks.check(fitted(spec, classes), schema, classes, sample, dtype)
    if len(pool) < len(offered):
        raise ConfigError("models.pool: names an architecture twice")
    limits = _parameter_limits(models.max_parameters, federation)
    public = len(federation.public) if federation.public is not None else 0

    def task_of(chosen: Mapping[ClientId, Arch]) -> Task:
        members = {
            client: Member(client, chosen[client], label_space(experiment, schema, client), limits.get(client))
            for client in federation.clients
        }
        return Task(schema, members, shared, resolve, federation.unlabeled, public, dtype, same_start=models.same_start)

    chosen = {client: fitted(shared.name, federation.classes[client]) for client in federation.clients}
    undecided: list[ClientId] = []  # "best-local" trains before it chooses
    if assigned is not None:
        chosen = {client: archs[name] for client, name in assigned.items()}
    elif experiment.method.own_architectures or experiment.method.exchanged:
        others = [client for client in federation.clients if client not in own]
        specs = dict(own)
        if models.assign == "best-local":
            undecided = others
        elif others:
            specs |= {client: pool[name] for client, name in _assigned(models.assign, list(pool), others).items()}
        chosen |= {client: fitted(spec, federation.classes[client]) for client, spec in specs.items()}
    experiment.method.check(task_of(chosen))  # before anything is trained
    MessageTypes.of(experiment.method)  # a method of the user's may not declare them
    require_equal_parts(experiment.method, task_of(chosen))
    if (part := exchanged_part(experiment.method, task_of(chosen))) is not None:
        archs[part.arch.name] = part.arch
    selection: Mapping[ClientId, Mapping[str, float | None]] = {}
    if undecided:
        rest = replace(federation, clients={client: federation.clients[client] for client in undecided})
        best = _by_best_local(experiment, rest, pool, fitted, execute, choices, dtype, limits)
        chosen |= {client: archs[name] for client, name in best.names.items()}
        selection = best.scores
    return Prepared(federation, task_of(chosen), archs, selection)


def candidates(experiment: Experiment, federation: Federation) -> dict[ClientId, list[Arch]]:
    """The architectures that every client could train alone: its own first, then all others of the federation.

    Those that are larger than its limit or do not fit its samples are left out, but never its own.
    """
    schema, models = federation.dataset.schema, experiment.settings.models
    more = experiment.supplied.archs if experiment.supplied else {}
    own = {client: spec for client, spec in experiment.own_models.items() if client in federation.clients}
    pool = [*(models.pool if len(own) < len(federation.clients) else ()), *own.values()]
    pool += [models.shared] if models.shared is not None else []
    limits, sample = _parameter_limits(models.max_parameters, federation), _two_samples(federation)
    archs: dict[str, Arch] = {}

    known: dict[tuple[str, int], Arch] = {}

    def fit(spec: Spec, classes: int) -> Arch:
        asked = _spelled(spec), classes
        if asked not in known:
            known[asked] = _fit(spec, schema, classes, more)
        return known[asked]

    def fitting(spec: Spec, classes: int) -> Arch | None:
        arch = fit(spec, classes)
        if arch.name not in archs:
            try:
                networks.check(arch, schema, classes, sample)
            except networks.ArchError:
                return None
            archs[arch.name] = arch
        return archs[arch.name]

    result = {}
    for client, classes in federation.classes.items():
        first = fit(own.get(client, pool[0]), classes)
        others = {arch.name: arch for spec in pool if (arch := fitting(spec, classes)) is not None}
        small = [arch for arch in others.values() if client not in limits or arch.parameters <= limits[client]]
        result[client] = list({arch.name: arch for arch in [first, *small]}.values())
    return result


def _spelled(spec: Spec) -> str:
    """A specification as text, by which equal ones are recognised."""
    return spec if isinstance(spec, str) else json.dumps(spec, sort_keys=True, default=repr)


def _without_options(name: str) -> str:
    """The name of an architecture without options and number of classes."""
    return name.partition("(")[0].partition("[")[0]


def reopened(config: str, assigned: str) -> tuple[Experiment, Prepared]:
    """The experiment in another process, from its configuration and every client's architecture, both as JSON."""
    experiment = parse(json.loads(config))
    torch.set_num_threads(experiment.settings.engine.threads)
    return experiment, prepare(experiment, gather(experiment), one_by_one, json.loads(assigned))


def changing_attributes(prepared: Prepared) -> list[str]:
    """What to say of networks whose forward pass changes an attribute, which no model has for itself."""
    data, changing = next(iter(prepared.federation.clients.values())).train, {}
    for arch in dict.fromkeys([prepared.task.shared, *(member.arch for member in prepared.task.members.values())]):
        if type(template(arch, training=False)) in changing:  # made already: a training template takes longer
            continue
        module = template(arch, training=True)
        x = data.inputs(torch.zeros(2, dtype=torch.int64))
        forward = functools.partial(module, **x) if isinstance(x, Mapping) else functools.partial(module, x)
        with seeded(0), torch.no_grad():
            try:
                changing[type(module)] = changing_attribute(module, forward)
            except Exception:  # user code, which may need other samples in training mode
                changing[type(module)] = ""
    return [
        f"the forward pass of {kind.__name__} changes its attribute {name}. All clients use the same module, so the value "
        "belongs to none of them: it is not saved, and may differ between runs. If results depend on it, make it a buffer "
        "(register_buffer)"
        for kind, name in changing.items()
        if name
    ]


def label_space(experiment: Experiment, schema: Schema, client: ClientId) -> tuple[str, ...]:
    """The classes of a client: the schema's, or its own groups of them."""
    groups = experiment.data.groups.get(client)
    return schema.classes if groups is None else tuple("+".join(schema.classes[c] for c in group) for group in groups)


def _two_samples(federation: Federation) -> Inputs | None:
    """Two samples to try networks on, if a sample is more than one tensor."""
    sample = next(iter(federation.clients.values())).train.inputs(torch.zeros(2, dtype=torch.int64))
    return sample if isinstance(sample, Mapping) else None


def _check_own(
    own: Mapping[ClientId, Spec],
    federation: Federation,
    fitted: Callable[[Spec, int], Arch],
    sample: Inputs | None,
    dtype: torch.dtype,
) -> None:
    """Try every client's own network; the error names the client."""
    schema, checked = federation.dataset.schema, set()
    for client, spec in own.items():
        try:
            arch = fitted(spec, federation.classes[client])
            if arch.name not in checked:
                networks.check(arch, schema, federation.classes[client], sample, dtype)
        except (ConfigError, networks.ArchError) as error:
            raise ConfigError(f"client {client}: {str(error).removeprefix('models: ')}") from error
        checked.add(arch.name)


def _fit(
    spec: Spec,
    schema: Schema,
    classes: int | None = None,
    more: Mapping[str, networks.Entry] | None = None,
    imports: bool = True,
) -> Arch:
    try:
        return networks.arch(spec, schema, classes, imports=imports, more=more)
    except networks.ArchError as error:
        raise ConfigError(f"models: {error}") from error


def _assigned(assign: Any, pool: list[str], clients: list[ClientId]) -> dict[ClientId, str]:
    """The name of every client's architecture."""
    if assign == "round-robin":
        return {client: pool[index % len(pool)] for index, client in enumerate(clients)}
    table = {**dict.fromkeys(clients, assign)} if isinstance(assign, str) else dict(assign)
    for client, name in table.items():
        if client not in clients:
            raise ConfigError(f"models.assign.{client}: unknown client; there are {', '.join(clients[:5])} ...")
        if name not in pool:
            known = ", ".join(["best-local", "round-robin", *pool] if isinstance(assign, str) else pool)
            raise ConfigError(f"models.assign: '{name}' is not in the pool; known: {known}")
    if missing := [client for client in clients if client not in table]:
        raise ConfigError(f"models.assign: no architecture for client {', '.join(missing[:5])}")
    return table


def _parameter_limits(limit: int | Mapping[ClientId, int] | None, federation: Federation) -> Mapping[ClientId, int]:
    """The parameters of the largest guest model, for every client that has a limit."""
    if not isinstance(limit, Mapping):
        return {} if limit is None else dict.fromkeys(federation.clients, limit)
    for client in limit:
        if client not in federation.clients:
            known = ", ".join(list(federation.clients)[:5])
            raise ConfigError(f"models.max_parameters.{client}: unknown client; there are {known} ...")
    return limit


def _by_best_local(
    experiment: Experiment,
    federation: Federation,
    pool: Mapping[str, Spec],
    fitted: Callable[[Spec, int], Arch],
    execute: Executor,
    choices: SharedChoices | None,
    dtype: torch.dtype,
    limits: Mapping[ClientId, int],
) -> ChosenArchitectures:
    settings = experiment.settings
    rounds = settings.models.selection_rounds or settings.rounds
    training = replace(settings.train, lr=settings.models.selection_lr or settings.train.lr)
    if empty := [client for client, data in federation.clients.items() if not len(data.val)]:
        raise ConfigError(
            f"models.assign: 'best-local' compares on validation data, but client {empty[0]} has none; set data.val above 0"
        )
    key = Key(settings.seed).at("selection")

    def candidates(client: ClientId) -> list[Arch]:
        archs = [fitted(spec, federation.classes[client]) for spec in pool.values()]
        fitting = [arch for arch in archs if client not in limits or arch.parameters <= limits[client]]
        if not fitting:
            raise ConfigError(f"models.max_parameters: no architecture of the pool is small enough for client {client}")
        return fitting

    offered = {client: candidates(client) for client in federation.clients}

    def choice(client: ClientId, data: ClientData) -> Computation[Choice]:
        work = best_local(offered[client], data, training, rounds, key.at(client), dtype)
        return with_own_statistics(work, data) if settings.models.update_bn else work

    def choose() -> ChosenArchitectures:
        if choices is not None:
            choices.begin(sum(map(len, offered.values())) * (rounds + 1))
        work = {client: choice(client, data) for client, data in federation.clients.items()}
        done = {client: result.value for client, result in run_in_lockstep(work, execute).items()}
        loss = federation.dataset.schema.task_type == "regression"
        scores = {
            client: {name: score.loss if loss else score.accuracy for name, score in chosen.scores.items()}
            for client, chosen in done.items()
        }
        return ChosenArchitectures({client: chosen.arch.name for client, chosen in done.items()}, scores)

    if choices is None:
        return choose()
    rounds_of = dict.fromkeys(federation.clients, rounds)
    return choices.get(local_training_name(experiment, federation, offered, rounds_of, training), choose)
