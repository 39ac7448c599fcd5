"""Whole runs: what is in the directory, that seeds decide everything, and that nothing is lost when a run is stopped."""

import io
import json
import pydoc
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from fedme.experiment import checkpoint, records, run, saved, summary
from fedme.experiment.config import load
from fedme.experiment.files import RunError, locked, read_tensors, write_json
from fedme.experiment.progress import Display
from fedme.methods import METHODS

TINY = [
    "rounds=3",
    "partition.name=iid",
    "partition.clients=4",
    "data.limit=120",
    "data.unlabeled=20",
    "data.public=20",
    "models.pool=['mlr','dnn-8']",
    "models.assign=round-robin",
    "train.batch=16",
    "engine.threads=1",
]


class Killed(BaseException):
    """As good as a power cut."""


class Watching(Display):
    """A display that can pull the plug after so many operations."""

    def __init__(self, fuse=None):
        super().__init__(Console(file=io.StringIO()), quiet=True)
        self.fuse = fuse

    def tick(self):
        super().tick()
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                raise Killed


def do(folder, *words, fuse=None):
    experiment, _ = load("digits-fedme", [*TINY, *words, f"output={folder}"])
    return run.start(experiment, Watching(fuse))


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in records.read(folder)]


def models(folder):
    found = {}
    for path in sorted(folder.glob("clients/*/*.safetensors")):
        tensors, _ = read_tensors(path)
        found.update({f"{path.parent.name}/{path.name}/{name}": tensor for name, tensor in tensors.items()})
    return found


def identical(a, b):
    first, second = models(a), models(b)
    return (
        timeless(a) == timeless(b)
        and first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
        and all(path.read_bytes() == (b / path.relative_to(a)).read_bytes() for path in a.glob("clients/*/*.safetensors"))
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return do(tmp_path_factory.mktemp("run") / "fedme")


def test_what_is_in_a_run_directory(finished):
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoint.json",
        "weights",
        "clients",
    } <= names
    assert sorted(path.name for path in (finished / "clients").iterdir()) == ["0", "1", "2", "3"]
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])


def test_rows_say_what_they_are(finished):
    rows = list(records.read(finished))
    final = [r for r in rows if r["round"] == 2 and r["client"] == "1"]
    kinds = {(r["model"], r["split"], r["stage"]) for r in final}
    assert kinds == {
        ("own", "train", "training"),
        ("guest", "train", "training"),
        ("own", "val", "trained"),
        ("guest", "val", "trained"),
        ("personal", "val", "round"),
        ("personal", "test", "round"),
        ("personal", "val", "finetuned"),
        ("personal", "test", "finetuned"),
    }
    test = next(r for r in final if (r["split"], r["stage"]) == ("test", "round"))
    for key in ("loss", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece", "samples", "correct", "classes_present"):
        assert test[key] is not None
    assert test["bytes_up"] > 0
    assert test["bytes_down"] > 0
    assert test["client_seconds"] > 0
    assert test["server_seconds"] > 0
    assert test["arch"] in ("mlr", "dnn-8")
    notes = next(r["notes"] for r in final if "notes" in r)
    assert notes["lender"] in "023"


def test_summary_says_which_round_and_over_what(finished):
    result = summary.read(finished)
    rows = [r for r in records.read(finished) if r["stage"] == "round" and r["split"] == "test" and r["round"] == 2]
    found = next(
        r
        for r in result["results"]
        if (r["model"], r["stage"], r["split"], r["selection"]) == ("personal", "round", "test", "last round")
    )
    assert found["round"] == 2
    assert found["accuracy"]["client_mean"] == pytest.approx(sum(r["accuracy"] for r in rows) / 4)
    assert found["accuracy"]["pooled"] == pytest.approx(sum(r["correct"] for r in rows) / sum(r["samples"] for r in rows))
    best = next(r for r in result["results"] if r["selection"] == "best round by validation" and r["split"] == "val")
    means = {}
    for t in range(3):
        val = [r["accuracy"] for r in records.read(finished) if (r["round"], r["split"], r["stage"]) == (t, "val", "round")]
        means[t] = sum(val) / len(val)
    assert means[best["round"]] == max(means.values())


def test_without_validation_there_is_only_the_last_round(tmp_path):
    folder = do(tmp_path / "r", "method.name=fedavg", "data.val=0")
    assert {r["selection"] for r in summary.read(folder)["results"]} == {"last round"}
    assert {r["split"] for r in summary.read(folder)["results"]} == {"test"}


def test_saved_models_reload_and_score_as_recorded(finished):
    from fedme.experiment.assemble import gather

    federation = gather(load(finished / "config.toml")[0])
    for client, data in federation.clients.items():
        for name, stage in (("model", "round"), ("finetuned", "finetuned")):
            module, about = saved.read(finished / "clients" / client, name)
            accuracy = (module(data.test.inputs()).argmax(-1) == data.test.y).double().mean().item()
            row = next(
                r
                for r in records.read(finished)
                if (r["round"], r["client"], r["model"], r["split"], r["stage"]) == (2, client, "personal", "test", stage)
            )
            assert accuracy == pytest.approx(row["accuracy"])
            assert about["accuracy"]["test"] == pytest.approx(row["accuracy"])
            assert about["arch"] == row["arch"]
            assert about["classes"] == [str(digit) for digit in range(10)]
            assert about["preprocessing"]


@pytest.mark.parametrize("name", METHODS)
def test_same_file_same_bits_and_resumed_the_same(name, tmp_path):
    words = [f"method.name={name}", "rounds=2"] + (["method.public_epochs=2"] if name == "fedmd" else [])
    whole = do(tmp_path / "whole", *words)
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=30 if name in ("mapper", "fedmd") else 13)
    assert not (tmp_path / "cut" / "summary.json").exists()
    assert run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")
    assert summary.read(whole)["results"] == summary.read(tmp_path / "cut")["results"]
    assert run.resume(tmp_path / "cut", Watching()) is False


