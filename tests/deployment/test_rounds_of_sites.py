"""The server's rounds with sites, without Flower's processes: every method, and the failures of sites."""

import json
import shutil
import zlib

import numpy as np
import pytest
from safetensors.torch import load_file

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.deployment import site_engine, submitted_runs
from fedme.deployment.operator_folder import Federation
from fedme.federation.flower import EngineError
from fedme.federation.flower.message_content import MessageContent
from fedme.methods import METHODS
from fedme.report import chromium
from fedme.results import records, summary
from fedme.running import checkpoint
from fedme_test_browser import new_page, open_file
from fedme_test_deployment import Deployment, LocalGrid


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    monkeypatch.setattr(site_engine, "RETRY_DELAY", 0.0)
    return Deployment(tmp_path)


def create_run(deployment):
    return submitted_runs.create(Federation.read(deployment.federation), deployment.federation / "experiment.toml")


def saved(deployment, run, name):
    folder = deployment.site(name) / "state" / "runs" / submitted_runs.token(run) / "clients" / name
    return load_file(folder / "model.safetensors") if folder.exists() else None


def check_models(deployment, run, names):
    expected = deployment.expected()
    for name in names:
        model = {**expected[name].params, **expected[name].buffers}
        weights = saved(deployment, run, name)
        assert weights.keys() == model.keys()
        assert all((weights[key] == value).all() for key, value in model.items())


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"centralized"}))
def test_every_method_gives_the_models_of_one_process(method, deployment):
    own = {"method": {"name": method}}
    if method == "fedmd":
        own["method"] |= {"public_epochs": 1, "private_epochs": 1}
        arrays = np.load(deployment.site("a") / "data.npz")
        for folder in [deployment.federation, *deployment.federation.glob("sites/*")]:
            np.savez(folder / "public.npz", x=arrays["x"], y=arrays["y"])
        deployment.agree(data=deployment.experiment()["data"] | {"public_file": "public.npz"})
    deployment.agree(**own)
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    check_models(deployment, run, "abc")
    assert submitted_runs.without_model(run) == []
    shared = {path.name for path in run.glob("shared/*") if path.is_dir()}
    assert shared == {"fedme": set("abc"), "local": set(), "fedmd": set()}.get(method, shared)
    assert bool(shared) == (method not in ("local", "fedmd"))


@pytest.mark.parametrize("method", ["fedme", "fedavg"])
@pytest.mark.parametrize("update_bn", [True, False])
def test_batch_norm_statistics_of_a_site_stay_there(method, update_bn, deployment):
    network = "fedme_test_user_networks:Normed"
    deployment.agree(method={"name": method}, models={"pool": [network], "shared": network, "update_bn": update_bn})
    for name in "abc":
        deployment.change(deployment.site(name) / "site.toml", model=network)
    grid, sent = LocalGrid(deployment), []
    answer = grid.answer

    def listen(message):
        reply = answer(message)
        sent.extend(MessageContent.from_records(reply.content).tensors.values())
        return reply

    grid.answer = listen
    run = create_run(deployment)
    grid.run_server(run)
    if update_bn:
        check_models(deployment, run, "abc")
    assert sent
    own = 0
    for name in "abc":
        mine = {key: value for key, value in saved(deployment, run, name).items() if "running" in key}
        offered = load_file(run / "shared" / (name if method == "fedme" else "global") / "model.safetensors")
        for key, value in mine.items():
            if not value.equal(offered[key]):  # a site may be better off with the averaged statistics
                own += 1
                assert not any(value.shape == other.shape and value.equal(other) for other in sent)
    assert (own > 0) == update_bn


def test_data_is_never_pooled(deployment, fedme):
    deployment.agree(method={"name": "centralized"})
    code, _, err = fedme("deploy", "submit", "--federation", deployment.federation)
    assert (code, "method 'centralized' trains on the pooled data of all clients" in err) == (2, True)
    assert not list(deployment.federation.glob("runs/*"))
    code, _, err = fedme("deploy", "node", deployment.site("a") / "site.toml", "--check")
    assert (code, "method 'centralized' trains on the pooled data of all clients" in err) == (2, True)


def test_public_samples_are_the_same_for_all(deployment, fedme):
    code, _, err = fedme("deploy", "submit", "--federation", deployment.federation, "--dry-run")
    assert code == 0
    deployment.agree(method={"name": "fedmd"})
    code, _, err = fedme("deploy", "submit", "--federation", deployment.federation)
    assert (code, "needs labelled public data: set data.public (a number) or data.public_file" in err) == (2, True)
    deployment.agree(data=deployment.experiment()["data"] | {"public": 20})
    with pytest.raises(ConfigError, match="data.public: a deployment cannot take samples from the sites; use a file"):
        create_run(deployment)
    about = {name: value for name, value in deployment.experiment()["data"].items() if name != "public"}
    deployment.agree(data=about | {"public_file": "public.npz"})
    for i, folder in enumerate([deployment.federation, *sorted(deployment.federation.glob("sites/*"))]):
        np.savez(folder / "public.npz", x=np.full((20, 64), i == 3), y=np.arange(20) % 10)  # c's file differs
    deployment.settings(patience=0.1)
    run = create_run(deployment)
    with pytest.raises(EngineError, match="waited 0 s for sites, but 2 of 3 are connected"):
        LocalGrid(deployment).run_server(run)
    assert "refused c: its public samples differ from the server's" in deployment.log()


