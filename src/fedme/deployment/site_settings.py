"""The settings of a site in `site.toml`: its data, its architecture, and what it shares. Only the site reads this file."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from fedme import networks
from fedme.config.experiment import ConfigError, Experiment, load, read_toml
from fedme.config.named_code import load_saved
from fedme.core.data import ClientId
from fedme.core.method import Member, Task
from fedme.core.model import Arch
from fedme.core.typed import TypedError, build
from fedme.learning.training_settings import require
from fedme.running.assembly import DTYPES

NAME = "site.toml"
LEFT = "left.jsonl"  # in the site's records, when it has left the federation


@dataclass(frozen=True)
class SiteData:
    """The `[data]` table: the site's samples and labels."""

    file: str  # .npz (one array of samples and one of labels), .csv, .tsv, .parquet, or a folder of images
    label: str = "y"  # the array or column of the labels
    features: tuple[str, ...] = ()  # columns of a table, in this order; default: all columns except the label
    rename: Mapping[str, str] = field(default_factory=dict)  # labels in this site's data = labels of the federation
    classes: tuple[str, ...] | None = None  # the site's own label space, for methods that support it


@dataclass(frozen=True)
class Guests:
    """The `[guests]` table: which models of other sites this site accepts."""

    accept: Literal["all"] | tuple[str, ...] = "all"  # names of architectures
    max_parameters: int | None = None


@dataclass(frozen=True)
class Lending:
    """The `[lend]` table: which sites may receive this site's model as a guest."""

    to: Literal["all"] | tuple[ClientId, ...] = "all"  # names of sites; an empty list: no site
    architectures: Literal["all"] | tuple[str, ...] = "all"  # of models that may leave this site, its own and its guests


@dataclass(frozen=True)
class Telling:
    """The `[tell]` table: what this site tells about itself."""

    samples: bool = True  # false: its number of samples, scores and privacy costs stay here, and it counts as the median site


@dataclass(frozen=True)
class PrivacyLimit:
    """The `[privacy]` table: the limit of the site's privacy account, over all runs and servers."""

    epsilon: float | None = None  # None: the epsilon of the experiment that the site agrees to
    delta: float | None = None  # None: that of the experiment

    def __post_init__(self) -> None:
        positive = self.epsilon is None or 0 < self.epsilon < math.inf
        require(positive, "epsilon", f"must be positive and finite, got {self.epsilon}")
        require(self.delta is None or 0 < self.delta < 1, "delta", f"must be between 0 and 1, got {self.delta}")


@dataclass(frozen=True)
class ServerAddress:
    """The `[server]` table: the server's address, and the files for authentication."""

    address: str = "127.0.0.1:9443"
    certificate: str = "ca.crt"  # of the authority that signed the server's certificate
    key: str = "key"  # this site's private key; the server has the public one
    insecure: bool = False  # no encryption and no authentication: for experiments on one machine only


@dataclass(frozen=True)
class Settings:
    """The contents of `site.toml`."""

    name: str
    data: SiteData
    model: str = ""  # an architecture of the experiment's pool; if models stay private, also any import path
    experiment: str = "experiment.toml"  # the experiment that this site agrees to
    imports: bool = False  # whether code that the experiment names (a method, networks) may be imported
    state: str = "state"  # the directory of private state and models
    records: str = "records"  # the directory of the audit log and the privacy account, over all runs
    guests: Guests = Guests()
    lend: Lending = Lending()
    tell: Telling = Telling()
    privacy: PrivacyLimit = PrivacyLimit()
    server: ServerAddress = ServerAddress()

    def __post_init__(self) -> None:
        valid = bool(self.name) and self.name.isprintable() and "/" not in self.name
        require(valid, "name", f"must be printable, without '/', and not empty, got {self.name!r}")


