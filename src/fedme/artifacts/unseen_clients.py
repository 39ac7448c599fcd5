"""A client that was not there during training: what the federation offers it, which of that fits it best, and fine-tuning.

FedMe offers every personal model (or one a cluster); the newcomer takes the one with the smallest loss on its validation part.
HypCluster offers its cluster models, chosen by the training loss as in training; methods with a global model offer that.
Only saved models are read, so a newcomer needs neither the others' samples nor a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedme import networks
from fedme.artifacts import model_cards, saved_models
from fedme.config.experiment import Experiment
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientData, ClientId, Schema
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.metrics import measure
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Computation, evaluate, in_parallel, predict, train
from fedme.core.task_types import TaskType
from fedme.datasets.federated_dataset import federate
from fedme.datasets.partitioners import Natural
from fedme.datasets.preprocessing import Preparation
from fedme.datasets.user_data import Piece, newcomer
from fedme.execution.lockstep import Executor, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import ModelScore
from fedme.learning.objectives import CrossEntropy
from fedme.learning.partial_model import Part, fork
from fedme.results.lineage import Adoption, Lineage

SHARED = "shared"  # where the models of the server are in a run
EPOCHS = 2  # of fine-tuning, where the run had none
NOTHING = {
    "local": "its clients share nothing, so there is nothing to start from; train alone with method 'local'",
    "fedmd": "its clients share outputs on public data, not models; run it again with the newcomer among the clients",
}


@dataclass(frozen=True)
class Offer:
    """A model that a newcomer may start from: the server's, or a client's."""

    name: str
    model: Model
    about: Mapping[str, Any]

    @property
    def lineage(self) -> Lineage | None:
        """Where it comes from, if it is a client's."""
        found = self.about.get("lineage")
        return None if found is None else Lineage(found["origin"], tuple(Adoption(**a) for a in found["adoptions"]))


@dataclass(frozen=True)
class Joined:
    """What a newcomer has: which offer it took, its models ("model", "finetuned"), and how they do."""

    folder: Path
    client: ClientId
    taken: str
    offers: int
    scores: tuple[ModelScore, ...]
    kind: TaskType


def offered(server: Any, task: Task, key: Key) -> dict[str, Model]:
    """What the server itself has for newcomers: a global model, or several; FedMe's server has the personal models only."""
    model, models = getattr(server, "model", None), getattr(server, "models", None)
    if isinstance(model, Model):
        return {"global": model}
    if isinstance(models, tuple) and all(isinstance(each, Model) for each in models):
        return {f"cluster {k}": each for k, each in enumerate(models)}
    if isinstance(server, Part):  # of FML: what is not shared begins afresh
        fresh = Model.init(task.shared, key.at("newcomer"), task.dtype)
        return {"global": fork(task.shared, Part(fresh.params, fresh.buffers), server)}
    return {}


def save_offers(run: Path, server: Any, task: Task, method: str, rounds: int, key: Key) -> None:
    """Keep what the server has for newcomers."""
    for name, model in offered(server, task, key).items():
        about = {"model": name, "stage": "round", "method": method, "rounds": rounds}
        saved_models.save(
            saved_models.folder_of(run, name, SHARED), "model", model, task.schema, list(task.schema.classes), about
        )


def offers(
    run: Path, method: str, per_cluster: bool = False, imports: bool = False, more: Mapping[str, networks.Entry] | None = None
) -> list[Offer]:
    """Everything a newcomer may start from."""
    if method in NOTHING:
        raise RunError(f"{run}: method '{method}' has nothing for newcomers: {NOTHING[method]}")
    folders = sorted((run / SHARED).glob("*/model.json"))
    if not folders and method == "fedme":
        folders = sorted((run / saved_models.CLIENTS).glob("*/model.json"))
    if not folders:
        raise RunError(f"{run}: there are no saved models to start from; a run saves them at its end")
    abouts = {path.parent: saved_models.describe(path.parent) for path in folders}
    if per_cluster:
        abouts = _best_of_clusters(abouts)
    found = []
    for folder, about in abouts.items():
        model, _ = saved_models.read_model(folder, imports=imports, more=more)
        found.append(Offer(about.get("client", about["model"]), model, about))
    return found


