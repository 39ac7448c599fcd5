"""The life of a federation: certificates that expire, other versions, backups, and small things that an operator notices."""

import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from fedme import __version__
from fedme.deployment import expiry, flower_site_internals, provisioning, site_app, status, submitted_runs
from fedme.deployment.node import check
from fedme.deployment.operator_folder import Federation
from fedme.deployment.site_settings import Site
from fedme.deployment.supervisor import Supervisor
from fedme_test_deployment import Deployment, LocalGrid, wait_for


@pytest.fixture
def deployment(tmp_path, request):
    made = Deployment(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


@pytest.fixture
def run(deployment):
    federation = Federation.read(deployment.federation)
    return submitted_runs.create(federation, submitted_runs.read(federation, federation.folder / "experiment.toml"))


@pytest.fixture
def expiring(tmp_path, monkeypatch):
    """A federation whose certificates expire in twelve days."""
    monkeypatch.setattr(provisioning, "YEARS", 12.5 / 365)
    return Deployment(tmp_path)


def test_the_expiry_of_certificates_is_named_in_the_logs_and_by_status(expiring, fedme):
    server, said = expiring.federation / "server", []
    reminder = expiry.Reminder([server / "server.crt", server / "ca.crt"], expiry.RENEW, said.append)
    reminder()
    reminder()  # once a day
    expected = [
        f"warning: {name} expires in 12 days; `fedme deploy renew` makes a new one" for name in ("server.crt", "ca.crt")
    ]
    assert said == expected
    reminder.next_time = 0.0
    reminder()
    assert said == 2 * expected
    _, _, err = fedme("deploy", "status", expiring.federation)
    assert all(line in " ".join(err.split()) for line in expected)
    _, _, err = fedme("deploy", "status", expiring.site("a"))
    assert "warning: ca.crt expires in 12 days; ask the operator for the new one" in " ".join(err.split())


def test_certificates_are_named_thirty_days_ahead_and_not_before():
    days = {"now": 29, "later": 30, "none": None, "over": -1}
    assert expiry.warnings(days, "renew") == ["now expires in 29 days; renew", "over has expired; renew"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "certificate verify failed: certificate has expired (_ssl.c:1006)",
            "has expired; the operator runs `fedme deploy renew`",
        ),
        ("certificate verify failed: self-signed certificate in chain", "is not signed by the authority that this site trusts"),
    ],
)
def test_a_refused_certificate_is_explained(tmp_path, text, reason):
    supervisor, line = Supervisor(tmp_path, {}, print), f"[SSL: CERTIFICATE_VERIFY_FAILED] {text}"
    supervisor.start("node", lambda: [sys.executable, "-c", f"print({line!r})"])
    supervisor.processes["node"].wait(60)
    assert reason in supervisor._last_error("node")
    supervisor.close()


def test_a_run_begun_with_another_version_says_so_in_one_line(deployment, run):
    path = run / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fedme": "0.0.9"}))
    log = LocalGrid(deployment).run_server(run)
    assert log.count("this run was begun with FedMe 0.0.9 and continues with " + __version__) == 1


def test_results_are_for_the_operator_only(deployment, run):
    assert (deployment.federation / "runs").stat().st_mode & 0o777 == 0o700


def test_a_refused_reply_is_in_the_log_and_in_the_status(deployment, run, monkeypatch):
    class Absurd(site_app.InProcessEngine):
        def exchange(self, downs, when):
            replies = super().exchange(downs, when)
            return {name: replace(reply, seconds=1e308) if name == "a" else reply for name, reply in replies.items()}

    monkeypatch.setattr(site_app, "InProcessEngine", Absurd)
    log = LocalGrid(deployment).run_server(run)
    for t in range(2):
        (line,) = [line for line in log.splitlines() if line.startswith(f"round {t}: a: refused: ")]
        assert line.endswith("got 1e+308")
        assert len(line) < 120
    assert status.of_server(Federation.read(deployment.federation))["sites"]["a"]["refused"] == 2


def test_a_site_that_validates_on_its_training_sample_is_told(deployment):
    np.savez(deployment.site("a") / "data.npz", x=np.zeros((2, 1, 8, 8), "uint8"), y=np.arange(2))
    assert "note: a has a single training sample, which is the validation sample too" in check(
        Site.read(deployment.site("a") / "site.toml")
    )
    assert "note" not in check(Site.read(deployment.site("b") / "site.toml"))


