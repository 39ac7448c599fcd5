"""The server's rounds with sites, without Flower's processes: every method, and the failures of sites."""

import json
import shutil
import zlib

import numpy as np
import pytest
from safetensors.torch import load_file

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.core.method import TaskError
from fedme.deployment import site_engine, submitted_runs, transfer_log
from fedme.deployment.operator_folder import Federation
from fedme.federation.flower import EngineError
from fedme.federation.flower.message_content import MessageContent
from fedme.methods import METHODS
from fedme.methods.fedavg import FedAvg
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
    federation = Federation.read(deployment.federation)
    return submitted_runs.create(federation, submitted_runs.read(federation, federation.folder / "experiment.toml"))


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
    if method in ("fedproto", "heterofl"):
        own["models"] = {"pool": ["dnn-8"], "shared": "dnn-8"}
        for name in "abc":
            deployment.change(deployment.site(name) / "site.toml", model="dnn-8")
    if method == "lg-fedavg":  # networks with as many features
        own["models"] = {"pool": ["mlr"], "shared": "mlr"}
        for name in "abc":
            deployment.change(deployment.site(name) / "site.toml", model="mlr")
    deployment.agree(**own)
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    check_models(deployment, run, "abc")
    assert submitted_runs.without_model(run) == []
    shared = {path.name for path in run.glob("shared/*") if path.is_dir()}
    assert shared == {"fedme": set("abc"), "fedamp": set("abc")}.get(method, shared)
    assert bool(shared) == (not METHODS[method].nothing_to_offer)


def test_a_site_that_does_not_tell_its_number_of_samples_counts_as_the_median_site(deployment, monkeypatch):
    deployment.agree(method={"name": "fedavg"})
    for name, rows in (("a", 60), ("b", 40), ("c", 50)):
        arrays = np.load(deployment.site(name) / "data.npz")
        np.savez(deployment.site(name) / "data.npz", x=arrays["x"][:rows], y=arrays["y"][:rows])
    deployment.change(deployment.site("a") / "site.toml", tell={"samples": False})
    used, aggregate = [], FedAvg.aggregate

    def spy(self, server, replies, *rest):
        used.append({client: reply.samples for client, reply in replies.items()})
        return aggregate(self, server, replies, *rest)

    monkeypatch.setattr(FedAvg, "aggregate", spy)
    run = create_run(deployment)
    grid, replies = LocalGrid(deployment), []
    answer = grid.answer

    def listen(message):
        reply = answer(message)
        if grid.sites[message.metadata.dst_node_id] == "a":
            replies.append(MessageContent.from_records(reply.content))
        return reply

    grid.answer = listen
    log = grid.run_server(run)
    assert used == [{"a": 26, "b": 24, "c": 29}] * 2
    assert "a connected: dnn-8, an untold number of training samples" in log
    rows = [row for row in records.read(run) if row["client"] == "a"]
    assert {row["stage"] for row in rows} == {"training"}, "accuracies and numbers of correct answers would tell it"
    assert [row["samples"] for row in rows] == [26, 26]
    first, *rounds, last = replies
    assert first.body["handshake"]["samples"] == 0
    assert all(
        (reply.body["up"]["samples"], reply.body["report"]["scores"], reply.body["spent"]) == (1, {}, []) for reply in rounds
    )
    assert (last.body["scores"], last.body["spent"]) == ([], [])
    assert saved(deployment, run, "a") is not None


