"""What a finished run lets others see of every client, and how much of its training samples that gives away.

The server sees a client's replies: one more round is played from where the run ended, and thrown away. The other clients see
what the server hands out. In both cases members are the client's training samples, and the others its test samples, which
nobody trained on.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedme.auditing.membership_inference import Scores, confidence, evaluate_attack
from fedme.auditing.shadow_models import shadow_scores
from fedme.config.experiment import Experiment
from fedme.config.named_code import load_saved
from fedme.core.atomic_files import RunError, locked, write_json
from fedme.core.data import ClientData, ClientId, Split
from fedme.core.key import Key
from fedme.core.method import Plan, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, in_parallel, predict
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import ClientStates
from fedme.results import summary
from fedme.running import assembly, checkpoint, privacy_budget
from fedme.running.progress import Display
from fedme.running.weight_store import Store

NAME = "audit.json"
EVERYBODY = "all clients"


@dataclass(frozen=True)
class ExposedModel:
    """A model of a client in others' hands."""

    client: ClientId
    by: str  # "server" or "clients"
    name: str  # what the message calls it
    model: Model


def audit(folder: Path, display: Display, shadows: int, imports: bool = False) -> dict[str, Any]:
    """Attack what a finished run shares; the result is also kept in the run directory.

    Code that the run names is imported only with `imports`.
    """
    summary.read(folder)  # finished
    experiment = load_saved(folder / summary.CONFIG, imports)
    if experiment.method.nothing_to_audit:
        raise RunError(f"{folder}: {experiment.method.nothing_to_audit}")
    if experiment.data_name in ("sites", "given"):
        raise RunError(f"{folder}: the samples are not here; only runs whose data can be loaded again are audited")
    with locked(folder), ExitStack() as cleanup:
        store = Store(folder, int(experiment.settings.engine.memory * 2**30))
        cleanup.callback(store.close)
        execute = assembly.executor(experiment.settings.engine, display.tick, store.wait)
        cleanup.callback(execute.close)
        display.note(f"loading {experiment.data_name} ...")
        saved = checkpoint.load(folder, experiment.plain())
        if saved is None:
            raise RunError(f"{folder}: its checkpoint is gone, and with it what the server had")
        prepared = assembly.prepare(experiment, assembly.gather(experiment), execute, saved.header.assigned)
        at = checkpoint.states(folder, store, saved, experiment.method, prepared.archs, prepared.task.resolve)
        clients = {c: data for c, data in prepared.federation.clients.items() if len(data.train) and len(data.test)}
        policies = privacy_budget.policies(experiment, limited=False)
        key = Key(experiment.settings.seed).at("audit")
        states, update_bn = ClientStates(at.clients, at.header.spent), experiment.settings.models.update_bn
        engine = InProcessEngine(
            experiment.method, prepared.task, prepared.federation.clients, key, execute, policies, states, update_bn
        )
        display.start("one more round, and attacks: tasks", 0)
        exposed = [e for e in _exposed_models(experiment, engine, at.server, key) if e.client in clients]
        if not exposed:
            raise RunError(f"{folder}: its clients share no whole model, so there is none that could be asked about samples")
        result = {
            "shadows": shadows,
            "rows": engine.run_on_server(_rows(exposed, clients, prepared.task, experiment, shadows, key)).value,
        }
    write_json(folder / NAME, result)
    return result


def _exposed_models(experiment: Experiment, engine: InProcessEngine, server: Any, key: Key) -> Iterator[ExposedModel]:
    method, task, rounds = experiment.method, engine.task, experiment.settings.rounds
    when = Round(rounds - 1, rounds, method.phases[0])
    downs = engine.run_on_server(method.dispatch(task, server, Plan.all(list(task.members)), when, key)).value
    answers = engine.exchange(downs, when)
    for client in downs:
        for name, model in method.visible_models(answers[client].up, task):
            yield ExposedModel(client, "server", name, model)
    for client in task.members:
        for name, model in method.visible_models(method.deliver(task, server, client), task):
            yield ExposedModel(client, "clients", name, model)


def _rows(
    exposed: list[ExposedModel],
    clients: Mapping[ClientId, ClientData],
    task: Task,
    experiment: Experiment,
    shadows: int,
    key: Key,
) -> Computation[list[dict[str, Any]]]:
    pool, places = _pool(clients)
    models = {id(e.model): e.model for e in exposed}
    wanted = [
        (model, client) for client in clients for model in dict.fromkeys(id(s.model) for s in exposed if s.client == client)
    ]

    def scores(model: Model, client: ClientId) -> Computation[tuple[Scores, Scores]]:
        train, test = clients[client].train, clients[client].test
        both = yield from in_parallel([predict(model, train), predict(model, test)])
        return confidence(both[0], train.y), confidence(both[1], test.y)

    asked = yield from in_parallel([scores(models[model], client) for model, client in wanted])
    answers = dict(zip(wanted, asked, strict=True))
    difficulty: dict[str, Scores] = {}
    if pool is not None:
        archs = {model.arch.name: model.arch for model in models.values()}
        work = [shadow_scores(arch, pool, shadows, experiment.train, task.dtype, key.at("shadows")) for arch in archs.values()]
        difficulty = dict(zip(archs, (yield from in_parallel(work)), strict=True))
    rows = []
    groups: dict[tuple[str, str, str], list[tuple[Scores, Scores]]] = {}
    for exposure in exposed:
        raw = answers[id(exposure.model), exposure.client]
        attacks = {"loss": raw}
        if pool is not None:
            hard = difficulty[exposure.model.arch.name]
            attacks["calibrated"] = (raw[0] - hard[places[exposure.client][0]], raw[1] - hard[places[exposure.client][1]])
        for attack, pair in attacks.items():
            about = {"client": exposure.client, "seen by": exposure.by, "model": exposure.name}
            about |= {"arch": exposure.model.arch.name}
            rows.append(about | {"attack": attack} | asdict(evaluate_attack(*pair)))
            groups.setdefault((exposure.by, exposure.name, attack), []).append(pair)
    for (by, name, attack), pairs in groups.items():
        members, others = (np.concatenate(part) for part in zip(*pairs, strict=True))
        about = {"client": EVERYBODY, "seen by": by, "model": name, "arch": "", "attack": attack}
        rows.append(about | asdict(evaluate_attack(members, others)))
    return rows


def _pool(clients: Mapping[ClientId, ClientData]) -> tuple[Split | None, dict[ClientId, tuple[Any, Any]]]:
    """Everybody's training and test samples, and where each client's are among them; None if labels mean different things."""
    splits = [split for data in clients.values() for split in (data.train, data.test)]
    if any(split.targets is not None or split.source is not splits[0].source for split in splits):
        return None, {}
    rows = torch.cat([split.rows for split in splits])
    ends = np.cumsum([0, *map(len, splits)])
    parts = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    return Split(splits[0].source, rows), dict(zip(clients, zip(parts[::2], parts[1::2], strict=True), strict=True))