def test_starting_client_apps_goes_on_after_an_error(monkeypatch):
    """A node went on without it, and answered nothing."""
    started = []

    def run_superexec(address, insecure, superexec_auth_secret):
        superexec.register_signal_handlers(event_type=None)  # only the main thread may set them
        assert isinstance(superexec.get_executor(), flower_site_internals.ClientAppExecutor)
        started.append((address, superexec_auth_secret))
        raise RuntimeError if len(started) < 3 else KeyboardInterrupt

    superexec = SimpleNamespace(run_superexec=run_superexec, log=lambda *_: None)
    monkeypatch.setattr(flower_site_internals, "RESTART_DELAY", 0.0)
    monkeypatch.setitem(sys.modules, "flwr.supercore.superexec.run_superexec", superexec)
    with pytest.raises(KeyboardInterrupt):
        flower_site_internals._execute("127.0.0.1:1", b"secret", threading.Event())
    assert started == 3 * [("127.0.0.1:1", b"secret")]


@pytest.mark.deploy
@pytest.mark.parametrize("deployment", [{"sites": "ab", "min_replies": 2}], indirect=True)
def test_a_restored_backup_continues_the_run_in_another_folder(deployment):
    """As docs/deploy.md says: the server is stopped and its folder packed; another folder gets the copy."""
    deployment.agree(rounds=3, evaluate_every=3)
    deployment.hand_over()
    deployment.server()
    for name in deployment.names:
        deployment.node(name)
    deployment.submit("--detach").wait(600)
    folder = deployment.federation / "runs" / "experiment"
    wait_for(lambda: submitted_runs.rounds_done(folder) >= 1, "the first round")
    deployment.stop("server")
    assert not submitted_runs.done(folder)
    backup = deployment.folder / "backup.tar"
    subprocess.run(["tar", "--create", "--file", backup, "--directory", deployment.federation, "."], check=True)
    shutil.rmtree(deployment.federation)
    deployment.federation = deployment.folder / "elsewhere"
    deployment.federation.mkdir()
    subprocess.run(["tar", "--extract", "--file", backup, "--directory", deployment.federation], check=True)
    registration = deployment.federation / "server" / "nodes" / "b.json"
    before = json.loads(registration.read_text())
    registration.unlink()  # as if the server had been killed when Flower had registered the key, before it wrote this
    deployment.start("server", "deploy", "server", "elsewhere")
    folder = deployment.federation / "runs" / "experiment"
    wait_for(lambda: submitted_runs.done(folder) and not submitted_runs.without_model(folder), "the end of the run")
    assert not (deployment.folder / "federation").exists()
    for name, model in deployment.expected().items():
        (file,) = deployment.site(name).glob("state/runs/*/clients/*/model.safetensors")
        saved = load_file(file)
        assert all((saved[key] == value).all() for key, value in {**model.params, **model.buffers}.items())
    assert int(json.loads(registration.read_text())["node-id"]) == int(before["node-id"])
    assert stat_mode(deployment.federation / "server" / "server.key") == 0o600


def stat_mode(path):
    return path.stat().st_mode & 0o777


OTHER_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static const time_t ahead = 7200;

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += ahead;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    if (now) *now = time.tv_sec;
    return time.tv_sec;
}
"""


@pytest.fixture
def other_clock(tmp_path):
    """A library for LD_PRELOAD that sets the time of day two hours ahead, and nothing else.

    The package libfaketime 0.9.10 does not do for Python 3.11. If it shifts the monotonic clock, waits with a timeout never end
    (`sem_clockwait` gets the shifted time, and is not replaced): a node that has to wait for its server hangs. If it does not,
    `time.sleep` fails (`clock_nanosleep`: invalid argument).
    """
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, on Linux")
    (tmp_path / "clock.c").write_text(OTHER_CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    return library


@pytest.mark.deploy
@pytest.mark.parametrize("deployment", [{"sites": "a"}], indirect=True)
def test_a_site_whose_clock_is_off_says_so_and_takes_part_once_it_is_set(deployment, other_clock, monkeypatch):
    status_of_a = lambda: json.loads(deployment.do("deploy", "status", "federation", "--json"))["sites"]["a"]["status"]  # noqa: E731
    command = deployment.command
    monkeypatch.setattr(deployment, "command", lambda *words: ["env", f"LD_PRELOAD={other_clock}", *command(*words)])
    deployment.node("a")  # it has to wait for its server
    monkeypatch.undo()
    output = deployment.output_of("a")
    wait_for(lambda: "a: connecting to" in output.read_text(), "the node")
    deployment.server()
    reason = r"a: node ended \(this machine's clock is 7\d\d\d s ahead of the server's"
    wait_for(lambda: re.search(reason, output.read_text()), "the reason")
    assert status_of_a() != "online"
    deployment.stop("a")
    deployment.node("a")
    deployment.connected("a")
    assert status_of_a() == "online"