def test_no_message_of_fml_tells_the_number_of_samples_of_a_site_that_keeps_it(deployment):
    """FML averages with equal weights so that nobody has to tell it (section 6, point 3 of the paper)."""
    deployment.agree(method={"name": "fml"})
    for name in "ab":
        arrays = np.load(deployment.site(name) / "data.npz")
        np.savez(deployment.site(name) / "data.npz", x=arrays["x"][:50], y=arrays["y"][:50])
    deployment.change(deployment.site("a") / "site.toml", tell={"samples": False})
    run, messages = create_run(deployment), {"a": [], "b": [], "c": []}
    grid = LocalGrid(deployment)
    answer = grid.answer

    def listen(message):
        reply = answer(message)
        messages[grid.sites[message.metadata.dst_node_id]].append(MessageContent.from_records(reply.content).body)
        return reply

    grid.answer = listen
    grid.run_server(run)
    replies = [body["up"]["samples"] for bodies in messages.values() for body in bodies if "up" in body]
    assert replies == [1] * 6  # also of sites that tell it when they connect
    (samples,) = {body["handshake"]["samples"] for body in messages["b"] if "handshake" in body}
    assert samples == 29
    assert samples in integers(messages["b"])
    assert samples not in integers(messages["a"])
    assert saved(deployment, run, "a") is not None


