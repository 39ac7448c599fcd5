"""A site's message handlers: handshake, training, evaluation. Personal models and private state stay at the site."""

import functools
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedme import networks
from fedme.artifacts.saved_models import folder_of
from fedme.config.experiment import ConfigError
from fedme.core.foreign_text import one_line
from fedme.core.key import Key
from fedme.core.method import Round, TaskError
from fedme.core.model import models_in
from fedme.core.typed import TypedError
from fedme.deployment import transfer_log
from fedme.deployment.handshake import create_handshake
from fedme.deployment.privacy_account import require_budget
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site, require_member
from fedme.deployment.site_state import RUN, PrivateState, exchanges_before
from fedme.federation.client_work import Finetune
from fedme.federation.flower.flower_apps import Handler, client_app
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import MessageTypes, check_sent
from fedme.federation.round import Reply
from fedme.learning.accountant import Ledger, difference
from fedme.running import privacy_budget
from fedme.running.best_round import better
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
        site = None
        try:
            site = Site.read(Path(str(node_config["site"])))
            require_member(site)
            return work(site, request)
        except Exception as error:
            # An error may quote the server: neither the site's log nor that of Flower's programs gets its control characters.
            lines = "".join(traceback.format_exception(error)).splitlines()
            log.error("a request failed\n%s", "\n".join(f"  {one_line(line)}" for line in lines))
            public = isinstance(error, PUBLIC_ERRORS)
            text = one_line(str(error)) if public else f"{type(error).__name__} (see the site's log)"
            if site is not None:
                _record_error(site, request, text)
            raise SiteError(text) from None

    return handle


def _record_error(site: Site, request: MessageContent, text: str) -> None:
    """Log an error that is sent to the server."""
    run = request.body.get("run")
    shown = run if isinstance(run, str) and RUN.fullmatch(run) else ""
    try:
        transfer_log.record(site.records, "sent", "server", shown, None, None, {"error": text})
    except OSError:
        log.exception("the error cannot be logged")


@handler
def handshake(site: Site, request: MessageContent) -> MessageContent:
    """Describe this site to the server, if both agree on the experiment."""
    run, config = request.read("run", str), request.read("config", dict[str, Any])
    _, archs = site.task()
    data = client_data(site)
    privacy_budget.require_private_training(site.experiment, archs.values(), [data])
    description = create_handshake(site, run, config, data)
    require_budget(site, run, data)
    transfer_log.record(site.records, "sent", "server", run, None, description)
    return MessageContent.of(handshake=description)


@handler
def train(site: Site, request: MessageContent) -> MessageContent:
    """Take part in one exchange of a round."""
    client = SiteClient(site, request)
    when, name = client.when, client.name
    down = client.receive("down", when)
    before = exchanges_before(client.engine.method.phases, when)
    version = client.load_state(before)
    reply = client.engine.exchange({name: down}, when)[name]
    require_allowed_to_leave(site, reply.up)
    spent = client.charge("round")
    client.private.write(before + 1, client.engine.states[name])
    if not site.settings.tell.samples:
        reply, spent = without_samples(reply), ()
    also = {"losses": len(reply.report.losses), "scores": len(reply.report.scores), **reply.report.notes}
    transfer_log.record(site.records, "sent", "server", client.run, when.t, reply.up, also)
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
    require_agreed_finetuning(site, finetune)
    evaluation = client.engine.evaluate_models({name: delivery}, when, finetune)[name]
    spent = client.charge("evaluation")
    before = client.private.read_best(client.archs)
    best = better(before, evaluation.value, when.t)
    if best is not None and best is not before:
        client.private.write_best(best)
    if when.t + 1 == when.total:
        folder, data = folder_of(client.private.folder, name), client.engine.clients[name]
        for note in save_models(folder, site.experiment, client.engine.task, data, evaluation.value, best=best):
            log.warning(note)
    # Numbers of correct answers, accuracies and the rate of batches would tell the number of samples.
    scores, spent = (list(evaluation.value.scores), spent) if site.settings.tell.samples else ([], ())
    transfer_log.record(site.records, "sent", "server", client.run, when.t, None, {"scores": len(scores)})
    return MessageContent.of(scores=scores, seconds=evaluation.seconds, spent=spent)


