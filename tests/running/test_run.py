"""Whole runs: what is in the directory, that seeds decide everything, and that nothing is lost when a run is stopped."""

import contextlib
import errno
import io
import json
import os
import pydoc
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedme.artifacts import saved_models
from fedme.config.experiment import load
from fedme.core.atomic_files import RunError, locked, write_json
from fedme.methods import METHODS
from fedme.results import records, summary
from fedme.running import checkpoint, round_loop, run
from fedme_test_runs import TINY, Killed, Watching, do, identical


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


def test_the_summary_of_the_rounds_as_they_were_played_is_that_of_the_records(finished, tmp_path):
    again = do(
        tmp_path / "evaluated-rarely",
        "evaluate_every=2",
        "faults.dropout=0.3",
        "privacy.noise_multiplier=0",
        "method.name=fedavg",
    )
    for folder in (finished, again):
        expected = summary.summarise(records.read(folder), summary.config_of(folder))
        assert summary.read(folder) == expected


def test_without_validation_there_is_only_the_last_round(tmp_path):
    folder = do(tmp_path / "r", "method.name=fedavg", "data.val=0")
    assert {r["selection"] for r in summary.read(folder)["results"]} == {"last round"}
    assert {r["split"] for r in summary.read(folder)["results"]} == {"test"}


def test_saved_models_reload_and_score_as_recorded(finished):
    from fedme.running.assembly import gather

    federation = gather(load(finished / "config.toml")[0])
    for client, data in federation.clients.items():
        for name, stage in (("model", "round"), ("finetuned", "finetuned")):
            module, about = saved_models.read(finished / "clients" / client, name)
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


@pytest.mark.parametrize("name", ["local", "fml"])
def test_the_state_of_an_optimizer_is_in_the_checkpoint(name, tmp_path):
    words = [f"method.name={name}", "train.optimizer=adam", "train.momentum=0", "train.lr_schedule=cosine", "engine.memory=0"]
    whole, reset = do(tmp_path / "whole", *words), do(tmp_path / "reset", *words, "method.optimizer_state=reset")
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=13)
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")
    assert not identical(whole, reset)


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


def torn_segment(store, sets, scratch=False):
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
        ("fedme.running.weight_store.Store.write", torn_segment),
        ("fedme.running.checkpoint.write_text", torn_index),
        ("fedme.running.weight_store.Store.sweep", no_sweep),
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
        do(tmp_path / "elsewhere" / "cut", *words, fuse=4 * 2 * 3 + 15)
    monkeypatch.setattr("fedme.running.assembly._by_best_local", None)
    run.resume(tmp_path / "elsewhere" / "cut", Watching())
    assert identical(whole, tmp_path / "elsewhere" / "cut")


def test_architectures_are_chosen_with_a_rate_of_their_own(tmp_path):
    words = ["rounds=1", "models.assign=best-local", "models.selection_rounds=2", "train.lr=0.1"]
    rates = {"default": [], "same": ["models.selection_lr=0.1"], "other": ["models.selection_lr=1.0"]}
    scores = {
        name: json.loads((do(tmp_path / name, *words, *more) / "selection.json").read_text()) for name, more in rates.items()
    }
    assert scores["same"] == scores["default"] != scores["other"]


def test_clients_with_different_tasks_share_a_part(tmp_path):
    experiment, _ = load("digits-tasks", ["rounds=2", "data.limit=200", f"output={tmp_path / 'run'}"])
    folder = run.start(experiment, Watching())
    module, about = saved_models.read(folder / "clients" / "1")
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
    with pytest.raises(RunError, match="already exists; `fedme resume"):
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
    with pytest.raises(RunError, match="damaged .*delete it to start again"):
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
    monkeypatch.setattr(round_loop.RoundLoop, "evaluate_models", lambda self, task, server, t, last: dict)
    run.start(experiment, Watching())
    drawn = {path for path in made if path[:2] == ("init", "client")}
    assert 3 <= len(drawn) <= 6
    kept = json.loads((tmp_path / "run" / checkpoint.NAME).read_text())["server"]["models"]
    assert len(kept) == len(drawn)