@dataclass(frozen=True)
class Site:
    """A site's settings, and the folder that their paths are relative to."""

    settings: Settings
    folder: Path

    @classmethod
    def read(cls, path: Path) -> "Site":
        """Read a site's file."""
        try:
            return cls(build(Settings, read_toml(path)), path.resolve().parent)
        except TypedError as error:
            raise ConfigError(f"{path}: {error}") from error

    def path(self, name: str) -> Path:
        """Resolve a path of the settings."""
        return self.folder / Path(name).expanduser()

    @property
    def shared(self) -> Path:
        """The folder of the files that all sites have: the experiment's."""
        return self.path(self.settings.experiment).parent

    @property
    def state(self) -> Path:
        """The directory of private state and models."""
        return self.path(self.settings.state)

    @property
    def records(self) -> Path:
        """The directory of what is kept over all runs: the audit log and the privacy account."""
        return self.path(self.settings.records)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment that this site agreed to."""
        file = self.path(self.settings.experiment)
        read = load_saved(file, self.settings.imports, "set `imports = true` in site.toml")
        return require_sites(read, file)

    @property
    def labels(self) -> tuple[str, ...]:
        """The site's label space."""
        classes = self.settings.data.classes
        return self.experiment.dataset.classes if classes is None else classes

    def arch(self) -> Arch:
        """The architecture of the site's own model."""
        models, schema = self.experiment.settings.models, self.experiment.dataset.schema
        if not self.experiment.method.own_architectures:
            return networks.arch(models.shared if models.shared is not None else models.pool[0], schema, len(self.labels))
        pool = {networks.arch(spec, schema).name: spec for spec in models.pool}
        if not self.settings.model:
            raise ConfigError(f"{self.folder / NAME}: model is missing; the experiment's pool has {', '.join(pool)}")
        return networks.arch(pool.get(self.settings.model, self.settings.model), schema, len(self.labels))

    def member(self) -> Member:
        """The site as a member of the federation."""
        guests, lend_to = self.settings.guests, self.settings.lend.to
        leaving = self.settings.lend.architectures  # a guest is sent back
        accepts = None if guests.accept == "all" else guests.accept
        if leaving != "all":
            accepts = tuple(name for name in leaving if accepts is None or name in accepts)
        lends_to = None if lend_to == "all" else lend_to
        return Member(self.settings.name, self.arch(), self.labels, guests.max_parameters, accepts, lends_to)

    def task(self) -> tuple[Task, dict[str, Arch]]:
        """The task with this site as the only member, and the architectures that the site accepts."""
        member = self.member()
        task, archs = agreed_task(self.experiment)
        networks.check(member.arch, task.schema, len(self.labels))
        accepted = {
            name: arch
            for name, arch in archs.items()
            if (member.accepts is None or name in member.accepts)
            and (member.max_parameters is None or arch.parameters <= member.max_parameters)
        }
        always = [task.shared, member.arch]
        if len(self.labels) != len(task.schema.classes):
            always.append(task.resolve(task.shared.name, len(self.labels)))
        return with_members(task, {member.id: member}), accepted | {arch.name: arch for arch in always}


def require_member(site: Site) -> None:
    """Refuse to work for a federation that the site has left."""
    if (site.records / LEFT).exists():
        raise ConfigError(f"this site has left the federation; to come back, delete {LEFT} in its records")


def read_experiment(file: Path) -> Experiment:
    """Read an experiment of the operator's own and check that its data is at sites."""
    return require_sites(load(file)[0], file)


def require_sites(experiment: Experiment, file: Path) -> Experiment:
    """Check that the data of an experiment is at sites."""
    if experiment.data_name != "sites":
        raise ConfigError(f"{file}: data.name is '{experiment.data_name}'; a deployment needs 'sites'")
    return experiment


def agreed_task(experiment: Experiment) -> tuple[Task, dict[str, Arch]]:
    """The task of an experiment before any site has joined, and its catalogue of architectures."""
    if experiment.method.pooled:
        raise ConfigError(
            f"method '{experiment.method_name}' trains on the pooled data of all clients, but the data of sites stays local; "
            f"choose another method, or use `fedme run` on a machine that may have all data"
        )
    for key in ("public", "unlabeled"):
        if getattr(experiment.data, key):
            raise ConfigError(f"data.{key}: a deployment cannot take samples from the sites; use a file: data.{key}_file")
    if experiment.settings.faults.simulates:
        raise ConfigError("faults: a deployment does not simulate failures; keep only `quorum` and `repeats`")
    schema, models = experiment.dataset.schema, experiment.settings.models
    shared = networks.arch(models.shared if models.shared is not None else models.pool[0], schema)
    archs = {arch.name: arch for arch in [*(networks.arch(spec, schema) for spec in models.pool), shared]}
    for arch in archs.values():
        networks.check(arch, schema)

    def resolve(name: str, classes: int | None) -> Arch:
        return networks.arch(name, schema, classes)

    dtype: torch.dtype = DTYPES[experiment.settings.engine.dtype]
    return Task(schema, {}, shared, resolve, None, 0, dtype, open=True, same_start=models.same_start), archs


def with_members(task: Task, members: Mapping[ClientId, Member]) -> Task:
    """The task with these members, sorted by name; numbers come first, in numerical order."""
    names = sorted(members, key=lambda name: (int(name), "") if name.isdecimal() else (1 << 62, name))
    return replace(task, members={name: members[name] for name in names})
