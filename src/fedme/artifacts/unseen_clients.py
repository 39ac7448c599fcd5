"""Clients that were not there during training: what the federation offers them, which offer fits best, and fine-tuning.

A method says which models it offers (`Method.offers`): a global model, cluster models, or the personal models of its clients.
The unseen client takes the one with the smallest loss on its own samples. Only saved models are read, so it needs neither the
samples of the others nor a checkpoint.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme import networks
from fedme.artifacts import local_models, model_cards, model_choice, outputs as model_outputs, saved_models
from fedme.artifacts.model_pack import PACKED_FROM, PackWriter
from fedme.config.experiment import Experiment
from fedme.core.atomic_files import RunError, together, write_json
from fedme.core.data import ClientData, ClientId, Schema
from fedme.core.key import Key
from fedme.core.method import Method, Round, Task
from fedme.core.metrics import measure
from fedme.core.model import Model
from fedme.core.operations import Computation, evaluate_each, in_parallel, predict, train
from fedme.core.running_statistics import running_statistics
from fedme.core.task_types import TaskType
from fedme.datasets.federated_dataset import federate
from fedme.datasets.partitioners import Natural
from fedme.datasets.preprocessing import Preparation
from fedme.datasets.user_data import ClientSamples, unseen_client_dataset
from fedme.execution.lockstep import Executor, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import ModelScore
from fedme.learning.objectives import CrossEntropy
from fedme.learning.own_statistics import with_better_statistics
from fedme.results.lineage import Adoption, Lineage
from fedme.results.verdicts import Verdict

SHARED = "shared"  # the directory with the server's models in a run
OFFERS = "offers.json"  # in it: the names of all models that are offered
EPOCHS = 2  # of fine-tuning, where the run had none


@dataclass(frozen=True)
class Offer:
    """A model that an unseen client may start from: the server's, or a client's."""

    name: str
    model: Model
    about: Mapping[str, Any]

    @property
    def lineage(self) -> Lineage | None:
        """Where it comes from, if it is a client's."""
        plain = self.about.get("lineage")
        return None if plain is None else Lineage(plain["origin"], tuple(Adoption(**step) for step in plain["adoptions"]))


@dataclass(frozen=True)
class Joined:
    """What an unseen client has got: the offer it took, and how its models do before and after fine-tuning."""

    folder: Path
    client: ClientId
    taken: str
    offers: int
    scores: tuple[ModelScore, ...]
    task_type: TaskType
    choice: model_choice.Choice
    verdict: Verdict | None = None  # without test samples there is none


def save_offers(
    run: Path,
    offers: Mapping[str, Model],
    task: Task,
    experiment: Experiment,
    ancestry: Mapping[ClientId, Lineage],
    saved: Collection[ClientId],
) -> None:
    """Write what the method offers unseen clients. Models of the clients in `saved` are written with those clients' own.

    The saved model of a client may have running statistics of its samples. Those are not offered to others, so the model of the
    server is written as well.
    """
    pack = PackWriter(run / SHARED) if len(offers) >= PACKED_FROM else None
    with together():
        for name, model in offers.items():
            private = experiment.settings.models.update_bn and running_statistics(model.arch)
            if name not in saved or private:
                about: dict[str, Any] = {"model": name, "stage": "round", "method": experiment.method_name}
                about |= {"rounds": experiment.settings.rounds}
                about |= {"lineage": asdict(ancestry[name])} if name in ancestry else {}
                if name in saved:  # its scores, by which the best model of a cluster is chosen
                    about |= {"metrics": saved_models.describe(saved_models.folder_of(run, name))["metrics"]}
                classes = task.members[name].labels if name in task.members else task.schema.classes
                folder = saved_models.folder_of(run, name, SHARED)
                saved_models.save(folder, "model", model, task.schema, list(classes), about, pack)
        if offers:
            (run / SHARED).mkdir(exist_ok=True)
            if pack is not None and pack.clients:
                pack.close()
            write_json(run / SHARED / OFFERS, list(offers))


def load_offers(
    run: Path,
    experiment: Experiment,
    per_cluster: bool = False,
    imports: bool = False,
    more: Mapping[str, networks.Entry] | None = None,
) -> list[Offer]:
    """Every model that an unseen client may start from."""
    method = experiment.method
    if method.nothing_to_offer:
        raise RunError(f"{run}: method '{experiment.method_name}' has nothing for unseen clients: {method.nothing_to_offer}")
    path = run / SHARED / OFFERS
    if not path.exists():
        what = "a run writes them at its end" if type(method).offers is not Method.offers else "its `offers` is not defined"
        raise RunError(f"{run}: method '{experiment.method_name}' offers no saved models to start from; {what}")
    abouts: dict[Path, Any] = {}
    for name in json.loads(path.read_text()):
        at_server = saved_models.folder_of(run, name, SHARED)
        folder = at_server if saved_models.exists(at_server) else saved_models.folder_of(run, name)
        abouts[folder] = saved_models.describe(folder)
    if per_cluster:
        abouts = _best_of_clusters(abouts)
    models = [saved_models.read_model(folder, imports=imports, more=more)[0] for folder in abouts]
    return [
        Offer(about.get("client", about["model"]), model, about) for model, about in zip(models, abouts.values(), strict=True)
    ]