def test_a_site_that_was_away_at_the_end_gets_its_model_later(deployment):
    run = create_run(deployment)
    grid = LocalGrid(deployment, lambda site, message_type, count: site in "bc" and message_type == "evaluate" and count == 0)
    log = grid.run_server(run)
    assert "no scores from c: Node Unavailable" in log
    assert "not connected at the end: b, c; `fedme deploy submit --resume` delivers their models" in log
    assert (run / summary.NAME).exists()
    assert saved(deployment, run, "c") is None
    assert submitted_runs.unfinished(Federation.read(deployment.federation)) == run
    grid.gone = {"a", "b"}
    assert "not connected at the end: b;" in grid.run_server(run)
    check_models(deployment, run, "ac")
    grid.gone = {"a", "c"}
    grid.run_server(run)
    check_models(deployment, run, "abc")
    assert submitted_runs.without_model(run) == []
    rows = [row for row in records.read(run) if row["stage"] == "round" and row["split"] == "test"]
    assert sorted(row["client"] for row in rows) == ["a", "b", "c"]
    assert {row["client"] for row in rows if row["bytes_up"]} == {"a"}  # traffic is counted once
    assert {result["clients"] for result in summary.read(run)["results"]} == {3}
    assert grid.asked["a", "evaluate"] == 0  # once


def test_scores_delivered_late_are_covered_by_the_checksum(deployment):
    run = create_run(deployment)
    grid = LocalGrid(deployment, lambda site, message_type, count: site == "c" and message_type == "evaluate" and count == 0)
    grid.run_server(run)
    grid.run_server(run)  # c evaluates its model now, and its rows are appended
    header = json.loads((run / checkpoint.NAME).read_text())["header"]
    metrics = (run / records.NAME).read_bytes()
    assert (header["metrics_bytes"], header["metrics_check"]) == (len(metrics), zlib.crc32(metrics))
    grid.run_server(run)  # nothing is left to do; a wrong checksum would be reported as damage
    assert (run / records.NAME).read_bytes() == metrics


def test_damaged_metrics_are_noticed_before_late_scores_are_added(deployment):
    run = create_run(deployment)
    grid = LocalGrid(deployment, lambda site, message_type, count: site == "c" and message_type == "evaluate" and count == 0)
    grid.run_server(run)
    metrics = run / records.NAME
    metrics.write_text(metrics.read_text().replace('"client": "a"', '"client": "x"', 1))
    with pytest.raises(RunError, match="its checksum"):
        grid.run_server(run)
    assert submitted_runs.without_model(run) == ["c"]


def test_a_round_waits_for_enough_replies(deployment):
    deployment.settings(min_replies=2, min_sites=1)
    deployment.agree(method={"name": "fml"})
    run = create_run(deployment)
    grid = LocalGrid(deployment, lambda site, message_type, count: message_type == "train" and site in "bc" and count < 2)
    log = grid.run_server(run)
    assert log.count("round 0: 1 of 2 needed replies; asking the others again") == 2
    assert grid.asked["a", "train"] == 1  # a site that replied is not asked again: two rounds, two messages
    check_models(deployment, run, "abc")  # all sites replied in the end, and no reply was counted twice


def test_a_round_that_never_has_enough_replies_ends_in_an_error_and_can_be_resumed(deployment):
    deployment.settings(min_replies=3, min_sites=1, patience=0.3)
    run = create_run(deployment)
    grid = LocalGrid(deployment, lambda site, message_type, count: message_type == "train" and site == "b" and count >= 1)
    with pytest.raises(EngineError, match="round 1: only 2 of 3 needed replies within 0 s"):
        grid.run_server(run)
    grid.gone = {"b"}
    with pytest.raises(EngineError, match="waited 0 s for sites, but 2 of 3 are connected"):
        grid.run_server(run)
    grid = LocalGrid(deployment)
    grid.run_server(run)
    check_models(deployment, run, "abc")


def test_a_lost_folder_is_noticed(deployment):
    deployment.agree(method={"name": "pfml"}, rounds=3)
    run, lost = create_run(deployment), []

    def lose_state(site, message_type, count):
        if (site, message_type, count) == ("a", "train", 2):
            shutil.rmtree(deployment.site("a") / "state")
            lost.append(site)
        return False

    log = LocalGrid(deployment, lose_state).run_server(run)
    assert lost
    assert "round 2: a lost its private state: it has version 0 instead of 2" in log
    notes = [row["notes"] for row in records.read(run) if "lost_state" in row.get("notes", {})]
    assert notes == [{"lost_state": "version 0 instead of 2"}]


def test_a_site_may_have_a_criterion_of_its_own(deployment):
    deployment.agree(method={"name": "fedme", "adopt_by": {"c": "accuracy"}})
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    check_models(deployment, run, "abc")


def test_what_a_run_of_sites_leaves_can_be_looked_at(deployment, fedme):
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    for words in (("show", run), ("show", run, "--clients"), ("watch", run, "--once"), ("report", run)):
        code, out, err = fedme(*words)
        assert code == 0, (words, err)
        assert out
    if not chromium.missing():  # the report works without the sites' label counts
        with chromium.launch() as browser:
            page, messages = new_page(browser)
            open_file(page, run / "report.html")
            assert page.locator("svg").count() > 3
            assert messages == []
    code, out, _ = fedme("deploy", "audit", run)
    assert (code, "15 transfers" in out) == (0, True)
    code, out, _ = fedme("deploy", "audit", run, "--format", "csv")  # a table is folded to the width of the terminal
    assert (code, "sent to a" in out, "own: mlr, guest: dnn-16" in out) == (0, True, True)
    code, out, _ = fedme("deploy", "audit", deployment.site("a") / "state", "--json")
    assert [line["peer"] for line in json.loads(out)] == ["server"] * 5
    code, _, err = fedme("deploy", "audit", deployment.folder)
    assert (code, "no audit.jsonl here" in err) == (2, True)
