"""More rounds for a run: the models are those of a run that had as many rounds from the start."""

import contextlib
import functools
import json
import shutil

import pytest
import torch
from rich.console import Console

import fedme
from fedme.config.experiment import load
from fedme.core.atomic_files import RunError, read_tensors
from fedme.core.key import Key
from fedme.results import records, summary
from fedme.running import extension, run
from fedme.running.progress import Display

SILENT = functools.partial(Display, Console(quiet=True), quiet=True)
TINY = ["partition.clients=3", "partition.name=iid", "data.limit=90", "data.unlabeled=0", "models.pool=['mlr','dnn-8']"]
TINY += ["models.assign=round-robin", "finetune.epochs=1"]


def do(folder, *settings, preset="digits-fedme"):
    experiment, _ = load(preset, [*TINY, *settings, f"output={folder}"])
    return run.start(experiment, SILENT())


def weights(folder):
    return {path.relative_to(folder): read_tensors(path)[0] for path in sorted(folder.glob("clients/*/*.safetensors"))}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[path].keys() == right[path].keys() and all(torch.equal(left[path][k], right[path][k]) for k in left[path])
        for path in left
    )


class Unplugged(Display):
    """Stops a run when so many rounds are done."""

    def __init__(self, rounds):
        super().__init__(Console(quiet=True), quiet=True)
        self.rounds = rounds

    def advance(self, info=None):
        super().advance(info)
        if self.label == "round" and self.done == self.rounds:
            raise KeyboardInterrupt


@pytest.mark.parametrize("more", [[], ["train.cohort=2", "evaluate_every=2", "train.warmup=1"], ["method.name=fml"]])
def test_an_extended_run_ends_like_one_of_as_many_rounds(tmp_path, more):
    straight = do(tmp_path / "straight", "rounds=5", *more)
    extended = do(tmp_path / "extended", "rounds=2", *more)
    assert run.resume(extended, SILENT(), rounds=5)
    assert same(weights(straight), weights(extended))
    assert summary.config_of(extended)["rounds"] == 5
    left, right = summary.read(straight), summary.read(extended)
    assert left["config"] == right["config"]
    pick = [r for r in left["results"] if r["selection"] == "last round"]
    assert pick == [r for r in right["results"] if r["selection"] == "last round"]
    assert json.loads((extended / "environment.json").read_text())["earlier_rounds"] == [2]
    assert {row["round"] for row in records.read(extended)} == set(range(5))
    assert not run.resume(extended, SILENT())  # finished
    run.resume(extended, SILENT(), rounds=6)  # and again
    assert summary.read(extended)["rounds"] == 6


def test_an_unfinished_run_can_be_extended_too(tmp_path):
    experiment, _ = load("digits-fedme", [*TINY, "rounds=3", f"output={tmp_path / 'cut'}"])
    with pytest.raises(KeyboardInterrupt):
        run.start(experiment, Unplugged(2))
    run.resume(tmp_path / "cut", SILENT(), rounds=5)
    assert same(weights(do(tmp_path / "straight", "rounds=5")), weights(tmp_path / "cut"))


@pytest.mark.parametrize("at", range(4))
def test_a_power_cut_while_extending_loses_nothing(tmp_path, monkeypatch, at):
    straight, folder = do(tmp_path / "straight", "rounds=3"), do(tmp_path / "run", "rounds=2")
    steps = iter(range(100))

    def cut(function):
        def wrapped(*words, **more):
            if next(steps) == at:
                raise KeyboardInterrupt
            return function(*words, **more)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(extension, "write_json", cut(extension.write_json))
        patch.setattr(extension, "write_text", cut(extension.write_text))
        patch.setattr("pathlib.Path.unlink", cut(type(folder).unlink))
        patch.setattr(run, "_run_experiment", lambda *words: None)
        with contextlib.suppress(KeyboardInterrupt):
            run.resume(folder, SILENT(), rounds=3)
    run.resume(folder, SILENT())  # whatever it is, it can be continued
    run.resume(folder, SILENT(), rounds=3)
    assert same(weights(straight), weights(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.lr_schedule=cosine"], "train.lr_schedule = 'cosine' depends on the number of rounds"),
        (["train.lr_schedule=step", "train.lr_decay_at=[0.5]"], "'step' depends on the number of rounds"),
        (["method.name=fml", "method.alpha=[0.9, 0.1]"], "method.alpha changes from the first to the last round"),
        (["models.assign=best-local"], "models.selection_rounds sets a number"),
        (["privacy.epsilon=8.0", "finetune.epochs=0"], "all rounds together spend privacy.epsilon = 8"),
        (["privacy.noise_multiplier=1.0", "privacy.secret=true"], "privacy.secret"),
    ],
)
def test_runs_that_depend_on_the_number_of_rounds_are_refused(tmp_path, settings, message):
    folder = do(tmp_path / "run", "rounds=2", *settings)
    before = weights(folder)
    with pytest.raises(RunError, match="cannot be extended from 2 to 4 rounds") as error:
        run.resume(folder, SILENT(), rounds=4)
    assert message in str(error.value)
    assert same(before, weights(folder))
    assert not run.resume(folder, SILENT())


