"""The best that every client could do alone: its architecture, its rounds, and that it is trained once for the same samples."""

import json

import pytest
import torch

import fedme
from fedme.artifacts import saved_models
from fedme.artifacts.local_models import constant_outputs
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.task_types import task_type_of
from fedme.results import verdicts
from fedme.running import assembly, local_baseline
from fedme.running.local_training_name import FOLDER, local_training_name


def samples(count, seed):
    """Classes that no linear model can tell apart."""
    x = torch.randn(count, 2, generator=Key(seed).torch())
    return x, (x[:, 0] * x[:, 1] > 0).long()


def clients():
    return [fedme.Client(f"site-{i}", train=samples(160, i)) for i in range(3)]


SETTINGS = {"rounds": 8, "train": {"epochs": 10, "lr": 0.1, "momentum": 0.9}}
POOL = {"pool": ["mlr", "dnn-16"], "assign": "mlr"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for name, learner in (("fedavg", fedme.FedAvg), ("fedme", fedme.FedMe)):
        made[name] = learner(**SETTINGS, models=POOL).fit(clients(), output=folder / name, quiet=True)
        made[name].verdicts(quiet=True)
    return folder, made


def test_the_best_architecture_of_the_pool_not_the_first(runs):
    """The federation's mlr cannot learn this task; alone, every client finds the dnn, and joining hurts."""
    _, made = runs
    for verdict in made["fedavg"].verdicts(quiet=True):
        assert (verdict.arch, verdict.local_arch) == ("mlr", "dnn-16")
        assert verdict.local > verdict.value
    table = made["fedavg"].rows(quiet=True)
    assert {row["local model"] for row in table} == {"dnn-16"}
    assert {row["chosen"] for row in table} == {"local"}  # clearly better on validation samples, too
    assert made["fedavg"]["site-0"].name == "local"
    assert verdicts.alarms(made["fedavg"].verdicts(quiet=True))


def test_it_is_trained_once_for_the_same_samples(runs):
    folder, made = runs
    assert len(list((folder / FOLDER).iterdir())) == 1  # both methods share it
    ours, theirs = ({v.client: v.local for v in made[name].verdicts(quiet=True)} for name in made)
    assert ours == theirs


def test_other_samples_or_settings_are_other_baselines(runs):
    _, made = runs
    experiment = made["fedavg"].experiment
    federation = assembly.gather(experiment)
    candidates = assembly.candidates(experiment, federation)
    rounds = dict.fromkeys(federation.clients, 8)

    def name_of(experiment, rounds):
        return local_training_name(experiment, federation, candidates, rounds, experiment.train)

    name = name_of(experiment, rounds)
    assert name == name_of(made["fedme"].experiment, rounds)
    assert name != name_of(experiment, rounds | {"site-0": 7})
    changed = fedme.FedAvg(**SETTINGS | {"seed": 1}, models=POOL).experiment(clients())
    assert name != name_of(changed, rounds)
    others = assembly.gather(fedme.FedAvg(**SETTINGS, models=POOL).experiment(clients()[::-1]))
    federation.clients["site-0"].train.source.x[0] += 1
    assert name != name_of(experiment, rounds)
    federation.clients["site-0"].train.source.x[0] -= 1
    assert others is not federation


def test_every_client_starts_with_its_own_architecture():
    given = [fedme.Client("a", train=samples(40, 1), model="dnn-8"), fedme.Client("b", train=samples(40, 2), model="mlr")]
    experiment = fedme.FedMe(rounds=1).experiment(given)
    found = assembly.candidates(experiment, assembly.gather(experiment))
    assert {client: [arch.name for arch in archs] for client, archs in found.items()} == {
        "a": ["dnn-8", "mlr"],
        "b": ["mlr", "dnn-8"],
    }


def test_a_client_trains_alone_for_as_many_rounds_as_it_took_part_in(tmp_path):
    result = fedme.FedAvg(rounds=6, train={"epochs": 1, "cohort": 1}).fit(clients(), output=tmp_path / "run", quiet=True)
    rounds = local_baseline.rounds_of_clients(result.folder, result.experiment, result)
    trained = [row["client"] for row in fedme_records(result) if row["stage"] == "training"]
    counts = {client: trained.count(client) for client in result}
    assert sum(counts.values()) == 6
    assert rounds == {client: count or max(counts.values()) for client, count in counts.items()}
    result.verdicts(quiet=True)
    (cache,) = (tmp_path / FOLDER).iterdir()
    for client in result:
        assert saved_models.describe(saved_models.folder_of(cache, client), "local")["rounds"] == rounds[client]


def fedme_records(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("targets", "answer"),
    [
        (torch.tensor([1, 1, 0]), [0, 1, 0]),
        (torch.tensor([[True, False], [True, False], [False, True]]), [1 / 6, -1 / 6]),
        (torch.tensor([[1.0], [2.0], [6.0]]), [3.0]),
    ],
)
def test_the_constant_answer(targets, answer):
    width = 3 if targets.dim() == 1 else targets.shape[1]
    outputs = constant_outputs(targets, 4, width, task_type_of(targets))
    assert outputs.shape == (4, len(answer))
    assert outputs[2].tolist() == pytest.approx(answer)


def test_what_cannot_be_judged(tmp_path):
    result = fedme.Local(rounds=1).fit(clients(), output=tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match="the clients trained alone, so there is nothing to compare with"):
        result.verdicts(quiet=True)
    assert "local" not in result.rows(quiet=True)[0]