class SiteClient:
    """The site as a client of one run: its engine with the site's data, and its private state."""

    def __init__(self, site: Site, request: MessageContent) -> None:
        self.site, self.request, self.name = site, request, site.settings.name
        self.run, self.when = request.read("run", str), request.read("when", Round)
        require_agreed_round(site, self.when)
        torch.set_num_threads(site.experiment.settings.engine.threads)
        task, self.archs = site.task()
        self.private = PrivateState(site.state, self.run)
        root, data = Key(site.experiment.settings.seed), {self.name: client_data(site)}
        self.account = require_budget(site, self.run, data[self.name])
        self.spent_before = self.account.ledger(self.run)
        # The server knows the seed of the experiment and may ask twice, so every message gets fresh noise.
        policies = privacy_budget.policies(site.experiment, privacy_budget.drawn_secret())
        update_bn = site.experiment.settings.models.update_bn
        self.engine = InProcessEngine(site.experiment.method, task, data, root, policies=policies, update_bn=update_bn)
        self.engine.states.ledgers[self.name] = self.spent_before
        self.types = MessageTypes.of(site.experiment.method)

    def receive(self, name: str, when: Round) -> Any:
        """Read, check and log the server's message."""
        value = self.request.read(name, self.types.down, self.archs)
        check_sent(self.engine.method, self.engine.task, value, when)
        transfer_log.record(self.site.records, "received", "server", self.run, when.t, value)
        return value

    def load_state(self, exchanges: int) -> int:
        """Load the newest private state of at most this many exchanges, and return its version."""
        version, state = self.private.read(self.types.state, self.archs, exchanges)
        self.engine.states.update({} if state is None else {self.name: state})
        return version

    def charge(self, work: str) -> Ledger:
        """Charge the site's account with what this message cost, before anything leaves. Returns what the run has spent."""
        ledger = self.engine.states.ledgers[self.name]
        self.account.charge(self.run, self.when.t, work, difference(ledger, self.spent_before))
        return ledger


def require_allowed_to_leave(site: Site, up: Any) -> None:
    """Refuse to send a model of an architecture that the site does not let leave."""
    allowed = site.settings.lend.architectures
    if unwanted := [model.arch.name for _, model in models_in(up) if allowed != "all" and model.arch.name not in allowed]:
        raise TaskError(f"this site lets no model of architecture '{unwanted[0]}' leave (lend.architectures)")


def without_samples(reply: Reply) -> Reply:
    """The reply without the site's number of samples, and without scores, which would tell it."""
    up = replace(reply.up, samples=1) if hasattr(reply.up, "samples") else reply.up
    return replace(reply, up=up, report=replace(reply.report, scores={}))


def require_agreed_round(site: Site, when: Round) -> None:
    """Refuse a request for a round that the agreed experiment does not have."""
    rounds = site.experiment.settings.rounds
    if when.total != rounds or not 0 <= when.t < rounds:
        raise TypedError(
            "when", f"this site agreed to {rounds} rounds, counted from 0, but is asked for {when.t} of {when.total}"
        )


def require_agreed_finetuning(site: Site, finetune: Finetune | None) -> None:
    """Refuse fine-tuning that the agreed experiment does not ask for."""
    settings = site.experiment.settings
    allowed = Finetune(settings.train, settings.finetune.epochs) if settings.finetune.epochs else None
    if finetune is not None and finetune != allowed:
        raise TypedError("finetune", "the site did not agree to this fine-tuning; the experiment's is in its table [finetune]")


app = client_app({"query.handshake": handshake, "train": train, "evaluate": evaluate})
