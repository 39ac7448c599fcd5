"""Real federations on loopback, with TLS and keys: the same models as in one process, whatever happens on the way."""

import json
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from deployment import Deployment, wait_for
from safetensors.torch import load_file

from fedme.experiment import newcomers, records

pytestmark = pytest.mark.deploy


@pytest.fixture
def deployment(tmp_path, request):
    made = Deployment(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


def check_models(deployment, run):
    """Every site has its personal model on its own disk, with the bits of one process; nobody else has it."""
    token = json.loads((deployment.federation / "runs" / run / "run.json").read_text())["run"]
    for name, model in deployment.expected().items():
        folder = deployment.site(name) / "state" / "runs" / token / "clients" / name
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == {**model.params, **model.buffers}.keys()
        assert all((saved[key] == value).all() for key, value in {**model.params, **model.buffers}.items())
        assert json.loads((folder / "model.json").read_text())["arch"] == model.arch.name
    assert not list((deployment.federation / "runs" / run).glob("clients"))
    offers = newcomers.offers(deployment.federation / "runs" / run, "fedme" if run == "experiment" else run)
    assert {offer.name for offer in offers} == {"experiment": {"a", "b", "c"}, "fml": {"global"}, "fedavg": {"global"}}[run]


def test_the_same_models_as_in_one_process(deployment):
    deployment.server()
    for name in "abc":
        deployment.node(name)
    assert deployment.submit().wait(1200) == 0, deployment.said_by("submit").read_text()
    check_models(deployment, "experiment")  # FedMe, of two architectures
    lines = [json.loads(line) for line in (deployment.site("a") / "state" / "audit.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["received", "sent", "received", "sent", "received"]
    assert {model["as"] for model in lines[0]["models"]} == {"own", "guest"}
    assert lines[0]["with"]["lender"] in "bc"
    ours = (deployment.federation / "runs" / "experiment" / "audit.jsonl").read_text().splitlines()
    assert len(ours) == 15
    for method in ("fml", "fedavg"):
        deployment.agree(method={"name": method}, name=method)
        assert deployment.submit().wait(1200) == 0, deployment.said_by("submit").read_text()
        check_models(deployment, method)
    status = json.loads(deployment.do("deploy", "status", "federation", "--json"))
    assert status["server"] == "up"
    assert status["sites"] == dict.fromkeys("abc", "online")
    assert {run["status"] for run in status["runs"].values()} == {"done"}
    assert "stopped the server" in deployment.do("deploy", "stop", "federation")


def test_private_sites_keep_their_own_accounts(deployment):
    deployment.agree(privacy={"epsilon": 8.0})
    deployment.server()
    for name in "abc":
        deployment.node(name)
    assert deployment.submit().wait(1200) == 0, deployment.said_by("submit").read_text()
    folder = deployment.federation / "runs" / "experiment"
    token = json.loads((folder / "run.json").read_text())["run"]
    told = {row["client"]: row["epsilon"] for row in records.read(folder)}
    assert all(7.8 < told[name] <= 8.0 for name in "abc")
    sites = json.loads((folder / "sites.json").read_text())
    for name in "abc":
        account = json.loads((deployment.site(name) / "state" / "runs" / token / "privacy.json").read_text())
        batches = -(-sites[name]["hello"]["samples"] // 20)
        assert [entry["steps"] for entry in account] == [2 * batches]  # two rounds of one epoch


def test_whoever_is_not_known_is_refused(deployment, tmp_path):
    deployment.server()
    other = Deployment(_folder(tmp_path / "other"))  # another authority, other keys
    (deployment.site("b") / "key").write_bytes((other.site("b") / "key").read_bytes())
    (deployment.site("c") / "ca.crt").write_bytes((other.site("c") / "ca.crt").read_bytes())
    wait_for(lambda: "registered c" in deployment.said_by("server").read_text(), "the server")
    for name in "abc":
        deployment.node(name)

    def online():
        return json.loads(deployment.do("deploy", "status", "federation", "--json"))["sites"]

    wait_for(lambda: online()["a"] == "online", "site a")
    wait_for(lambda: "node ended" in deployment.said_by("b").read_text(), "the refusal of an unknown key")
    wait_for(lambda: "ertificate" in _log(deployment, "c"), "the refusal of another authority")
    assert online()["b"] != "online"
    assert online()["c"] != "online"
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{deployment.port}/health", timeout=20)
    context = ssl.create_default_context(cafile=deployment.federation / "server" / "ca.crt")
    with urllib.request.urlopen(f"https://127.0.0.1:{deployment.port}/health", timeout=20, context=context) as answer:
        assert answer.status == 200


def test_a_site_that_does_not_fit_is_refused_by_name(deployment):
    deployment.change(deployment.federation / "federation.toml", min_sites=1)
    deployment.change(deployment.site("a") / "site.toml", model="dnn-4")  # not in the pool
    deployment.change(deployment.site("b") / "experiment.toml", seed=7)  # agreed to something else
    deployment.server()
    for name in "abc":
        deployment.node(name)
    deployment.submit()
    wait_for(lambda: "c is there" in deployment.log(), "site c")
    wait_for(lambda: "refused a: unknown architecture 'dnn-4'" in deployment.log(), "the refusal of a")
    said = wait_for(lambda: "refused b" in deployment.log() and deployment.log(), "the refusal of b")
    assert "the server's experiment is not the one this site agreed to: seed" in said


@pytest.mark.parametrize("deployment", [{"sites": "abcd", "min_sites": 2, "timeout": 400.0}], indirect=True)
def test_a_run_survives_what_happens(deployment):
    """One site raises, one is killed and comes back, the server is killed, one joins late, the server app is killed."""
    (deployment.folder / "flaky.py").write_text(FLAKY)
    deployment.agree(method={"name": "fml"}, rounds=5, evaluate_every=5)
    deployment.change(deployment.site("b") / "site.toml", model="flaky:Flaky")  # a private network of the site's own
    deployment.server()
    for name in "abc":
        deployment.node(name)
    wait_for(lambda: json.loads(deployment.do("deploy", "status", "federation", "--json"))["sites"].get("c") == "online", "c")
    deployment.submit()
    wait_for(lambda: "b is there: flaky:Flaky" in deployment.log(), "the sites")

    def rounds():
        path = deployment.federation / "runs" / "experiment"
        return max((row["round"] for row in records.read(path)), default=-1) if (path / records.NAME).exists() else -1

    wait_for(lambda: rounds() >= 0, "the first round")
    (deployment.folder / "raise").touch()  # the network of b raises
    os.kill(deployment.pids("flower-superlink")[0], signal.SIGKILL)
    wait_for(lambda: "superlink ended" in deployment.said_by("server").read_text(), "the server's end")
    wait_for(lambda: "b is missing: SiteError" in deployment.log(), "the failure of b")
    (deployment.folder / "raise").unlink()
    for pid in deployment.pids("flower-supernode", "sites/c"):
        os.kill(pid, signal.SIGKILL)
    deployment.node("d")
    wait_for(lambda: "joining in round" in deployment.log(), "the late joiner")
    wait_for(lambda: rounds() >= 2, "the third round")
    app = wait_for(lambda: deployment.pids("flwr-serverapp"), "the server app")
    for pid in app:
        os.kill(pid, signal.SIGKILL)
    assert deployment.processes["submit"].wait(300) == 2
    assert "--resume" in deployment.said_by("submit").read_text()
    time.sleep(2)
    assert deployment.submit("--resume").wait(1800) == 0, deployment.said_by("submit").read_text()
    rows = list(records.read(deployment.federation / "runs" / "experiment"))
    notes = {(row["round"], row["client"]): row["notes"] for row in rows if "notes" in row}
    assert {t for t, _ in notes} == set(range(5))
    assert "patient" not in deployment.log() + str(notes)  # what an error says of data stays at the site
    assert "patient 17" in _log(deployment, "b")
    assert any("SiteError" in str(note.get("missing")) for (_, client), note in notes.items() if client == "b")
    assert any(note.get("joined") for (_, client), note in notes.items() if client == "d")
    assert any("missing" in note for (_, client), note in notes.items() if client == "c")


def test_lost_state_is_noticed(deployment):
    deployment.agree(method={"name": "fml"}, rounds=2, evaluate_every=2)
    deployment.server()
    for name in "abc":
        deployment.node(name)
    deployment.submit()
    lost = wait_for(lambda: list((deployment.site("a") / "state").glob("runs/*/state-000001.safetensors")), "the first round")
    lost[0].unlink()
    assert deployment.processes["submit"].wait(1200) == 0, deployment.said_by("submit").read_text()
    rows = records.read(deployment.federation / "runs" / "experiment")
    assert [row["notes"]["lost_state"] for row in rows if "lost_state" in row.get("notes", {})] == ["version 0 instead of 1"]
    assert "a lost its private state" in deployment.log()


def test_a_model_of_100_megabytes_passes(deployment, capsys):
    wide = "dnn-5000-4900"  # 64 x 5000 + 5000 x 4900 + 4900 x 10 weights of four bytes: 100 MB
    deployment.agree(method={"name": "fedavg"}, rounds=1, models={"pool": [wide]})
    deployment.change(deployment.federation / "federation.toml", min_sites=2)
    deployment.server()
    for name in "ab":
        deployment.node(name)
    run, most = deployment.submit(), {}
    while run.poll() is None:
        for program in ("flower-superlink", "flwr-serverapp", "flower-supernode", "flwr-clientapp"):
            most[program] = max([most.get(program, 0), *map(_peak, deployment.pids(program))])
        time.sleep(0.5)
    assert run.wait() == 0, deployment.said_by("submit").read_text()
    sent = {row["client"]: row["bytes_up"] for row in records.read(deployment.federation / "runs" / "experiment")}
    assert set(sent) == set("ab")
    assert all(count > 99e6 for count in sent.values())
    with capsys.disabled():
        print("\npeak memory in MB:", {program: kilobytes // 1000 for program, kilobytes in most.items()})


def _peak(pid):
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


FLAKY = """
from pathlib import Path

from torch import nn


class Flaky(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def forward(self, x):
        if self.training and (Path(__file__).parent / "raise").exists():
            raise RuntimeError("the data of patient 17 is odd")
        return self.net(x)
"""


def _folder(path):
    path.mkdir()
    return path


def _log(deployment, name):
    path = deployment.site(name) / "state" / "log" / "node.log"
    return path.read_text() if path.exists() else ""