@pytest.mark.parametrize("fuse", range(1, 60, 6))
def test_killed_anywhere_it_resumes_to_the_same_bits(fuse, finished, tmp_path):
    with pytest.raises(Killed):
        do(tmp_path / "cut", fuse=fuse)
    run.resume(tmp_path / "cut", Watching())
    assert identical(finished, tmp_path / "cut")


def test_killed_twice_and_with_rare_checkpoints(tmp_path):
    whole = do(tmp_path / "whole", "rounds=6", "checkpoint_every=4")
    with pytest.raises(Killed):
        do(tmp_path / "cut", "rounds=6", "checkpoint_every=4", fuse=95)
    with pytest.raises(Killed):
        run.resume(tmp_path / "cut", Watching(3))
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")


def torn_segment(store, sets):
    store.folder.mkdir(exist_ok=True)
    (store.folder / ".000003.bin.partial").write_bytes(b"half of a")
    raise Killed


def torn_index(path, text):
    path.with_name(f".{path.name}.partial").write_text(text[: len(text) // 2])
    raise Killed


def no_sweep(store, needed):
    raise Killed


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("fedme.experiment.store.Store.write", torn_segment),
        ("fedme.experiment.checkpoint.write_text", torn_index),
        ("fedme.experiment.store.Store.sweep", no_sweep),
    ],
    ids=["weights", "index", "sweeping"],
)
def test_killed_while_a_checkpoint_is_written(finished, tmp_path, monkeypatch, where, what, count):
    real, calls = pydoc.locate(where), []

    def dying(*arguments):
        calls.append(arguments)
        return what(*arguments) if len(calls) == count + 1 else real(*arguments)  # the first is the start

    with monkeypatch.context() as patch:
        patch.setattr(where, dying)
        with pytest.raises(Killed):
            do(tmp_path / "cut")
    run.resume(tmp_path / "cut", Watching())
    assert identical(finished, tmp_path / "cut")
    assert not list((tmp_path / "cut").rglob("*.partial"))
    needed = set(re.findall('"segment": ([0-9]+)', (tmp_path / "cut" / checkpoint.NAME).read_text()))
    assert {path.stem for path in (tmp_path / "cut" / "weights").glob("*.bin")} == {f"{int(n):06}" for n in needed}


def test_other_seeds_differ(finished, tmp_path):
    assert not identical(finished, do(tmp_path / "other", "seed=1"))


def test_choosing_architectures_is_not_done_again(tmp_path, monkeypatch):
    words = ["models.assign=best-local", "models.selection_rounds=2"]
    whole = do(tmp_path / "whole", *words)
    chosen = json.loads((whole / "selection.json").read_text())
    assert all(set(scores) == {"mlr", "dnn-8"} for scores in chosen.values())
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=4 * 2 * 3 + 15)
    monkeypatch.setattr("fedme.experiment.assemble._by_best_local", None)
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")


