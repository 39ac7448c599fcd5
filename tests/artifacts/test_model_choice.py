"""The model that a client uses is chosen on its validation part: its own unless another is clearly better."""

import json
import math

import pytest
import torch

import fedme
from fedme.artifacts import model_choice, outputs as model_outputs
from fedme.artifacts.model_choice import choose
from fedme.core.atomic_files import RunError
from fedme.core.key import Key


def answers(right, samples=100):
    """Outputs of a model that is right on the first `right` of the samples, whose class is 0."""
    wrong = torch.arange(samples) >= right
    return torch.stack((~wrong, wrong), 1).double()


LABELS = torch.zeros(100, dtype=torch.int64)


def test_another_model_must_be_better_by_a_standard_error():
    slightly = choose({"model": answers(80), "finetuned": answers(81)}, LABELS)
    assert slightly.name == "model"
    assert "is not better by one standard error" in slightly.why
    assert slightly.candidates["finetuned"].difference == pytest.approx(0.01)
    assert slightly.candidates["finetuned"].error == pytest.approx(0.01)  # one of a hundred: difference = error
    clearly = choose({"model": answers(80), "finetuned": answers(84), "global": answers(90)}, LABELS)
    assert clearly.name == "global"
    assert clearly.why == "better than the own model on the validation part by 10.0 points (standard error 3.0)"


def test_without_validation_samples_the_own_model_stays():
    assert choose({}, None).name == "model"
    assert choose({"model": answers(0, 1), "finetuned": answers(1, 1)}, LABELS[:1]).name == "model"
    assert choose({"model": answers(50)}, LABELS).why == "there is no other"


def test_numbers_and_several_labels():
    y = torch.linspace(-1, 1, 50).double()[:, None]
    assert choose({"model": y + 0.5, "finetuned": y + 0.1}, y).name == "finetuned"
    assert choose({"model": y + 0.1, "finetuned": y + 0.5}, y).name == "model"
    labels = torch.rand(50, 3, generator=Key(0).torch()) > 0.5
    exact = torch.where(labels, 1.0, -1.0)
    assert choose({"model": -exact, "global": exact}, labels).name == "global"


def test_a_model_that_diverged_is_never_chosen_and_never_kept():
    y = torch.linspace(-1, 1, 50).double()[:, None]
    for broken in (y * math.nan, y + math.inf):
        assert choose({"model": y + 9, "finetuned": broken}, y).name == "model"
        assert choose({"model": broken, "finetuned": y + 9}, y).name == "finetuned"
    labels = torch.zeros(50, dtype=torch.int64)
    assert choose({"model": answers(10, 50), "finetuned": answers(50, 50) * math.nan}, labels).name == "model"


@pytest.mark.parametrize("size", [1e20, 1e200, math.nan])
def test_of_several_models_the_best_is_chosen_however_bad_the_own_one_is(size):
    y = torch.linspace(-1, 1, 50).double()[:, None]
    broken = y + size * (1 + y.abs())
    chosen = choose({"model": broken, "best": y + 20, "local": y + 0.1}, y)
    assert set(chosen.candidates) == {"best", "local"}
    assert chosen.name == "local"


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    clients = [fedme.Client(f"site-{i}", train=samples(80, i)) for i in range(2)]
    learner = fedme.FML(rounds=2, train={"epochs": 1, "lr": 0.01}, finetune={"epochs": 5})
    return learner.fit(clients, output=tmp_path_factory.mktemp("runs") / "one", quiet=True)


def test_what_is_saved_is_what_was_chosen(result):
    for client in result:
        model = result[client]
        outputs = model_outputs.read(model.folder)
        validated, targets = model_outputs.of_split(outputs, "val")
        assert set(validated) == {"model", "finetuned", "global"}
        assert model.name == choose(validated, targets).name == model_choice.chosen(model.folder)
        assert (model.folder / "global.json").exists() == (model.name == "global")
        assert torch.equal(fedme.load_model(model.folder)(samples(5, 9)[0]), model._network(samples(5, 9)[0]))
        tested, labels = model_outputs.of_split(outputs, "test")
        recorded = result.model(client, "model").about["metrics"]["test"]["accuracy"]
        assert (tested["model"].argmax(1) == labels).double().mean().item() == pytest.approx(recorded)


def test_the_test_part_never_chooses(result):
    """Other test samples, the same choice."""
    outputs = model_outputs.read(result["site-0"].folder)
    validated, targets = model_outputs.of_split(outputs, "val")
    before = choose(validated, targets)
    changed = {name: -value if name.startswith("test/") and "targets" not in name else value for name, value in outputs.items()}
    assert choose(*model_outputs.of_split(changed, "val")) == before


def test_a_damaged_choice_is_reported(result, tmp_path):
    path = tmp_path / model_choice.NAME
    path.write_text(json.dumps({"name": "../elsewhere", "why": "", "candidates": {}}))
    with pytest.raises(RunError, match="choice.json: cannot be read: unknown model"):
        model_choice.read(tmp_path)
    assert model_choice.chosen(tmp_path / "nothing") == "model"