def test_rounds_never_become_fewer(tmp_path):
    folder = do(tmp_path / "run", "rounds=2")
    with pytest.raises(RunError, match="has 2 rounds, which can only become more, got rounds=1"):
        run.resume(folder, SILENT(), rounds=1)
    assert not run.resume(folder, SILENT(), rounds=2)


def test_private_noise_that_is_given_is_accounted_for_more_rounds(tmp_path):
    settings = ["privacy.noise_multiplier=1.0", "finetune.epochs=0"]
    straight, folder = do(tmp_path / "straight", "rounds=4", *settings), do(tmp_path / "run", "rounds=2", *settings)
    before = summary.read(folder)["privacy"]["epsilon"]
    run.resume(folder, SILENT(), rounds=4)
    after = summary.read(folder)["privacy"]["epsilon"]
    assert after == summary.read(straight)["privacy"]["epsilon"]
    assert all(after[client] > before[client] for client in before)


def test_a_configuration_edited_by_hand_is_still_refused(tmp_path):
    folder = do(tmp_path / "run", "rounds=2")
    (folder / summary.NAME).unlink()
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 4"))
    with pytest.raises(RunError, match="another configuration"):
        run.resume(folder, SILENT())


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] > 0).long()


def clients():
    return [fedme.Client(name, train=samples(40, i), model="dnn-8") for i, name in enumerate("ab")]


def test_in_python_more_rounds_extend_the_run(tmp_path):
    learner = fedme.FedMe(rounds=2, train={"epochs": 1})
    first = learner.fit(clients(), output=tmp_path / "run", quiet=True)
    verdicts = first.verdicts(quiet=True)
    assert verdicts
    learner.rounds = 4
    longer = learner.fit(clients(), output=tmp_path / "run", quiet=True)
    fresh = learner.fit(clients(), output=tmp_path / "fresh" / "run", quiet=True)
    x, _ = samples(9, 9)
    assert torch.equal(longer.model("a", "model").logits(x), fresh.model("a", "model").logits(x))
    assert not (tmp_path / "run" / "verdicts.json").exists()  # those of the shorter run
    assert [v.main for v in longer.verdicts(quiet=True)] == [v.main for v in fresh.verdicts(quiet=True)]
    learner.train = {"epochs": 1, "lr_schedule": "cosine"}
    with pytest.raises(RunError, match="train.lr_schedule is 'constant' there and 'cosine' here"):
        learner.fit(clients(), output=tmp_path / "run", quiet=True)


def test_models_of_the_shorter_run_do_not_stay(tmp_path):
    folder = do(tmp_path / "run", "rounds=2")
    client = next((folder / "clients").iterdir())
    for suffix in ("safetensors", "json"):
        shutil.copy(client / f"model.{suffix}", client / f"local.{suffix}")
    with pytest.raises(KeyboardInterrupt):
        run.resume(folder, Unplugged(3), rounds=4)
    assert not client.exists()
    run.resume(folder, SILENT())
    assert (client / "model.safetensors").exists()
    assert not (client / "local.safetensors").exists()  # `fedme verdict` writes it again
