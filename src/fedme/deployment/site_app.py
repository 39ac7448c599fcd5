"""A site's message handlers: handshake, training, evaluation. Personal models and private state stay at the site."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedme import networks
from fedme.artifacts.saved_models import folder_of
from fedme.config.experiment import ConfigError
from fedme.core.key import Key
from fedme.core.method import Round, TaskError
from fedme.core.typed import TypedError
from fedme.deployment import transfer_log
from fedme.deployment.handshake import create_handshake
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site
from fedme.deployment.site_state import PrivateState, exchanges_before
from fedme.federation.client_work import Finetune
from fedme.federation.flower.flower_apps import Handler, client_app
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import MessageTypes, check_sent
from fedme.learning.accountant import Ledger
from fedme.running import privacy_budget
from fedme.running.round_loop import save_models

# Errors about the federation. The text of any other error may reveal data or paths, so it stays at the site.
PUBLIC_ERRORS = (TypedError, TaskError, ConfigError, networks.ArchError)
log = logging.getLogger("fedme.site")


class SiteError(RuntimeError):
    """An error at a site, with the text that the server may see."""


def handler(work: Callable[[Site, MessageContent], MessageContent]) -> Handler:
    """Convert a function of a site to a handler whose errors reveal nothing private; the site's log has the details."""

    @functools.wraps(work)
    def handle(request: MessageContent, node_config: Mapping[str, Any]) -> MessageContent:
        try:
            return work(Site.read(Path(str(node_config["site"]))), request)
        except Exception as error:
            log.exception("a request failed")
            text = str(error) if isinstance(error, PUBLIC_ERRORS) else f"{type(error).__name__} (see the site's log)"
            raise SiteError(text) from None

    return handle


@handler
def handshake(site: Site, request: MessageContent) -> MessageContent:
    """Describe this site to the server, if both agree on the experiment."""
    run, config = request.read("run", str), request.read("config", dict[str, Any])
    _, archs = site.task()
    data = client_data(site)
    privacy_budget.require_private_training(site.experiment, archs.values(), [data])
    return MessageContent.of(handshake=create_handshake(site, run, config, data))


@handler
def train(site: Site, request: MessageContent) -> MessageContent:
    """Take part in one exchange of a round."""
    client = SiteClient(site, request)
    when, name = client.when, client.name
    down = client.receive("down", when)
    before = exchanges_before(client.engine.method.phases, when)
    version = client.load_state(before)
    reply = client.engine.exchange({name: down}, when)[name]
    spent = client.save_ledger()
    client.private.write(before + 1, client.engine.states[name])
    transfer_log.record(site.state, "sent", "server", client.run, when.t, reply.up)
    versions = {"before": version, "after": before + 1}
    return MessageContent.of(up=reply.up, report=reply.report, seconds=reply.seconds, spent=spent, when=when, **versions)


@handler
def evaluate(site: Site, request: MessageContent) -> MessageContent:
    """Evaluate the site's models and send only their scores. At the end of a run, save the models at the site."""
    client = SiteClient(site, request)
    when, name, phases = client.when, client.name, client.engine.method.phases
    delivery = client.receive("delivery", replace(when, phase=phases[0]))
    client.load_state((when.t + 1) * len(phases))
    finetune = request.read("finetune", Finetune | None)  # type: ignore[arg-type]
    evaluation = client.engine.evaluate_models({name: delivery}, when, finetune)[name]
    spent = client.save_ledger()
    if when.t + 1 == when.total:
        folder, data = folder_of(client.private.folder, name), client.engine.clients[name]
        for note in save_models(folder, site.experiment, client.engine.task, data, evaluation.value):
            log.warning(note)
    return MessageContent.of(scores=evaluation.value.scores, seconds=evaluation.seconds, spent=spent)


class SiteClient:
    """The site as a client of one run: its engine with the site's data, and its private state."""

    def __init__(self, site: Site, request: MessageContent) -> None:
        self.site, self.request, self.name = site, request, site.settings.name
        self.run, self.when = request.read("run", str), request.read("when", Round)
        torch.set_num_threads(site.experiment.settings.engine.threads)
        task, self.archs = site.task()
        self.private = PrivateState(site.state, self.run)
        root, data = Key(site.experiment.settings.seed), {self.name: client_data(site)}
        # The server knows the seed of the experiment and may ask twice, so every message gets fresh noise.
        policies = privacy_budget.policies(site.experiment, privacy_budget.drawn_secret())
        update_bn = site.experiment.settings.models.update_bn
        self.engine = InProcessEngine(site.experiment.method, task, data, root, policies=policies, update_bn=update_bn)
        self.engine.states.ledgers[self.name] = self.private.spent()
        self.types = MessageTypes.of(site.experiment.method)

    def receive(self, name: str, when: Round) -> Any:
        """Read, check and log the server's message."""
        value = self.request.read(name, self.types.down, self.archs)
        check_sent(self.engine.method, self.engine.task, value, when)
        transfer_log.record(self.site.state, "received", "server", self.run, when.t, value)
        return value

    def load_state(self, exchanges: int) -> int:
        """Load the newest private state of at most this many exchanges, and return its version."""
        version, state = self.private.read(self.types.state, self.archs, exchanges)
        self.engine.states.update({} if state is None else {self.name: state})
        return version

    def save_ledger(self) -> Ledger:
        """Save what the run has spent of the site's privacy, and return it."""
        ledger = self.engine.states.ledgers[self.name]
        self.private.save_ledger(ledger)
        return ledger


app = client_app({"query.handshake": handshake, "train": train, "evaluate": evaluate})
