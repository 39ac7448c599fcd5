"""The first thing a server asks: who are you, and do we agree on what to do?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedme import __version__
from fedme.config.experiment import ConfigError, Experiment
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Member, Task, TaskError
from fedme.core.model import Arch, models_in
from fedme.deployment.site_data import fingerprint
from fedme.deployment.site_settings import Site, with_members
from fedme.deployment.site_state import PrivateState
from fedme.federation.client_work import AnyMethod

MOST_SAMPLES = 2**40
LOCAL = ("output", "name", "checkpoint_every", "evaluate_every", "log")  # keys that are the operator's business alone


@dataclass(frozen=True)
class Hello:
    """What a site says of itself. No data, no paths."""

    client: ClientId
    arch: str
    labels: tuple[str, ...]
    samples: int
    version: int  # of its private state in this run
    max_parameters: int | None
    accepts: tuple[str, ...] | None
    lends_to: tuple[ClientId, ...] | None
    fedme: str
    public: str = ""  # what tells its public samples from others


def introduce(site: Site, run: str, config: Mapping[str, Any], data: ClientData) -> Hello:
    """The site's answer, if the server's experiment is the one that the site agreed to."""
    if differing := differences(site.experiment.plain(), config):
        raise ConfigError(
            f"the server's experiment is not the one this site agreed to: {', '.join(differing[:5])}; "
            f"the operator sends the new experiment.toml, and the site puts it in place if it agrees"
        )
    me = site.member()
    known = PrivateState(site.state, run).versions()
    version = known[-1] if known else 0
    return Hello(
        me.id,
        me.arch.name,
        me.labels,
        len(data.train),
        version,
        me.max_parameters,
        me.accepts,
        me.lends_to,
        __version__,
        fingerprint(data.public),
    )


def differences(mine: Any, theirs: Any, at: str = "") -> list[str]:
    """The keys in which two configurations differ."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in dict.fromkeys([*mine, *theirs]) if at or key not in LOCAL]
        return [each for key in keys for each in differences(mine.get(key), theirs.get(key), f"{at}.{key}" if at else str(key))]
    return [] if mine == theirs else [at]


def admitted(hello: Hello, experiment: Experiment, task: Task, archs: Mapping[str, Arch]) -> Member:
    """The member that a hello describes, or a TaskError that says why it cannot be one."""
    method: AnyMethod = experiment.method
    if hello.fedme.split(".")[:2] != __version__.split(".")[:2]:
        raise TaskError(f"it has fedme {hello.fedme}, the server {__version__}: install the same version")
    if not 1 <= hello.samples <= MOST_SAMPLES:
        raise TaskError(f"it says it has {hello.samples} training samples; a member has at least 1")
    arch = archs.get(hello.arch) or _elsewhere(hello.arch)
    member = Member(hello.client, arch, hello.labels, hello.max_parameters, hello.accepts, hello.lends_to)
    alone = with_members(task, {member.id: member})
    method.check(alone)
    # Methods whose server keeps the clients' models (FedMe) must know how to build them; the others never see one.
    delivery = method.deliver(alone, method.init_server(alone, Key(experiment.settings.seed).at("init")), member.id)
    if hello.arch not in archs and any(model.arch is arch for _, model in models_in(delivery)):
        raise TaskError(
            f"unknown architecture '{hello.arch}': this method sends models between sites, so it must be in the experiment's "
            f"models.pool; known: {', '.join(archs)}"
        )
    return member


def _elsewhere(name: str) -> Arch:
    """An architecture that only its site has: nothing is imported because a message named it."""
    return Arch.named(name, nn.Module)
