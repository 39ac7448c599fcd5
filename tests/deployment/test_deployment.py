"""Real federations on loopback, with TLS and keys: the same models as in one process, despite failures."""

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedme.artifacts import unseen_clients
from fedme.config.experiment import load
from fedme.deployment import submitted_runs
from fedme.deployment.operator_folder import Federation, program
from fedme.deployment.privacy_account import PrivacyAccount
from fedme.deployment.site_settings import Site
from fedme.results import records
from fedme_test_deployment import Deployment, free_port, wait_for

pytestmark = pytest.mark.deploy


@pytest.fixture
def deployment(tmp_path, request):
    made = Deployment(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


NETWORK = """
import time
from pathlib import Path

from torch import nn

HERE = Path(__file__).parent


def held(stage):  # hold-train or hold-evaluate stops the network; with a pattern in it, once the site has such a file
    try:
        pattern = (HERE / f"hold-{stage}").read_text()
    except FileNotFoundError:
        return False
    return not pattern or any(HERE.glob(pattern))


class Own(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, classes))

    def forward(self, x):
        stage = "train" if self.training else "evaluate"
        while len(x) > 2 and held(stage):  # two samples: a check that the network fits the data
            (HERE / f"held-{stage}").touch()
            time.sleep(0.2)
        if (HERE / f"raise-{stage}").exists():
            raise RuntimeError("the data of patient 17 is odd")
        return self.net(x)
"""


AFTER_ROUND_0 = "state/runs/*/state-000001.safetensors"


def bring_network(deployment, name, monkeypatch):
    """Give the site its own private network, in a file beside its site.toml."""
    (deployment.site(name) / f"network_{name}.py").write_text(NETWORK)
    deployment.change(deployment.site(name) / "site.toml", model=f"network_{name}:Own")
    monkeypatch.syspath_prepend(deployment.site(name))


def status(deployment):
    state = json.loads(deployment.do("deploy", "status", "federation", "--json"))
    return state | {"sites": {name: site["status"] for name, site in state["sites"].items()}}


def personal(deployment, run, name):
    token = json.loads((deployment.federation / "runs" / run / "run.json").read_text())["run"]
    return deployment.site(name) / "state" / "runs" / token / "clients" / name


def check_models(deployment, run):
    """Every site, and no other machine, has its personal model, identical to that of a run in one process."""
    for name, model in deployment.expected().items():
        folder = personal(deployment, run, name)
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == {**model.params, **model.buffers}.keys()
        assert all((saved[key] == value).all() for key, value in {**model.params, **model.buffers}.items())
        assert json.loads((folder / "model.json").read_text())["arch"] == model.arch.name
    assert not list((deployment.federation / "runs" / run).glob("clients"))
    folder = deployment.federation / "runs" / run
    offers = unseen_clients.load_offers(folder, load(folder / "config.toml")[0])
    assert {offer.name for offer in offers} == (set("abc") if run == "experiment" else {"global"})


def test_the_same_models_as_in_one_process(deployment, monkeypatch):
    deployment.server()
    for name in "abc":
        deployment.node(name)
    assert deployment.submit().wait(1200) == 0, deployment.output_of("submit").read_text()
    check_models(deployment, "experiment")  # FedMe, of two architectures
    lines = [json.loads(line) for line in (deployment.site("a") / "records" / "audit.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["sent", *(["received", "sent"] * 3)]  # a handshake, two rounds, an evaluation
    assert {model["as"] for model in lines[1]["models"]} == {"own", "guest"}
    assert lines[1]["with"]["lender"] in "bc"
    ours = (deployment.federation / "runs" / "experiment" / "audit.jsonl").read_text().splitlines()
    assert len(ours) == 15
    bring_network(deployment, "b", monkeypatch)
    for method in ("fml", "pfml", "fedavg"):
        deployment.agree(method={"name": method}, name=method)
        assert deployment.submit().wait(1200) == 0, deployment.output_of("submit").read_text()
        check_models(deployment, method)
        assert ("b connected: network_b:Own" in deployment.log(method)) == (method != "fedavg")
    state = status(deployment)
    assert state["server"] == "up"
    assert state["sites"] == dict.fromkeys("abc", "online")
    assert {run["status"] for run in state["runs"].values()} == {"done"}
    assert "stopped the server" in deployment.do("deploy", "stop", "federation")


def test_private_sites_keep_their_own_accounts(deployment):
    deployment.agree(privacy={"epsilon": 8.0})
    deployment.server()
    for name in "abc":
        deployment.node(name)
    assert deployment.submit().wait(1200) == 0, deployment.output_of("submit").read_text()
    folder = deployment.federation / "runs" / "experiment"
    token = json.loads((folder / "run.json").read_text())["run"]
    epsilons = {row["client"]: row["epsilon"] for row in records.read(folder)}
    assert all(7.8 < epsilons[name] <= 8.0 for name in "abc")
    sites = json.loads((folder / "sites.json").read_text())
    for name in "abc":
        account = PrivacyAccount.of(Site.read(deployment.site(name) / "site.toml"))
        batches = -(-sites[name]["handshake"]["samples"] // 20)
        assert [cost.steps for cost in account.ledger(token)] == [2 * batches]  # two rounds of one epoch


@pytest.mark.parametrize("deployment", [{"host": "127.0.0.2"}], indirect=True)
def test_whoever_is_not_known_is_refused(deployment, tmp_path):
    deployment.server()
    other = Deployment(_folder(tmp_path / "other"))  # another authority, other keys
    (deployment.site("b") / "key").write_bytes((other.site("b") / "key").read_bytes())
    (deployment.site("c") / "ca.crt").write_bytes((other.site("c") / "ca.crt").read_bytes())
    wait_for(lambda: "registered c" in deployment.output_of("server").read_text(), "the server")
    for name in "abc":
        deployment.node(name)
    deployment.connected("a")
    wait_for(lambda: "does not know this site's key" in deployment.output_of("b").read_text(), "the refusal of an unknown key")
    wait_for(
        lambda: "c: node ended (the server's certificate is not" in deployment.output_of("c").read_text(), "the other refusal"
    )
    assert f"a: connected to 127.0.0.2:{deployment.port}" in deployment.output_of("a").read_text()
    sites = status(deployment)["sites"]
    assert sites["a"] == "online"
    assert sites["b"] != "online"
    assert sites["c"] != "online"

    # The port for sites serves only the fleet API; the rest of Flower's server is reachable from this machine only.
    context = ssl.create_default_context(cafile=deployment.federation / "server" / "ca.crt")

    def code(path, host="127.0.0.2", port=deployment.port, method="POST"):
        """The status code of a request for exactly this path."""
        with closing(http.client.HTTPSConnection(host, port, timeout=20, context=context)) as line:
            line.request(method, path, b"", {"content-type": "application/protobuf"})
            return line.getresponse().status

    assert code("/v1/fleet/pull-messages") == 401  # the server asks for a signature
    assert code("/health", "127.0.0.1", deployment.control, "GET") == 200
    assert code("/v1/control/list-nodes", "127.0.0.1", deployment.control) != 404
    for path in (
        "/v1/control/list-nodes",
        "/v1/runtime/acquire-task",
        "/docs",
        "/health",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1/fleet/..%2fcontrol/list-nodes",
        "//v1/control/list-nodes",
        "/v1/fleet/x?/../../control/list-nodes",
    ):
        assert code(path) == 404, path
        assert code(path, method="GET") == 404, path
    with pytest.raises(ConnectionRefusedError):
        code("/health", "127.0.0.2", deployment.control)
    for port in (deployment.port, deployment.control):
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            urllib.request.urlopen(f"http://127.0.0.{1 + (port == deployment.port)}:{port}/health", timeout=20)

    # Flower's command line cannot start a run or register a key through the port for sites.
    home = _folder(tmp_path / "home")
    trust = deployment.federation / "server" / "ca.crt"
    (home / "config.toml").write_text(
        f'[superlink.sites]\naddress = "127.0.0.2:{deployment.port}"\nroot-certificates = "{trust}"\n'
        f'[superlink.here]\naddress = "127.0.0.1:{deployment.control}"\nroot-certificates = "{trust}"\n'
    )
    environment = {**os.environ, **Federation.read(deployment.federation).environment(), "FLWR_HOME": str(home)}

    def flwr(*words):
        command = [program("flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return '"success": true' in done.stdout, done.stdout

    assert flwr("supernode", "list", "here")[0]
    app = str(deployment.federation / "server" / "app")
    for words in (
        ("run", app, "sites"),
        ("supernode", "register", str(other.site("a") / "key.pub"), "sites"),
        ("list", "sites"),
    ):
        passed, output = flwr(*words)
        assert not passed, output
        assert "404" in output

    # A site may create its own key pair and send the public key.
    shutil.copy(other.site("b") / "key.pub", deployment.site("b") / "key.pub")
    wait_for(lambda: "b: connected" in deployment.output_of("b").read_text(), "site b")
    assert deployment.output_of("server").read_text().count("registered b") == 2


def test_a_site_leaves_and_another_is_removed(deployment):
    """A site that has left is stopped and stays away; the key of one that was removed is refused, also after a restart."""
    deployment.server()
    for name in "abc":
        deployment.node(name)
    deployment.connected(*"abc")
    assert status(deployment)["sites"] == dict.fromkeys("abc", "online")
    shutil.copytree(deployment.site("c"), deployment.folder / "copy")  # of a site that is connected
    deployment.start("copy", "deploy", "node", str(deployment.folder / "copy" / "site.toml"))
    assert "its node is stopped" in deployment.do("deploy", "leave", str(deployment.site("a") / "site.toml"))
    assert deployment.processes.pop("a").wait(60) == 0
    assert "this site has left" in deployment.do("deploy", "node", str(deployment.site("a") / "site.toml"), code=2)
    before = len(deployment.output_of("b").read_text())  # it may have started before its key was registered
    assert "removed b: its key is refused from now on" in deployment.do("deploy", "remove", "federation", "b")
    refusal = "the server does not know this site's key"
    wait_for(lambda: refusal in deployment.output_of("b").read_text()[before:], "the refusal of b")
    assert "b" not in status(deployment)["sites"]
    assert deployment.output_of("server").read_text().count("registered b") == 1
    wait_for(lambda: "has another node with it: a copy of this folder" in deployment.output_of("copy").read_text(), "the copy")
    assert status(deployment)["sites"]["c"] == "online"


def test_a_site_that_does_not_fit_is_refused_by_name(deployment):
    state = status(deployment)
    assert (state["server"], state["address"], state["runs"]) == ("down", f"127.0.0.1:{deployment.port}", {})
    assert state["sites"] == dict.fromkeys("abc", "unknown: the server is down")
    assert "nothing was running" in deployment.do("deploy", "stop", "federation")
    deployment.settings(min_sites=1, min_replies=2)  # no round starts with c only
    deployment.change(deployment.site("a") / "site.toml", model="dnn-4")  # not in the pool
    deployment.change(deployment.site("b") / "experiment.toml", seed=7)  # agreed to something else
    deployment.server()
    for name in "abc":
        deployment.node(name)
    deployment.submit()
    wait_for(lambda: "c connected" in deployment.log(), "site c")
    wait_for(lambda: "refused a: unknown architecture 'dnn-4'" in deployment.log(), "the refusal of a")
    reason = "the server's experiment differs from the one this site agreed to: seed"
    wait_for(lambda: f"refused b: {reason}" in deployment.log(), "the refusal of b")
    wait_for(lambda: "waiting for sites: 1 of 2 are connected" in deployment.log(), "the server to wait")
    assert status(deployment)["runs"]["experiment"] == {
        "status": "running",
        "rounds": 0,
        "of": 2,
        "without_model": [],
        "failure": None,
    }
    assert "stopped experiment; `fedme deploy submit --resume" in deployment.do("deploy", "stop", "federation", "--run")
    assert deployment.processes["submit"].wait(60) == 2
    assert "the run ended: stopped by the operator; `fedme deploy submit" in deployment.output_of("submit").read_text()
    assert "nothing was running" in deployment.do("deploy", "stop", "federation", "--run")
    state = status(deployment)
    assert (state["server"], state["runs"]["experiment"]["status"]) == ("up", "stopped")
    assert "stopped the server" in deployment.do("deploy", "stop", "federation")
    assert deployment.processes["server"].wait(60) == 0
    assert status(deployment)["server"] == "down"


@pytest.mark.parametrize("deployment", [{"sites": "abcd", "min_sites": 2, "timeout": 400.0}], indirect=True)
def test_a_run_survives_what_happens(deployment, monkeypatch):
    """One site raises, one is killed and comes back, the server is killed, one joins late, the server app is killed."""
    deployment.agree(method={"name": "fml"}, rounds=5, evaluate_every=5)
    bring_network(deployment, "b", monkeypatch)
    hold, fail = deployment.site("b") / "hold-train", deployment.site("b") / "raise-train"
    deployment.server()
    for name in "abc":
        deployment.node(name)
    deployment.connected("c")
    hold.write_text(AFTER_ROUND_0)  # b takes its time in round 1, and then fails
    deployment.submit()
    wait_for(lambda: "b connected: network_b:Own" in deployment.log(), "the sites")

    def missed(client):
        path = deployment.federation / "runs" / "experiment"
        rows = records.read(path) if (path / records.NAME).exists() else ()
        return any(row["client"] == client and "missing" in row.get("notes", {}) for row in rows)

    wait_for((deployment.site("b") / "held-train").exists, "b at work in round 1")
    fail.touch()
    os.kill(deployment.pids("flower-superlink")[0], signal.SIGKILL)
    wait_for(lambda: "superlink ended" in deployment.output_of("server").read_text(), "the server's end")
    deployment.stop("c", signal.SIGKILL)  # its programs end with it
    deployment.node("d")
    deployment.connected("d")
    hold.unlink()
    wait_for(lambda: "no reply from b: RuntimeError (see the site's log)" in deployment.log(), "the failure of b")
    fail.unlink()
    wait_for(lambda: "joins in round 2" in deployment.log(), "the late joiner")
    assert "server.crt" in deployment.do("deploy", "renew", "federation")
    wait_for(lambda: "the server has a new certificate" in deployment.output_of("server").read_text(), "the new certificate")
    wait_for(lambda: missed("c"), "a round without c")  # not seen at the end, if the continued run repeats this round with c
    deployment.node("c")
    app = wait_for(lambda: deployment.pids("flwr-serverapp"), "the server app")
    for pid in app:
        os.kill(pid, signal.SIGKILL)
    assert deployment.processes["submit"].wait(1800) == 0, deployment.output_of("submit").read_text()
    assert (
        "the server app ended before the run was done; the server continues the run"
        in deployment.output_of("submit").read_text()
    )
    assert "experiment: its server app ended before it was done; continuing it" in deployment.output_of("server").read_text()
    rows = list(records.read(deployment.federation / "runs" / "experiment"))
    notes = {(row["round"], row["client"]): row["notes"] for row in rows if "notes" in row}
    assert {t for t, _ in notes} == set(range(5))
    assert "patient" not in deployment.log() + str(notes)  # the text of an error stays at the site
    assert "patient 17" in _log(deployment, "b")
    assert notes[1, "b"]["missing"] == "RuntimeError (see the site's log)"
    assert {t for t, client in notes if client == "d"} == {2, 3, 4}
    assert notes[2, "d"]["joined"] == 2


@pytest.mark.parametrize("deployment", [{"min_replies": 3}], indirect=True)
def test_lost_state_is_noticed_and_nobody_is_forgotten(deployment, monkeypatch):
    """One site loses its state. Another disconnects: the round waits for it, and it gets its model after the end of the run."""
    deployment.agree(method={"name": "fml"}, rounds=2, evaluate_every=2)
    bring_network(deployment, "c", monkeypatch)
    deployment.server()
    for name in "abc":
        deployment.node(name)
    (deployment.site("c") / "hold-train").touch()  # no round ends without c
    deployment.submit()
    wait_for(lambda: list(deployment.site("a").glob(AFTER_ROUND_0)), "the first round")
    shutil.rmtree(deployment.site("a") / "state" / "runs")
    for stage in ("train", "evaluate"):
        (deployment.site("c") / f"hold-{stage}").write_text(AFTER_ROUND_0)
    wait_for(lambda: list(deployment.site("c").glob(AFTER_ROUND_0)), "the first round of c")
    (deployment.site("c") / "held-train").unlink(missing_ok=True)
    wait_for((deployment.site("c") / "held-train").exists, "c at work in round 1")
    _leave(deployment, "c")
    wait_for(lambda: "round 1: 2 of 3 needed replies; asking the others again" in deployment.log(), "the round to wait")
    (deployment.site("c") / "hold-train").unlink()
    deployment.node("c")
    wait_for((deployment.site("c") / "held-evaluate").exists, "c at work at the end")
    _leave(deployment, "c")
    assert deployment.processes["submit"].wait(1200) == 0, deployment.output_of("submit").read_text()
    rows = list(records.read(deployment.federation / "runs" / "experiment"))
    assert [row["notes"]["lost_state"] for row in rows if "lost_state" in row.get("notes", {})] == ["version 0 instead of 1"]
    assert "a lost its private state" in deployment.log()
    assert not any("missing" in row.get("notes", {}) for row in rows)
    output = deployment.output_of("submit").read_text()
    assert "not connected at the end: c; they get their models when they are back" in output
    assert status(deployment)["runs"]["experiment"]["without_model"] == ["c"]
    assert not personal(deployment, "experiment", "c").exists()
    (deployment.site("c") / "hold-evaluate").unlink()
    deployment.node("c")
    wait_for(lambda: not submitted_runs.without_model(deployment.federation / "runs" / "experiment"), "the delivery to c")
    assert status(deployment)["runs"]["experiment"]["without_model"] == []
    assert json.loads((personal(deployment, "experiment", "c") / "model.json").read_text())["arch"] == "network_c:Own"


@pytest.mark.parametrize("deployment", [{"sites": "ab"}], indirect=True)
def test_the_printed_commands_do_it_too(deployment):
    """A shell, systemd or Kubernetes can run the commands that --dry-run prints."""
    deployment.agree(rounds=1)

    def printed(*words):
        export, *commands = deployment.do("deploy", *words, "--dry-run").splitlines()
        assert export.startswith("export ")
        return export, [command for command in commands if not command.startswith("#")]

    def shell(name, export, command):
        with deployment.output_of(name).open("ab") as output:
            words = ["bash", "-c", f"{export}\nexec {command}"]
            deployment.processes[name] = subprocess.Popen(words, cwd="/", stdout=output, stderr=output)

    export, commands = printed("server", "federation")
    for name, command in zip(("superlink", "superexec", "proxy"), commands[:3], strict=True):
        shell(name, export, command)
    wait_for(lambda: status(deployment)["server"] == "up", "the server", pause=2)
    for command in commands[3:]:
        subprocess.run(["bash", "-c", f"{export}\n{command}"], check=True, timeout=120)
    for name in "ab":
        export, (command,) = printed("node", str(deployment.site(name) / "site.toml"))
        shell(name, export, command)
    wait_for(lambda: status(deployment)["sites"] == dict.fromkeys("ab", "online"), "the sites", pause=2)
    export, commands = printed("submit", "--federation", "federation")
    subprocess.run(["bash", "-c", "\n".join(["set -e", export, *commands])], check=True, cwd="/", timeout=300)
    wait_for(lambda: submitted_runs.done(deployment.federation / "runs" / "experiment"), "the run")
    wait_for(lambda: not submitted_runs.running(deployment.federation / "runs" / "experiment"), "the end of the server app")
    for name in "ab":
        assert (personal(deployment, "experiment", name) / "model.safetensors").exists()


def test_insecure_only_when_asked(tmp_path):
    """It works without encryption and keys, and every command warns."""
    made = Deployment.__new__(Deployment)
    made.prepare(tmp_path)
    port = free_port()
    words = ["init", "federation", "experiment.toml", "--sites", "a,b", "--port", str(port), "--insecure"]
    warning = "warning: insecure: no encryption and no authentication"
    assert warning in made.do("deploy", *words)
    made.write_data("ab")
    made.agree(rounds=1)
    assert not list(made.federation.rglob("*.crt")) + list(made.federation.rglob("key"))
    try:
        made.server()
        for name in "ab":
            made.node(name)
        assert made.submit().wait(600) == 0, made.output_of("submit").read_text()
        for name in "ab":
            assert warning in made.output_of(name).read_text()
            assert (personal(made, "experiment", name) / "model.safetensors").exists()
        assert warning in made.output_of("server").read_text()
        assert warning in made.output_of("submit").read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/health", timeout=20) as answer:
            assert answer.status == 200
    finally:
        made.end()


def test_a_model_of_100_megabytes_passes(deployment, capsys):
    wide = "dnn-5000-4900"  # 64 x 5000 + 5000 x 4900 + 4900 x 10 weights of four bytes: 100 MB
    deployment.agree(method={"name": "fedavg"}, rounds=1, models={"pool": [wide]})
    deployment.settings(min_sites=2)
    deployment.server()
    for name in "ab":
        deployment.node(name)
    run, most = deployment.submit(), {}
    while run.poll() is None:
        for words in (
            "flower-superlink",
            "fedme.deployment.reverse_proxy",
            "flwr-serverapp",
            "flower_site_internals node",
            "flower_site_internals client",
        ):
            most[words] = max([most.get(words, 0), *map(_peak, deployment.pids(words))])
        time.sleep(0.5)
    assert run.wait() == 0, deployment.output_of("submit").read_text()
    sent = {row["client"]: row["bytes_up"] for row in records.read(deployment.federation / "runs" / "experiment")}
    assert set(sent) == set("ab")
    assert all(count > 99e6 for count in sent.values())
    with capsys.disabled():
        print("\npeak memory in MB:", {program: kilobytes // 1000 for program, kilobytes in most.items()})


def _leave(deployment, name):
    """End a site's node and the client app that it runs."""
    deployment.stop(name)
    for pid in deployment.pids("flower_site_internals client", f"sites/{name}"):
        os.kill(pid, signal.SIGKILL)


def _peak(pid):
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _folder(path):
    path.mkdir()
    return path


def _log(deployment, name):
    path = deployment.site(name) / "state" / "log" / "node.log"
    return path.read_text() if path.exists() else ""
