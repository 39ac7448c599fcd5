"""The first message between server and site: who the site is, and whether both agree on the experiment."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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

MAX_SAMPLES = 2**40
OPERATOR_KEYS = ("output", "name", "checkpoint_every", "evaluate_every", "log", "save")  # a site need not agree on these


@dataclass(frozen=True)
class Handshake:
    """A site's description of itself. It contains no data and no paths."""

    client: ClientId
    arch: str
    labels: tuple[str, ...]
    samples: int  # 0: the site does not tell
    version: int  # of its private state in this run
    max_parameters: int | None
    accepts: tuple[str, ...] | None
    lends_to: tuple[ClientId, ...] | None
    fedme: str
    public: str = ""  # fingerprint of its public samples


def create_handshake(site: Site, run: str, config: Mapping[str, Any], data: ClientData) -> Handshake:
    """Describe the site, if the server's experiment `config` is the one that the site agreed to."""
    if keys := differing_keys(site.experiment.plain(), config):
        raise ConfigError(
            f"the server's experiment differs from the one this site agreed to: {', '.join(keys[:5])}; "
            f"the operator must send the new experiment.toml, and the site must install it if it agrees"
        )
    member, method = site.member(), site.experiment.method
    if not site.settings.tell.samples:
        require_hidden_samples(method)
    return Handshake(
        member.id,
        member.arch.name,
        member.labels,
        len(data.train) if site.settings.tell.samples else 0,
        max(PrivateState(site.state, run).versions(), default=0),
        member.max_parameters,
        member.accepts,
        member.lends_to,
        __version__,
        fingerprint(data.public),
    )


def require_hidden_samples(method: AnyMethod) -> None:
    """Refuse a method whose clients must tell their numbers of samples."""
    if not method.hides_samples:
        raise TaskError(
            f"method '{method.name()}' needs every site's number of samples, but this site does not tell (tell.samples)"
        )


def differing_keys(agreed: Any, received: Any, at: str = "") -> list[str]:
    """The keys in which two configurations differ."""
    if not (isinstance(agreed, Mapping) and isinstance(received, Mapping)):
        return [] if agreed == received else [at]
    keys = [key for key in dict.fromkeys([*agreed, *received]) if at or key not in OPERATOR_KEYS]
    pairs = {f"{at}.{key}" if at else str(key): (agreed.get(key), received.get(key)) for key in keys}
    return [key for path, pair in pairs.items() for key in differing_keys(*pair, path)]


def admit(handshake: Handshake, experiment: Experiment, task: Task, archs: Mapping[str, Arch]) -> Member:
    """The member that a handshake describes; a TaskError says why it cannot join."""
    method: AnyMethod = experiment.method
    if handshake.fedme.split(".")[:2] != __version__.split(".")[:2]:
        raise TaskError(f"it has fedme {handshake.fedme}, the server {__version__}; install the same version")
    if handshake.samples == 0:
        require_hidden_samples(method)
    elif not 1 <= handshake.samples <= MAX_SAMPLES:
        raise TaskError(f"training samples must be >= 1 and <= {MAX_SAMPLES}, got {handshake.samples}")
    # The server only imports architectures of its own experiment, never because a message names them.
    arch = archs.get(handshake.arch) or Arch.named(handshake.arch, nn.Module)
    limits = handshake.max_parameters, handshake.accepts, handshake.lends_to
    member = Member(handshake.client, arch, handshake.labels, *limits)
    single = with_members(task, {member.id: member})
    unknown = handshake.arch not in archs
    if unknown:
        method.check(with_members(task, {member.id: replace(member, arch=task.shared)}))  # everything but the architecture
    try:
        method.check(single)
        # Methods whose server keeps the clients' models (FedMe) must be able to build them; the others never receive one.
        delivery = method.deliver(single, method.init_server(single, Key(experiment.settings.seed).at("init")), member.id)
        needed = any(model.arch is arch for _, model in models_in(delivery))
    except TaskError:  # LG-FedAvg compares layers of the networks
        if not unknown:
            raise
        needed = True
    if unknown and needed:
        raise TaskError(
            f"unknown architecture '{handshake.arch}': method '{method.name()}' needs the networks of its sites, so "
            f"they must be in the experiment's models.pool; known: {', '.join(archs)}"
        )
    return member