def _best_of_clusters(abouts: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Any]:
    """The best model of every cluster of the last round by validation loss, and all of the server's."""
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
    piece: ClientSamples,
    *,
    epochs: int | None = None,
    per_cluster: bool = False,
    imports: bool = False,
    more: Mapping[str, networks.Entry] | None = None,
    execute: Executor | None = None,
    compare: bool = True,
) -> Joined:
    """Give an unseen client the offer that fits it best, fine-tune it, and save both models under ``newcomers`` in the run.

    With `compare`, the client is also trained alone, with the architectures on offer and for as many rounds as the run had, to
    say whether joining helps it.
    """
    offers = load_offers(run, experiment, per_cluster, imports, more)
    if saved_models.exists(saved_models.folder_of(run, client)):
        raise RunError(f"{run}: the run already has a client called '{client}'; give the new one another name")
    schema = saved_models.schema_of(offers[0].about)
    data = _data(schema, client, piece, experiment)
    tuning = epochs if epochs is not None else experiment.settings.finetune.epochs or EPOCHS
    key = Key(experiment.settings.seed).at("newcomer", client)
    work = _choose_and_tune(experiment, offers, data, tuning, key, schema.unit)
    taken, models, scores, outputs = run_in_lockstep({client: work}, execute or one_by_one)[client].value
    folder = saved_models.folder_of(run, client, saved_models.UNSEEN)
    rounds = experiment.settings.rounds
    lineage = taken.lineage
    if lineage is not None:
        lineage = replace(lineage, adoptions=(*lineage.adoptions, Adoption(rounds - 1, client, taken.name)))
    model_outputs.write(folder, outputs)
    validated, targets = model_outputs.of_split(outputs, "val")
    model_choice.write(folder, model_choice.choose(validated, targets))
    for name, stage in (("model", "round"), ("finetuned", "finetuned")):
        description = model_cards.about(data, stage, experiment.method_name, rounds, scores, lineage, schema.task_type)
        description |= {"started_from": taken.name}
        saved_models.save(folder, name, models[name], schema, list(schema.classes), description)
    verdict = None
    if compare:
        pool = list({offer.model.arch.name: offer.model.arch for offer in [taken, *offers]}.values())
        dtype, update_bn = offers[0].model.dtype, experiment.settings.models.update_bn
        training, local_key = experiment.train, key.at("local")
        local_work = local_models.train_client(data, pool, training, rounds, local_key, dtype, update_bn, schema.unit)
        local = run_in_lockstep({client: local_work}, execute or one_by_one)[client].value
        local_models.save(folder, data, local, schema, schema.classes, rounds)
        verdict = local_models.verdict_of(folder, folder, data, schema) if len(data.test) else None
    choice = model_choice.read(folder)
    assert choice is not None
    return Joined(folder, client, taken.name, len(offers), tuple(scores), schema.task_type, choice, verdict)


def _data(schema: Schema, client: ClientId, piece: ClientSamples, experiment: Experiment) -> ClientData:
    """The samples of the unseen client, preprocessed and split like those of the clients."""
    dataset = unseen_client_dataset(schema, Preparation.read(schema.preprocessing), client, piece)
    options = replace(experiment.data, unlabeled=0, public=0, limit=None, groups={})
    return federate(dataset, Natural(), options, experiment.partition_key).clients[client]


def _choose_and_tune(
    experiment: Experiment, offers: Sequence[Offer], data: ClientData, epochs: int, key: Key, unit: Sequence[float]
) -> Computation[tuple[Offer, dict[str, Model], list[ModelScore], dict[str, Tensor]]]:
    split = data.train if experiment.method.offer_chosen_on == "train" or not len(data.val) else data.val
    update_bn = experiment.settings.models.update_bn
    if update_bn:
        fitted = yield from in_parallel([with_better_statistics(offer.model, data) for offer in offers])
        offers = [replace(offer, model=model) for offer, model in zip(offers, fitted, strict=True)]
    scores_of_offers = yield from evaluate_each([offer.model for offer in offers], split)
    losses = [score.loss for score in scores_of_offers]
    best = min(range(len(offers)), key=lambda i: (losses[i] != losses[i], losses[i], i))
    start = offers[best].model
    when = Round(experiment.settings.rounds - 1, experiment.settings.rounds)
    training = experiment.settings.train
    tuned = start
    if epochs:
        optimizer = training.local_optimizer(CrossEntropy(), when)
        trained = yield from train({"own": start}, optimizer, data.train, training.whole_epochs(epochs), key.at("finetune"))
        tuned = trained.models["own"]
        if update_bn:
            tuned = yield from with_better_statistics(tuned, data)
    models = {"model": start, "finetuned": tuned}
    scores: list[ModelScore] = []
    outputs: dict[str, Tensor] = {}
    for name, stage in (("model", "round"), ("finetuned", "finetuned")):
        for part, split in (("val", data.val), ("test", data.test)):
            if len(split):
                logits = yield from predict(models[name], split)
                outputs |= {f"{part}/{name}": logits, f"{part}/targets": split.y}
                scores.append(ModelScore("personal", start.arch.name, stage, part, measure(logits, split.y, unit)))
    return offers[best], models, scores, outputs