def integers(value):
    """All integers in nested dicts and lists, without names."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def test_a_method_that_needs_numbers_of_samples_refuses_a_site_that_does_not_tell(deployment, monkeypatch):
    deployment.agree(method={"name": "fedavg"})
    deployment.settings(min_sites=3, patience=0.5)
    deployment.change(deployment.site("a") / "site.toml", tell={"samples": False})
    monkeypatch.setattr(FedAvg, "hides_samples", False)
    run = create_run(deployment)
    with pytest.raises(EngineError):
        LocalGrid(deployment).run_server(run)
    assert "refused a: method 'fedavg' needs every site's number of samples, but this site does not tell" in deployment.log()


def test_no_model_of_another_architecture_leaves_a_site(deployment):
    """Site a sends its own model, mlr, but no other; so it gets no guest of another architecture."""
    deployment.change(deployment.site("a") / "site.toml", lend={"architectures": ["mlr"]})
    deployment.change(deployment.site("b") / "site.toml", lend={"architectures": ["mlr"]})  # its own model is dnn-16
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    notes = [row["notes"].get("missing") for row in records.read(run) if row["client"] == "b" and "notes" in row]
    assert notes == ["this site lets no model of architecture 'dnn-16' leave (lend.architectures)"] * 2
    for name in "ab":
        sent = [line for line in transfer_log.read(deployment.site(name) / "records") if line["what"] == "sent"]
        assert {model["arch"] for line in sent for model in line["models"]} == ({"mlr"} if name == "a" else set())


@pytest.mark.parametrize("method", ["fedme", "fedavg"])
@pytest.mark.parametrize("update_bn", [True, False])
def test_batch_norm_statistics_of_a_site_stay_there(method, update_bn, deployment):
    network = "fedme_test_user_networks:Normed"
    deployment.agree(method={"name": method}, models={"pool": [network], "shared": network, "update_bn": update_bn})
    for name in "abc":
        deployment.change(deployment.site(name) / "site.toml", model=network, imports=True)
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
    assert "not connected at the end: b, c; they get their models when they are back" in log
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


class Boasting(LocalGrid):
    """Site c claims impossible versions of its state."""

    def reply(self, message):
        reply = super().reply(message)
        if message.metadata.message_type == "train" and self.sites[message.metadata.dst_node_id] == "c":
            content = MessageContent.from_records(reply.content)
            changed = MessageContent({**content.body, "before": -(10**4000), "after": 10**4000}, content.tensors)
            reply.content = changed.to_records()
        return reply


def test_versions_that_a_site_claims_are_kept_within_what_is_possible(deployment):
    run = create_run(deployment)
    Boasting(deployment).run_server(run)
    known = json.loads((run / submitted_runs.SITES).read_text())
    assert {name: known[name]["version"] for name in "abc"} == {"a": 2, "b": 2, "c": 2}
    notes = [row["notes"]["lost_state"] for row in records.read(run) if "lost_state" in row.get("notes", {})]
    assert notes == ["version 0 instead of 1"]


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
    code, out, _ = fedme("deploy", "audit", deployment.site("a"), "--json")
    assert [line["peer"] for line in json.loads(out)] == ["server"] * 7  # a handshake, two rounds, an evaluation
    assert [line["what"] for line in json.loads(out)] == ["sent", *(["received", "sent"] * 3)]
    code, _, err = fedme("deploy", "audit", deployment.folder)
    assert (code, "no audit.jsonl here" in err) == (2, True)


def test_a_site_asks_whether_joining_helps_and_nothing_is_sent(deployment, fedme):
    code, _, err = fedme("deploy", "verdict", deployment.site("a") / "site.toml")
    assert (code, "no models of a finished run" in err) == (2, True)
    run = create_run(deployment)
    LocalGrid(deployment).run_server(run)
    before = fedme("deploy", "audit", deployment.site("a") / "state", "--json")[1]
    code, out, err = fedme("deploy", "verdict", deployment.site("a") / "site.toml", "--json")
    assert code == 0, err
    verdict = json.loads(out)
    assert verdict["decision"] in ("join", "do not join", "cannot tell")
    assert verdict["gains"]["accuracy"]["low"] <= verdict["gains"]["accuracy"]["gain"] <= verdict["gains"]["accuracy"]["high"]
    assert verdict["value"] - verdict["local"] == pytest.approx(verdict["gains"]["accuracy"]["gain"])
    code, out, _ = fedme("deploy", "verdict", deployment.site("a") / "site.toml", "--run", submitted_runs.token(run))
    assert code == 0
    assert "Verdict: " in out
    assert "The site uses its" in out
    assert fedme("deploy", "audit", deployment.site("a") / "state", "--json")[1] == before
    code, _, err = fedme("verdict", run)
    assert (code, "every site asks there, with `fedme deploy verdict`" in err) == (2, True)


def test_networks_that_cannot_share_a_layer_are_refused_when_a_run_is_submitted(deployment):
    deployment.agree(method={"name": "lg-fedavg"})  # bodies of 64, 16 and 8 features
    with pytest.raises(TaskError, match=r"client mlr cannot share the layers of method 'lg-fedavg': head.weight has shape"):
        create_run(deployment)


def test_a_run_that_waits_for_refused_sites_says_why(deployment):
    deployment.agree(method={"name": "lg-fedavg"}, models={"pool": ["dnn-16"], "shared": "dnn-16"})
    run = create_run(deployment)
    deployment.settings(patience=0.5)
    for name in "ac":  # outside the experiment's pool: only the handshake can tell
        deployment.change(deployment.site(name) / "site.toml", model="dnn-8")
    with pytest.raises(EngineError) as refused:
        LocalGrid(deployment).run_server(run)
    assert "for sites, but 1 of 3 are connected; refused a: unknown architecture 'dnn-8': method 'lg-fedavg'" in str(
        refused.value
    )
    assert "; refused c: unknown architecture 'dnn-8'" in str(refused.value)
    assert "refused a: unknown architecture 'dnn-8'" in deployment.log(run.name)


def test_a_robust_average_of_few_sites_is_refused_when_it_is_submitted(deployment):
    deployment.agree(method={"name": "fedavg"}, defence={"average": "median"})
    with pytest.raises(TaskError, match="'median' needs at least 5 clients in a round, got 3"):
        create_run(deployment)
    deployment.agree(method={"name": "fedme"})
    with pytest.raises(TaskError, match="'median' needs at least 5 copies of a model"):
        create_run(deployment)


@pytest.mark.parametrize("method", ["fd", "fedproto", "heterofl"])
def test_what_privacy_cannot_cover_is_refused_at_the_server_and_at_every_site(deployment, fedme, method):
    deployment.agree(method={"name": method}, privacy={"epsilon": 8.0}, models={"pool": ["dnn-16"], "shared": "dnn-16"})
    deployment.change(deployment.site("a") / "site.toml", model="dnn-16")
    commands = [("submit", "--federation", deployment.federation), ("node", deployment.site("a") / "site.toml", "--check")]
    for words in commands:
        code, _, err = fedme("deploy", *words)
        assert code == 2
        assert f"privacy: cannot cover method '{method}': its clients send" in " ".join(err.split())
