"""A site's own file, `site.toml`: which data, which architecture, whom it trusts with what. Only the site reads it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from fedme import networks
from fedme.config.experiment import ConfigError, Experiment, load, read_toml
from fedme.core.data import ClientId
from fedme.core.method import Member, Task
from fedme.core.model import Arch
from fedme.core.typed import TypedError, build
from fedme.learning.local_training import require
from fedme.running.assembly import DTYPES

NAME = "site.toml"


@dataclass(frozen=True)
class SiteData:
    """The `[data]` table: the site's samples, and what its labels are called here."""

    file: str  # .npz (an array beside that of the labels), .csv, .tsv, .parquet, or a folder of images
    label: str = "y"  # the array or the column of the labels
    features: tuple[str, ...] = ()  # columns of a table, in their order; all but the label by default
    rename: Mapping[str, str] = field(default_factory=dict)  # this site's word for a label = the federation's
    classes: tuple[str, ...] | None = None  # a label space of its own, for methods that can do with it


@dataclass(frozen=True)
class Guests:
    """The `[guests]` table: which models of others may come here."""

    accept: Literal["all"] | tuple[str, ...] = "all"  # names of architectures
    max_parameters: int | None = None


@dataclass(frozen=True)
class Lending:
    """The `[lend]` table: who may have this site's model as a guest."""

    to: Literal["all"] | tuple[ClientId, ...] = "all"  # names of sites; an empty list is nobody


@dataclass(frozen=True)
class ServerAddress:
    """The `[server]` table: where the server is, and how both know each other."""

    address: str = "127.0.0.1:9443"
    certificate: str = "ca.crt"  # of the authority that signed the server's
    key: str = "key"  # this site's private key; the server knows the public one
    insecure: bool = False  # no encryption and no authentication: for experiments on one machine only


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    name: str
    data: SiteData
    model: str = ""  # the architecture of its own model: of the experiment's pool, or (private models) any import path
    experiment: str = "experiment.toml"  # what this site agreed to
    state: str = "state"  # a directory for everything that must not be lost or seen
    guests: Guests = Guests()
    lend: Lending = Lending()
    server: ServerAddress = ServerAddress()

    def __post_init__(self) -> None:
        require(bool(self.name) and self.name.isprintable() and "/" not in self.name, "name", "must be a short plain name")


@dataclass(frozen=True)
class Site:
    """A site: its file, read, and the folder that all paths in it are relative to."""

    settings: Settings
    folder: Path

    @classmethod
    def read(cls, path: Path) -> "Site":
        """The site that a file describes."""
        try:
            return cls(build(Settings, read_toml(path)), path.resolve().parent)
        except TypedError as error:
            raise ConfigError(f"{path}: {error}") from error

    def path(self, name: str) -> Path:
        """A path of the file."""
        return self.folder / Path(name).expanduser()

    @property
    def shared(self) -> Path:
        """Where the files are that everybody has: beside the experiment."""
        return self.path(self.settings.experiment).parent

    @property
    def state(self) -> Path:
        """Where everything is kept."""
        return self.path(self.settings.state)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """What this site agreed to."""
        return read_experiment(self.path(self.settings.experiment))

    @property
    def labels(self) -> tuple[str, ...]:
        """The site's label space."""
        own = self.settings.data.classes
        return self.experiment.dataset.classes if own is None else own

    def arch(self) -> Arch:
        """The architecture of the site's own model."""
        models, schema = self.experiment.settings.models, self.experiment.dataset.schema
        if not self.experiment.method.own_architectures:
            return networks.arch(models.shared if models.shared is not None else models.pool[0], schema, len(self.labels))
        if not self.settings.model:
            known = ", ".join(networks.arch(spec, schema).name for spec in models.pool)
            raise ConfigError(f"{self.folder / NAME}: model is missing; the experiment's pool has {known}")
        by_name = {networks.arch(spec, schema).name: spec for spec in models.pool}
        return networks.arch(by_name.get(self.settings.model, self.settings.model), schema, len(self.labels))

    def member(self) -> Member:
        """What the federation is told of this site."""
        guests, to = self.settings.guests, self.settings.lend.to
        accepts = None if guests.accept == "all" else guests.accept
        lends_to = None if to == "all" else to
        return Member(self.settings.name, self.arch(), self.labels, guests.max_parameters, accepts, lends_to)

    def task(self) -> tuple[Task, dict[str, Arch]]:
        """The federation as this site sees it, and the architectures that it lets in."""
        experiment, me = self.experiment, self.member()
        task, archs = agreed(experiment)
        networks.check(me.arch, task.schema, len(self.labels))
        allowed = {
            name: arch
            for name, arch in archs.items()
            if (me.accepts is None or name in me.accepts)
            and (me.max_parameters is None or arch.parameters <= me.max_parameters)
        }
        private = {task.shared.name: task.shared, me.arch.name: me.arch}
        if len(self.labels) != len(task.schema.classes):
            mine = task.resolve(task.shared.name, len(self.labels))
            private[mine.name] = mine
        return with_members(task, {me.id: me}), allowed | private


def read_experiment(file: Path) -> Experiment:
    """The experiment of a file, if it is one for sites."""
    experiment, _ = load(file)
    if experiment.data_name != "sites":
        raise ConfigError(f"{file}: data.name is '{experiment.data_name}'; a deployment needs 'sites'")
    return experiment


def agreed(experiment: Experiment) -> tuple[Task, dict[str, Arch]]:
    """What an experiment of sites says before anybody has come, and its catalogue of architectures."""
    if experiment.method.pooled:
        raise ConfigError(
            f"method '{experiment.method_name}' brings everybody's data to one place, and the data of sites stays where it is; "
            f"choose another method, or run it with `fedme run` where all data may be"
        )
    for key in ("public", "unlabeled"):
        if getattr(experiment.data, key):
            raise ConfigError(f"data.{key}: is cut from data that is in one place; sites need a file: data.{key}_file")
    if experiment.settings.faults.simulates:
        raise ConfigError(
            "faults: sites fail by themselves; only `quorum` and `repeats` are for a deployment, leave out the others"
        )
    schema, models = experiment.dataset.schema, experiment.settings.models
    shared = networks.arch(models.shared if models.shared is not None else models.pool[0], schema)
    archs = {arch.name: arch for arch in [*(networks.arch(spec, schema) for spec in models.pool), shared]}
    for arch in archs.values():
        networks.check(arch, schema)

    def resolve(name: str, classes: int | None) -> Arch:
        return networks.arch(name, schema, classes)

    dtype: torch.dtype = DTYPES[experiment.settings.engine.dtype]
    return Task(schema, {}, shared, resolve, None, 0, dtype, open=True), archs


def with_members(task: Task, members: Mapping[ClientId, Member]) -> Task:
    """The same federation with these members, in the order of their names."""
    ordered = {name: members[name] for name in sorted(members, key=_natural)}
    return replace(task, members=ordered)


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 62, name)