def test_clients_with_different_tasks_share_a_part(tmp_path):
    experiment, _ = load("digits-tasks", ["rounds=2", "data.limit=200", f"output={tmp_path / 'run'}"])
    folder = run.start(experiment, Watching())
    module, about = saved.read(folder / "clients" / "1")
    assert about["classes"] == ["0+1+2+3+4", "5+6+7+8+9"]
    assert module(torch.zeros(1, 1, 8, 8)).shape == (1, 2)
    rows = [r for r in records.read(folder) if r["stage"] == "round"]
    assert {r["model"] for r in rows} == {"personal", "global"}


def test_a_common_label_space_is_demanded_by_name(tmp_path):
    for name in ("fedavg", "fedme", "pfml", "fedmd", "centralized", "hypcluster", "mapper", "pfedme", "fedprox"):
        words = [f"method.name={name}", f"output={tmp_path / name}", "models.assign=dnn-64", "data.public=20"]
        experiment, _ = load("digits-tasks", words)
        with pytest.raises(ValueError, match=r"one label space of 10 classes.*1 \(2\).*fml"):
            run.start(experiment, Watching())
        assert not (tmp_path / name).exists()


def test_a_second_process_is_refused(tmp_path, finished):
    with locked(finished), pytest.raises(RunError, match="in use by process"):
        run.resume(finished, Watching())


def test_an_existing_directory_is_not_overwritten(finished):
    with pytest.raises(RunError, match="exists already; `fedme resume"):
        do(finished)


def test_the_default_directory_is_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment, _ = load("digits-fedme", [*TINY, "rounds=1", "method.name=local"])
    assert [str(run.start(experiment, Watching())) for _ in range(2)] == ["runs/digits-fedme", "runs/digits-fedme-2"]


def test_a_checkpoint_of_another_configuration_or_version_is_refused(tmp_path):
    with pytest.raises(Killed):
        do(tmp_path / "run", fuse=25)
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(RunError, match="another configuration"):
        run.resume(tmp_path / "run", Watching())
    config.write_text(text)
    path = tmp_path / "run" / checkpoint.NAME
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"fedme-checkpoint-2", b"fedme-checkpoint-9"))
    with pytest.raises(RunError, match="this version reads"):
        run.resume(tmp_path / "run", Watching())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="damaged .*delete it to begin again"):
        run.resume(tmp_path / "run", Watching())


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match="not a run directory"):
        run.resume(tmp_path, Watching())
    with pytest.raises(RunError, match="not a run directory"):
        summary.read(tmp_path)
    write_json(tmp_path / "config.toml", {})
    with pytest.raises(RunError, match="not finished"):
        summary.read(tmp_path)


def start(folder, *words):
    command = [sys.executable, "-m", "fedme", "run", "digits-fedme", *TINY, *words, f"output={folder}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_rows(process, folder, count):
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run ended or hung: {process.communicate()}")


def test_kill_minus_nine_and_resume(tmp_path):
    whole = do(tmp_path / "whole", "rounds=120")
    process = start(tmp_path / "cut", "rounds=120")
    wait_for_rows(process, tmp_path / "cut", 60)
    process.kill()
    process.communicate()
    assert not (tmp_path / "cut" / "summary.json").exists()
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, number):
    process = start(tmp_path / "cut", "rounds=2000", "checkpoint_every=2000")
    wait_for_rows(process, tmp_path / "cut", 60)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "fedme resume" in err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "cut" / checkpoint.NAME).read_text())["header"]["round"] >= 2


def test_clients_that_are_not_asked_cost_nothing(tmp_path, monkeypatch):
    from fedme.core.model import Model

    made, real = [], Model.init.__func__

    def counted(cls, arch, key, *rest):
        made.append(key.path)
        return real(cls, arch, key, *rest)

    monkeypatch.setattr(Model, "init", classmethod(counted))
    words = ["data.name=images", "data.users=50", "data.samples=10", "data.side=4", "partition.name=natural", "data.test=0.3"]
    words += ["data.limit=none", "data.public=0", "train.cohort=3", "evaluate_every=9", "partition.clients=none"]
    experiment, _ = load("digits-fedme", [*TINY, *words, "rounds=2", "method.clusters=1", f"output={tmp_path / 'run'}"])
    monkeypatch.setattr(run.Loop, "assess", lambda self, task, server, t, last: {})
    run.start(experiment, Watching())
    drawn = {path for path in made if path[:2] == ("init", "client")}
    assert 3 <= len(drawn) <= 6
    kept = json.loads((tmp_path / "run" / checkpoint.NAME).read_text())["server"]["models"]
    assert len(kept) == len(drawn)