def _best_of_clusters(abouts: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Any]:
    """Of every cluster of the last round, the model that does best on its client's validation part; and all of the server's."""
    best: dict[Any, tuple[float, Path]] = {}
    for folder, about in abouts.items():
        lineage = about.get("lineage")
        cluster = folder if lineage is None else lineage.get("cluster")
        loss = about.get("metrics", {}).get("val", {}).get("loss")
        rank = (float("inf") if loss is None else loss, folder)
        best[cluster] = min(best.get(cluster, rank), rank)
    return {folder: abouts[folder] for _, folder in best.values()}


def join(
    run: Path,
    experiment: Experiment,
    client: ClientId,
    piece: Piece,
    *,
    epochs: int | None = None,
    per_cluster: bool = False,
    imports: bool = False,
    more: Mapping[str, networks.Entry] | None = None,
    execute: Executor | None = None,
) -> Joined:
    """Give the newcomer the model that fits it best, fine-tune it, and save both under ``newcomers`` in the run."""
    there = offers(run, experiment.method_name, per_cluster, imports, more)
    if saved_models.folder_of(run, client).exists():
        raise RunError(f"{run}: a client of the run is called '{client}' already; give the newcomer another name")
    about = there[0].about
    schema = saved_models.schema_of(about)
    data = _data(schema, client, piece, experiment)
    tuning = epochs if epochs is not None else experiment.settings.finetune.epochs or EPOCHS
    key = Key(experiment.settings.seed).at("newcomer", client)
    steps = _steps(experiment, there, data, tuning, key, schema.unit)
    taken, models, scores = run_in_lockstep({client: steps}, execute or one_by_one)[client].value
    folder = saved_models.folder_of(run, client, saved_models.NEWCOMERS)
    rounds = experiment.settings.rounds
    lineage = taken.lineage
    if lineage is not None:
        lineage = replace(lineage, adoptions=(*lineage.adoptions, Adoption(rounds - 1, client, taken.name)))
    for name, stage in (("model", "round"), ("finetuned", "finetuned")):
        description = model_cards.about(data, stage, experiment.method_name, rounds, scores, lineage, schema.task_type)
        description |= {"started_from": taken.name}
        saved_models.save(folder, name, models[name], schema, list(schema.classes), description)
    return Joined(folder, client, taken.name, len(there), tuple(scores), schema.task_type)


def _data(schema: Schema, client: ClientId, piece: Piece, experiment: Experiment) -> ClientData:
    """The newcomer's samples, prepared and cut as those of the clients."""
    dataset = newcomer(schema, Preparation.read(schema.preprocessing), client, piece)
    options = replace(experiment.data, unlabeled=0, public=0, limit=None, groups={})
    return federate(dataset, Natural(), options, Key(experiment.settings.seed).at("partition")).clients[client]


def _steps(
    experiment: Experiment, there: Sequence[Offer], data: ClientData, epochs: int, key: Key, unit: Sequence[float]
) -> Computation[tuple[Offer, dict[str, Model], list[ModelScore]]]:
    look = data.train if experiment.method_name == "hypcluster" or not len(data.val) else data.val
    fits = yield from in_parallel([evaluate(offer.model, look) for offer in there])
    best = min(range(len(there)), key=lambda i: (fits[i].loss != fits[i].loss, fits[i].loss, i))
    start = there[best].model
    when = Round(experiment.settings.rounds - 1, experiment.settings.rounds)
    training = experiment.settings.train
    tuned = start
    if epochs:
        optimizer = training.sgd(CrossEntropy(), when)
        trained = yield from train(
            {"own": start}, optimizer, data.train, BatchSchedule(epochs, training.batch), key.at("finetune")
        )
        tuned = trained.models["own"]
    models = {"model": start, "finetuned": tuned}
    scores = []
    for name, stage in (("model", "round"), ("finetuned", "finetuned")):
        for part, split in (("val", data.val), ("test", data.test)):
            if len(split):
                logits = yield from predict(models[name], split)
                scores.append(ModelScore("personal", start.arch.name, stage, part, measure(logits, split.y, unit)))
    return there[best], models, scores
