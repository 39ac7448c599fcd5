"""Many runs on several machines: shares, lists, runs in use elsewhere, tasks on Ray, and the choice of the best."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from fedme.config.experiment import ConfigError, load
from fedme.core.atomic_files import locked
from fedme.results import summary
from fedme.running import ray_jobs, run, sweep
from fedme.running.progress import Display
from fedme.running.run_queue import Batch, Planned
from fedme.running.shards import Shard, parse_shard, state
from fedme_test_runs import Killed, Watching, do, identical

TINY = ["rounds=1", "data.limit=90", "partition.name=iid", "partition.clients=3", "models.pool=['mlr']", "models.assign=mlr"]
OVER = ["--over", "train.lr=0.0001,0.1,0.5", "--seeds", "2", "-q"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def planned(root, name, *words):
    return Planned(name, root / name, load("digits-fedavg", [*TINY, *words])[0].plain())


def quiet():
    return Display(Console(stderr=True), quiet=True)


@given(st.integers(0, 60), st.integers(1, 9))
def test_shares_miss_no_run_and_have_none_in_common(runs, count):
    plans = [Planned(str(number), Path(str(number)), {}) for number in range(runs)]
    shares = [Shard(index, count).of(plans) for index in range(1, count + 1)]
    assert Counter(plan.name for share in shares for plan in share) == Counter(plan.name for plan in plans)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.text("0123456789/ -+٣x", max_size=8))
def test_any_other_share_is_refused(text):
    try:
        shard = parse_shard(text)
    except ConfigError as error:
        assert repr(text)[1:-1] in str(error) or text in str(error)
    else:
        assert 1 <= shard.index <= shard.count
        assert text.split("/") == [text.split("/")[0], text.split("/")[1]]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "a/b"])
def test_shares_count_from_one(text, fedme):
    code, _, err = fedme("sweep", "digits-fedavg", *TINY, *OVER, "--shard", text)
    assert code == 2
    assert "i from 1 to n" in err


def test_two_shards_together_equal_one_whole(fedme, tmp_path):
    words = ["sweep", "digits-fedavg", *TINY, *OVER]
    assert fedme(*words, "--output", "whole")[0] == 0
    code, out, err = fedme(*words, "--output", "parts", "--shard", "1/2", "--json")
    assert code == 0
    assert "have unfinished runs" in err
    assert [len(point["test"]) for point in json.loads(out)] == [1, 1, 1]
    assert not any(point["complete"] or point["best"] for point in json.loads(out)), "no setting has all its seeds"
    assert len(list(tmp_path.glob("parts/*/summary.json"))) == 3
    code, out, err = fedme(*words, "--output", "parts", "--shard", "2/2")
    assert code == 0
    assert "unfinished" not in err
    assert "best by validation" in out
    for folder in sorted((tmp_path / "whole").iterdir()):
        assert identical(folder, tmp_path / "parts" / folder.name)
        there = summary.read(tmp_path / "parts" / folder.name)
        assert summary.read(folder)["results"] == there["results"]
    assert fedme(*words, "--output", "parts")[1].split() != []


def test_the_list_runs_nothing_and_knows_what_is_done(fedme, tmp_path):
    words = ["sweep", "digits-fedavg", *TINY, "--over", "train.lr=0.1,0.5", "--output", "some", "-q"]
    code, out, _ = fedme(*words, "--list", "--json")
    assert code == 0
    assert [line["number"] for line in json.loads(out)] == ["1", "2"]
    assert {line["state"] for line in json.loads(out)} == {"new"}
    assert not (tmp_path / "some").exists()
    assert fedme(*words, "--shard", "2/2")[0] == 0
    with locked(tmp_path / "some" / "train.lr=0.5-s0"):
        assert [line["state"] for line in json.loads(fedme(*words, "--list", "--json")[1])] == ["new", "in use"]
    assert [line["state"] for line in json.loads(fedme(*words, "--list", "--json")[1])] == ["new", "finished"]
    assert len(json.loads(fedme(*words, "--list", "--shard", "2/2", "--json")[1])) == 1


def test_reproduce_lists_the_runs_of_a_result(fedme):
    every = json.loads(fedme("reproduce", "pfml-table1", "--list", "--json")[1])
    shares = [json.loads(fedme("reproduce", "pfml-table1", "--list", "--shard", f"{i}/3", "--json")[1]) for i in (1, 2, 3)]
    assert len(every) > 3
    assert sorted(line["directory"] for share in shares for line in share) == sorted(line["directory"] for line in every)


def test_a_run_in_use_elsewhere_is_waited_for(tmp_path):
    plans = [planned(tmp_path, "a"), planned(tmp_path, "b", "seed=1")]
    plans[0].folder.mkdir()
    done, inside = threading.Event(), threading.Event()

    def hold():
        with locked(plans[0].folder):
            inside.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    assert state(plans[0]) == "in use"
    finished = []

    def after(folder):
        finished.append(folder.name)
        done.set()

    outcomes = Batch(quiet(), after=after).run(plans)
    holder.join()
    assert [outcome.error or outcome.in_use for outcome in outcomes] == ["", ""]
    assert finished == ["b", "a"]


def test_a_run_in_use_elsewhere_is_skipped_if_asked(tmp_path, capsys):
    plans = [planned(tmp_path, "a"), planned(tmp_path, "b", "seed=1")]
    Batch(quiet()).run(plans[:1])
    (plans[0].folder / summary.NAME).unlink()
    with locked(plans[0].folder):
        outcomes = Batch(quiet(), wait=False).run(plans)
    assert "in use by process" in outcomes[0].in_use
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert not outcomes[1].in_use
    assert "left to them" in capsys.readouterr().err


def test_a_run_that_another_process_finished_meanwhile_counts(tmp_path):
    plan = planned(tmp_path, "a")
    elsewhere = Batch(quiet())
    begun = []

    class Slow(Batch):
        def _attempts(self, todo):
            if not begun:
                begun.append(elsewhere.run(todo))
            return super()._attempts(todo)

    outcome = Slow(quiet()).run([plan])[0]
    assert not outcome.error
    assert not outcome.in_use


def test_only_complete_points_are_compared(fedme, tmp_path):
    words = ["digits-fedavg", *TINY, "--over", "train.lr=0.0001,0.1,0.5", "--seeds", "2", "-q", "--output", "all"]
    assert fedme("sweep", *words)[0] == 0
    keys = [sweep.swept_key("train.lr=0.0001,0.1,0.5")]
    points = sweep.points("digits-fedavg", TINY, keys, range(2), tmp_path / "all", together=False)
    scored = sweep.scores(points)
    best = next(index for index, score in enumerate(scored) if score.best)
    (points[best].runs[1].folder / summary.NAME).unlink()
    again = sweep.scores(points)
    assert again[best].validation
    assert not again[best].complete
    assert [score.best for score in again] == [index != best and score.best for index, score in enumerate(again)]
    assert any(score.best for score in again)


def test_a_run_continues_on_another_machine_with_the_same_bits(tmp_path, fedme):
    whole = do(tmp_path / "whole")
    with pytest.raises(Killed):
        do(tmp_path / "cut", fuse=30)
    before = (tmp_path / "cut" / "config.toml").read_bytes()
    for word, name in (("seed=9", "seed"), ("train.lr=0.9", "train.lr"), ("engine.threads=2", "engine.threads")):
        code, _, err = fedme("resume", tmp_path / "cut", "engine.workers=1", word)
        assert code == 2
        assert f"{name}: cannot change" in err
    assert (
        fedme(
            "resume",
            tmp_path / "cut",
            "engine.workers=1",
            "engine.memory=0.5",
            "engine.device=cpu",
            "engine.device_memory=1",
            "rounds=3",
        )[0]
        == 0
    )
    assert identical(whole, tmp_path / "cut")
    assert (tmp_path / "cut" / "config.toml").read_bytes() == before
    assert not run.resume(tmp_path / "cut", Watching(), overrides=["engine.workers=2"])


@pytest.mark.slow
def test_the_same_sweep_twice_at_once(tmp_path):
    words = [sys.executable, "-m", "fedme", "sweep", "digits-fedavg", *TINY, "rounds=8", *OVER, "--json"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second
    assert sum(point["best"] for point in first) == 1


def test_tasks_ask_for_the_processors_and_the_device_of_their_run(tmp_path):
    words = ["engine.device=cuda:1", "engine.threads=3"]
    for workers, count in ((["engine.workers=5"], 5), (["engine.workers=2"], 3), ([], 3)):
        config = load("digits-fedavg", [*words, *workers, f"output={tmp_path}"])[0].plain()
        planned = Planned("a run", tmp_path, config)
        assert ray_jobs.needs(planned) == {"num_cpus": count, "num_gpus": 1}
        assert ray_jobs.on_node(planned).config["engine"] == config["engine"] | {"device": "cuda"}
    planned = Planned("a run", tmp_path, load("digits-fedavg", [f"output={tmp_path}"])[0].plain())
    assert ray_jobs.needs(planned) == {"num_cpus": 1, "num_gpus": 0}
    assert ray_jobs.on_node(planned).config == planned.config


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_a_sweep_on_ray_equals_one_here(tmp_path, fedme):
    words = ["sweep", "digits-fedavg", *TINY, "--over", "train.lr=0.1,0.5", "-q"]
    assert fedme(*words, "--output", "here")[0] == 0
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        address = cluster.stdout.readline().strip()
        command = [sys.executable, "-m", "fedme", *words, "--output", "there", "--ray", address, "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    finally:
        cluster.communicate("end\n", timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(point["complete"] for point in json.loads(done.stdout))
    for folder in sorted((tmp_path / "here").iterdir()):
        assert identical(folder, tmp_path / "there" / folder.name)


CLUSTER = """
import ray, sys
cluster = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(cluster.address_info["gcs_address"], flush=True)
sys.stdin.readline()
"""
