"""What a site does when a message arrives: say hello, take part in a round, score its models. Personal models stay here."""

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
from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import Round, Task, TaskError
from fedme.core.model import Arch
from fedme.core.typed import TypedError
from fedme.deployment import transfer_log
from fedme.deployment.handshake import introduce
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site
from fedme.deployment.site_state import PrivateState, exchanges
from fedme.federation.client_work import Finetune
from fedme.federation.flower.flower_apps import client_app
from fedme.federation.flower.message_content import Envelope
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import Kinds, check_sent
from fedme.learning.accountant import Ledger
from fedme.running import privacy_budget
from fedme.running.round_loop import save_models

SPOKEN = (
    TypedError,
    TaskError,
    ConfigError,
    networks.ArchError,
)  # errors about the federation; others may tell of data or paths
log = logging.getLogger("fedme.site")


class SiteError(RuntimeError):
    """What the server is told of an error at a site."""


def discreet(work: Callable[[Site, Envelope], Envelope]) -> Callable[[Envelope, Mapping[str, Any]], Envelope]:
    """The same for Flower, with errors that say to the server no more than it may know; the site's log has the rest."""

    @functools.wraps(work)
    def answered(ask: Envelope, node_config: Mapping[str, Any]) -> Envelope:
        try:
            return work(Site.read(Path(str(node_config["site"]))), ask)
        except Exception as error:
            log.exception("a message could not be answered")
            spoken = str(error) if isinstance(error, SPOKEN) else f"{type(error).__name__} (the site's own log says more)"
            raise SiteError(spoken) from None

    return answered


@discreet
def hello(site: Site, ask: Envelope) -> Envelope:
    """Who this site is, if both agree on the experiment."""
    run, config = ask.read("run", str), ask.read("config", dict[str, Any])
    _, archs = site.task()  # an architecture that cannot be built is said now
    data = client_data(site)
    privacy_budget.require_private_training(site.experiment, archs.values(), [data])
    return Envelope.of(hello=introduce(site, run, config, data))


@discreet
def train(site: Site, ask: Envelope) -> Envelope:
    """One exchange of a round."""
    desk = Desk(site, ask)
    down = ask.read("down", desk.kinds.down, desk.archs)
    check_sent(site.experiment.method, desk.task, down, desk.when)
    transfer_log.note(site.state, "received", "server", desk.run, desk.when.t, down)
    before = exchanges(desk.engine.method.phases, desk.when)
    version = desk.take_state(before)
    answer = desk.engine.exchange({desk.me: down}, desk.when)[desk.me]
    spent = desk.spend()
    desk.private.write(before + 1, desk.engine.states[desk.me])
    transfer_log.note(site.state, "sent", "server", desk.run, desk.when.t, answer.up)
    told = {"when": desk.when, "before": version, "after": before + 1}
    return Envelope.of(up=answer.up, report=answer.report, seconds=answer.seconds, spent=spent, **told)


@discreet
def evaluate(site: Site, ask: Envelope) -> Envelope:
    """Score the site's models; at the end they are saved here. Only scores are sent."""
    desk = Desk(site, ask)
    delivery = ask.read("delivery", desk.kinds.down, desk.archs)
    check_sent(site.experiment.method, desk.task, delivery, replace(desk.when, phase=site.experiment.method.phases[0]))
    transfer_log.note(site.state, "received", "server", desk.run, desk.when.t, delivery)
    desk.take_state((desk.when.t + 1) * len(desk.engine.method.phases))
    done = desk.engine.evaluate_models({desk.me: delivery}, desk.when, ask.read("finetune", Finetune | None))[desk.me]  # type: ignore[arg-type]
    spent = desk.spend()
    if desk.when.t + 1 == desk.when.total:
        folder, data = folder_of(desk.private.folder, desk.me), desk.engine.clients[desk.me]
        for note in save_models(folder, site.experiment, desk.task, data, done.value):
            log.warning(note)
    return Envelope.of(scores=done.value.scores, seconds=done.seconds, spent=spent)


class Desk:
    """What is needed for one message: the experiment as this site has it, its data, and its private state."""

    def __init__(self, site: Site, ask: Envelope) -> None:
        self.me, self.run, self.when = site.settings.name, ask.read("run", str), ask.read("when", Round)
        torch.set_num_threads(site.experiment.settings.engine.threads)
        self.task: Task
        self.archs: dict[str, Arch]
        self.task, self.archs = site.task()
        self.private = PrivateState(site.state, self.run)
        data: ClientData = client_data(site)
        root = Key(site.experiment.settings.seed)
        # The server knows the seed of the experiment, and may ask twice: noise is drawn anew for every message.
        policies = privacy_budget.policies(site.experiment, privacy_budget.drawn_secret())
        self.engine = InProcessEngine(site.experiment.method, self.task, {self.me: data}, root, policies=policies)
        self.engine.states.ledgers[self.me] = self.private.spent()
        self.kinds = Kinds.of(site.experiment.method)

    def take_state(self, until: int) -> int:
        """Go on from the newest private state that has seen at most `until` exchanges; its version."""
        version, state = self.private.read(self.kinds.state, self.archs, until)
        self.engine.states.update({} if state is None else {self.me: state})
        return version

    def spend(self) -> Ledger:
        """Write down what the message has cost of the site's privacy; all that the run has used."""
        ledger = self.engine.states.ledgers[self.me]
        self.private.spend(ledger)
        return ledger


app = client_app(hello, train, evaluate)