def children(pid):
    """The processes that a process has started."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_of_a_killed_run_hold_nothing_and_end(tmp_path):
    long = ["models.pool=[{name='cnn-small',channels=8}]", "train.epochs=5000", "engine.workers=2", "engine.path=workers"]
    process = start(tmp_path / "cut", *long)
    deadline = time.monotonic() + 120
    while len(workers := children(process.pid)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # they are at work that takes minutes
    process.kill()
    process.wait()  # not for its output, which the workers have too
    process.stdout.close()
    process.stderr.close()
    assert len(workers) >= 2
    with locked(tmp_path / "cut"):  # a lock is not inherited: `fedme resume` can go on at once
        pass
    until = time.monotonic() + 20
    while any(alive(worker) for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(worker) for worker in workers)


@pytest.mark.parametrize("left", [[".lock"], [".lock", "environment.json", ".config.toml.partial"]])
def test_a_run_that_was_killed_before_it_began_is_started_again(left, fedme, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in left:
        (folder / name).write_text("")
    code, _, err = fedme("resume", folder)
    assert code == 2
    assert "the run was stopped before it began; repeat the command that started it" in " ".join(err.split())
    do(folder, "rounds=1")
    assert not list(folder.glob(".*.partial"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").write_text("")
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(RunError, match="already exists"):
        do(tmp_path / "other")


def test_metrics_that_are_shorter_than_the_checkpoint_says_are_refused(tmp_path):
    with pytest.raises(Killed):
        do(tmp_path / "run", fuse=40)
    path = tmp_path / "run" / records.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(RunError, match="is shorter than the checkpoint says"):
        run.resume(tmp_path / "run", Watching())
    assert path.read_bytes() == whole[:100], "it is left as it is"
    path.write_bytes(whole)
    run.resume(tmp_path / "run", Watching())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("config.toml", "seed = 0", "seed = 1"), "checkpoint.json: was made with another configuration than config.toml"),
        (("config.toml", 'name = "fedme"', 'name = "fedavg"'), "config.toml: method.clusters: unknown key"),
        (("config.toml", "rounds = 3", "rounds = 30"), "checkpoint.json: was made with another configuration than config.toml"),
        (
            ("checkpoint.json", "checkpoint-2", "checkpoint-3"),
            "this version reads fedme-checkpoint-2, the file is fedme-checkpoint-3",
        ),
        (("checkpoint.json", '"round": ', '"rounds": '), "checkpoint.json: damaged (wrong checksum"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_line(change, message, fedme, tmp_path):
    with pytest.raises(Killed):
        do(tmp_path / "run", fuse=40)
    name, old, new = change
    text = (tmp_path / "run" / name).read_text()
    assert old in text
    (tmp_path / "run" / name).write_text(text.replace(old, new, 1))
    code, _, err = fedme("resume", tmp_path / "run")
    assert code == 2
    assert message in " ".join(err.split())
    (tmp_path / "run" / name).write_text(text)
    assert fedme("resume", tmp_path / "run")[0] == 0, "nothing was spoilt by the attempt"


def test_a_run_of_an_earlier_version_is_refused(fedme, tmp_path):
    with pytest.raises(Killed):
        do(tmp_path / "run", fuse=40)
    (tmp_path / "run" / "checkpoint.json").rename(tmp_path / "run" / "checkpoint.safetensors")
    code, _, err = fedme("resume", tmp_path / "run")
    assert code == 2
    assert "begun by an earlier version, whose checkpoints this version cannot read; start a new run" in " ".join(err.split())


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.json", "000002.bin", "summary.json", "model.safetensors"])
def test_a_full_disk_stops_the_run_in_one_line_whatever_it_is_writing(name, fedme, finished, tmp_path, monkeypatch):
    real, calls = Path.open, []
    first = 1 if name == "checkpoint.json" else 0  # the one before the first round is let pass

    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode="r", *rest, **more):
        if path.name in (name, f".{name}.partial") and mode in ("wb", "ab"):
            calls.append(path)
            if len(calls) > first:
                return io.BufferedWriter(Full(path, mode[0]))
        return real(path, mode, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        patch.setattr(Path, "write_text", lambda path, text, **more: path.write_bytes(text.encode()))
        code, _, err = fedme("run", "digits-fedme", *TINY, f"output={tmp_path / 'run'}", "--quiet")
    assert code == 2
    said = " ".join(err.split())
    assert "run: cannot be written to: No space left on device; free some space" in said
    assert f"`fedme resume {shlex.quote(str(tmp_path / 'run'))}` continues from the last checkpoint, which is intact" in said
    assert "Traceback" not in err
    assert fedme("resume", tmp_path / "run")[0] == 0
    assert identical(finished, tmp_path / "run")
