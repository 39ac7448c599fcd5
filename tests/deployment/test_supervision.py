"""Programs end with their supervisor; runs that ended early are continued; clocks and servers that are not there are named."""

import email.utils
import http.client
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time

import httpx
import pytest
from cryptography import x509

from fedme.core.atomic_files import RunError, locked
from fedme.deployment import attempts, operator, resumption, server_clock, status, status_page, submitted_runs, transfer_log
from fedme.deployment.operator_folder import Federation
from fedme.deployment.resumption import Resumer
from fedme.deployment.site_engine import SiteEngine
from fedme.deployment.site_settings import Site
from fedme.deployment.supervisor import Supervisor
from fedme.federation.flower import EngineError
from fedme.report import chromium
from fedme.results import records, verdicts
from fedme.running import round_loop
from fedme_test_browser import needs_chromium, new_page
from fedme_test_deployment import Deployment, LocalGrid, wait_for

SUPERVISED = """
import sys
from pathlib import Path
from fedme.deployment.site_engine import SiteEngine
from fedme.deployment.site_settings import Site
from fedme.deployment.supervisor import Supervisor

supervisor = Supervisor(Path(sys.argv[1]), {}, print)
supervisor.start("program", lambda: [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
supervisor.run_until_stopped()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_programs_end_with_a_supervisor_that_is_killed(tmp_path):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED, tmp_path])
    log = tmp_path / "program.log"
    pid = int(wait_for(lambda: log.exists() and log.read_text().strip(), "the program", 60))
    assert alive(pid)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not alive(pid), "the end of the program", 30)


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path)
    yield made
    made.end()


@pytest.fixture
def run(deployment):
    federation = Federation.read(deployment.federation)
    return submitted_runs.create(federation, submitted_runs.read(federation, federation.folder / "experiment.toml"))


@pytest.fixture
def resumer(deployment, monkeypatch):
    """A resumer whose attempts are counted instead of being given to Flower's server."""
    said = []
    made = Resumer(Federation.read(deployment.federation), said.append)
    made.said, made.started = said, []

    def start_attempt(federation, folder, patience):
        made.started.append(folder.name)
        attempts.begin(folder, submitted_runs.rounds_done(folder))

    monkeypatch.setattr(operator, "start_attempt", start_attempt)
    for name in ("POLL_INTERVAL", "FIRST_DELAY", "QUESTION_INTERVAL"):
        monkeypatch.setattr(resumption, name, 0.0)
    return made


def test_a_killed_server_app_is_followed_by_the_next_attempt(run, resumer):
    resumer()
    assert resumer.started == []  # nobody has submitted it yet
    attempts.begin(run, 0)
    attempts.record_start(run)
    with locked(run):
        resumer()
    assert resumer.started == []  # it is at work
    resumer()
    assert resumer.started == ["experiment"]
    assert "experiment: its server app ended before it was done; continuing it" in resumer.said


def test_outages_are_tried_again_without_end_and_errors_three_times(run, resumer):
    attempts.begin(run, 0)
    for _ in range(5):
        attempts.record_start(run)
        attempts.record_failure(run, "waited 3600 s for sites", "outage")
        resumer()
    assert len(resumer.started) == 5
    for _ in range(attempts.MAX_FRUITLESS):
        attempts.record_start(run)
        attempts.record_failure(run, "no such layer", "error")
        resumer()
    resumer()
    assert len(resumer.started) == 5 + attempts.MAX_FRUITLESS - 1
    assert attempts.failure(run) == attempts.Failure("no such layer", "given up")
    assert sum("gave up after 3 attempts" in line and "no such layer" in line for line in resumer.said) == 1


def test_the_server_does_not_wait_for_its_own_programs(deployment, run):
    # It did, for five minutes, and meanwhile restarted none of them.
    said = []
    resumer = Resumer(Federation.read(deployment.federation), said.append)
    attempts.begin(run, 0)
    attempts.record_start(run)
    before = time.monotonic()
    resumer()
    assert time.monotonic() - before < 60
    assert any(f"no server at 127.0.0.1:{deployment.control} yet; trying again" in line for line in said)
    assert attempts.attempt(run).number == 1


def test_a_line_of_information_is_not_taken_for_an_error(tmp_path):
    said = []
    supervisor = Supervisor(tmp_path, {}, said.append)
    text = "2026-01-01 INFO [uvicorn.error] Finished server process"
    supervisor.start("program", lambda: [sys.executable, "-c", f"print({text!r})"])
    supervisor.processes["program"].wait(60)
    supervisor._restart_ended()
    assert said == ["program ended (code 0); starting it again in 1 s"]
    supervisor.close()


def test_a_restart_that_was_asked_for_has_its_own_reason(tmp_path):
    """Any earlier error in the output of Flower's server was named after `fedme deploy renew`."""
    said = []
    supervisor = Supervisor(tmp_path, {}, said.append)
    # With a handler, as Flower's programs: a shell's `&` leaves SIGINT ignored.
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print('Error: long ago', flush=True); time.sleep(600)"
    )
    supervisor.start("program", lambda: [sys.executable, "-c", code])
    wait_for(lambda: "long ago" in supervisor.output("program"), "the program", 60)
    supervisor.restart("program", "a new certificate")
    supervisor.processes["program"].wait(60)
    supervisor._restart_ended()
    assert said == ["program ended (a new certificate); starting it again in 1 s"]
    supervisor.close()


def test_a_run_that_the_operator_stopped_is_left_alone(run, resumer):
    attempts.begin(run, 0)
    attempts.record_start(run)
    attempts.record_failure(run, "stopped by the operator", "stopped")
    resumer()
    assert resumer.started == []


def test_an_attempt_that_flower_has_forgotten_is_repeated(run, resumer, monkeypatch):
    attempts.accept(run, attempts.begin(run, 0), "17")
    answers = [None, {"17": "pending"}, {"17": "finished:failed"}]
    monkeypatch.setattr(operator, "runs_of_flower", lambda federation: answers.pop(0))
    resumer()
    resumer()
    assert resumer.started == []  # no answer; it will start
    resumer()
    assert resumer.started == ["experiment"]


def test_an_attempt_that_is_being_started_is_left_alone(run, resumer, monkeypatch):
    # The server took a `submit` that waited for Flower's answer for a forgotten attempt, and started a second one.
    monkeypatch.setattr(operator, "runs_of_flower", lambda federation: {})
    with attempts.starting(run):
        attempts.begin(run, 0)
        resumer()
    assert resumer.started == []
    resumer()  # whoever started it is gone
    assert resumer.started == ["experiment"]


def test_only_one_process_starts_an_attempt(deployment, run):
    with attempts.starting(run), pytest.raises(RunError, match="in use by process"):
        operator.start_attempt(Federation.read(deployment.federation), run)
    assert attempts.attempt(run) is None


def test_the_end_of_an_earlier_attempt_says_nothing_about_the_next(deployment, run, monkeypatch):
    from fedme.deployment import server_app
    from fedme.deployment.operator_folder import FOLDER

    def overtaken(*_):
        attempts.begin(run, 0)
        raise KeyboardInterrupt

    monkeypatch.setenv(FOLDER, str(deployment.federation))
    monkeypatch.setattr(server_app, "run", overtaken)
    with pytest.raises(KeyboardInterrupt):
        server_app.main(None, {"run": "experiment"})
    assert attempts.failure(run) is None


def test_a_site_that_was_away_at_the_end_is_served_when_it_is_back(deployment, run, resumer, monkeypatch):
    LocalGrid(deployment, lambda site, message_type, count: site == "b" and message_type == "evaluate").run_server(run)
    assert submitted_runs.without_model(run) == ["b"]
    sites = {"a": {"status": "online"}, "b": {"status": "offline"}}
    monkeypatch.setattr(operator, "sites_of_flower", lambda federation: sites)
    resumer()
    assert resumer.started == []
    sites["b"]["status"] = "online"
    resumer()
    assert resumer.started == ["experiment"]


def test_the_server_app_says_whether_its_end_is_an_outage(deployment, run, monkeypatch):
    from fedme.deployment import server_app
    from fedme.deployment.operator_folder import FOLDER

    monkeypatch.setenv(FOLDER, str(deployment.federation))
    reasons = {
        EngineError("waited 3600 s"): "outage",
        OSError(28, "No space left on device"): "outage",
        KeyboardInterrupt(): "outage",
        httpx.ReadTimeout("no answer of Flower's server"): "outage",
        httpx.HTTPStatusError("500: its disk is full", request=None, response=None): "outage",
        ValueError("no such layer"): "error",
    }
    for error, kind in reasons.items():
        monkeypatch.setattr(server_app, "run", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            server_app.main(None, {"run": "experiment"})
        assert attempts.failure(run).kind == kind
        assert attempts.started(run)


def test_the_same_experiment_has_one_unfinished_run(deployment, run):
    federation = Federation.read(deployment.federation)
    experiment = submitted_runs.read(federation, federation.folder / "experiment.toml")
    assert submitted_runs.same_experiment(federation, experiment) == run
    deployment.agree(seed=7)
    other = submitted_runs.read(federation, federation.folder / "experiment.toml")
    assert submitted_runs.same_experiment(federation, other) is None
    attempts.record_failure(run, "stopped by the operator", "stopped")
    assert submitted_runs.same_experiment(federation, experiment) is None


def test_submit_without_a_server_gives_up_with_words_and_leaves_nothing(deployment, fedme):
    code, _, err = fedme("deploy", "submit", "--federation", deployment.federation, "--wait", "1")
    assert code == 2
    assert "waiting up to 1 s for the server; `fedme deploy server" in err
    assert f"no server at 127.0.0.1:{deployment.control} within 1 s; start it with `fedme deploy server" in " ".join(
        err.split()
    )
    assert not list((deployment.federation / "runs").glob("*"))


def test_init_refuses_names_given_twice_and_settings_that_differ(deployment, fedme):
    words = ("deploy", "init", deployment.folder / "other", deployment.folder / "experiment.toml", "--sites")
    code, _, err = fedme(*words, "a,b,a")
    assert code == 2
    assert "sites: a is given twice" in err
    again = ("deploy", "init", deployment.federation, "--sites", "d")
    code, _, err = fedme(*again, "--port", "5555")
    assert code == 2
    assert f"port is {deployment.port} already, got 5555; edit the file" in " ".join(err.split())
    assert not deployment.site("d").exists()
    assert fedme(*again, "--port", str(deployment.port))[0] == 0
    assert deployment.site("d").exists()


class OtherClock(http.server.BaseHTTPRequestHandler):
    ahead = 0.0

    def do_HEAD(self):
        self.send_response_only(404)
        self.send_header("Date", email.utils.formatdate(time.time() - self.ahead, usegmt=True))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("ahead", "direction"), [(0.0, ""), (-200.0, ""), (400.0, "ahead of"), (-4000.0, "behind")])
def test_a_clock_that_is_off_is_named_with_the_difference(ahead, direction):
    server = http.server.HTTPServer(("127.0.0.1", 0), type("Clock", (OtherClock,), {"ahead": ahead}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"127.0.0.1:{server.server_address[1]}"
        said = re.match(
            r"this machine's clock is (\d+) s (.+) the server's; set the clock", server_clock.explanation(address, None)
        )
        assert (said.group(2) if said else "") == direction
        assert said is None or abs(int(said.group(1)) - abs(ahead)) < 60
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert server_clock.explanation(address, None) == ""  # no server


def test_rounds_are_counted_from_the_records(run):
    assert submitted_runs.rounds_done(run) == 0
    (run / records.NAME).write_text("")
    assert submitted_runs.rounds_done(run) == 0


def test_a_folder_in_use_is_seen_without_writing_to_it(tmp_path):
    assert not submitted_runs.running(tmp_path)
    with locked(tmp_path):
        assert submitted_runs.running(tmp_path)
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    assert not submitted_runs.running(tmp_path)


@pytest.fixture
def finished(deployment, run):
    """A federation whose sites have done a run."""
    LocalGrid(deployment).run_server(run)
    return deployment


def test_the_status_of_a_server_and_of_a_site(finished, fedme, monkeypatch):
    online = {name: {"status": "online", "since": "2026-01-01T00:00:00Z"} for name in "abc"}
    monkeypatch.setattr(operator, "sites_of_flower", lambda federation: online)
    state = json.loads(fedme("deploy", "status", finished.federation, "--json")[1])
    assert state["server"] == "up"
    assert state["disk_free"] > 0
    assert state["certificates"]["server.crt"] in (1094, 1095)
    assert state["sites"]["a"]["since"] == "2026-01-01T00:00:00Z"
    assert state["sites"]["a"]["received"] > 0
    assert state["sites"]["a"]["refused"] == 0
    assert (state["sites"]["a"]["round"], state["sites"]["a"]["epsilon"]) == (1, None)
    assert state["sites"]["a"]["last_reply"] <= state["sites"]["a"]["last_message"]
    assert state["runs"]["experiment"] | {"rounds": 2, "of": 2, "status": "done"} == state["runs"]["experiment"]
    out = fedme("deploy", "status", finished.federation)[1]
    assert "free disk: " in out
    assert "2 of 2" in out
    site = json.loads(fedme("deploy", "status", finished.site("a"), "--json")[1])
    assert (site["node"], site["round"], site["epsilon"], site["connected_since"]) == ("not running", 1, 0.0, None)
    assert site["sent"] > state["sites"]["a"]["received"]  # the handshake too
    assert site["last_reply"] == site["last_message"]
    assert "node: not running" in fedme("deploy", "status", finished.site("a") / "site.toml")[1]
    metrics = status.prometheus(site)
    assert f'fedme_site_sent_bytes_total{{site="a"}} {site["sent"]}\n' in metrics
    assert "fedme_up 0\n" in metrics
    assert 'fedme_site_epsilon{site="a"} 0\n' in metrics


def test_who_asks_whether_joining_helped(finished, fedme):
    """The samples are at the sites, so `fedme verdict` refuses such a run."""
    run = finished.federation / "runs" / "experiment"
    assert "Does joining help? `fedme deploy verdict site.toml`" in fedme("show", run)[1]
    assert verdicts.command(run) == "fedme deploy verdict site.toml"


def test_the_epsilon_of_every_site_is_in_the_status(deployment):
    deployment.agree(method={"name": "fedavg"}, privacy={"epsilon": 8.0, "delta": 1e-3})
    federation = Federation.read(deployment.federation)
    run = submitted_runs.create(federation, submitted_runs.read(federation, federation.folder / "experiment.toml"))
    for name in "abc":
        deployment.change(deployment.site(name) / "site.toml", model="mlr")
    LocalGrid(deployment).run_server(run)
    state = status.of_server(federation)
    assert 0 < state["sites"]["a"]["epsilon"] <= 8
    assert state["sites"]["a"]["epsilon"] == pytest.approx(
        status.of_site(Site.read(deployment.site("a") / "site.toml"))["epsilon"], rel=1e-6
    )


def test_the_sites_evaluate_large_models_at_the_same_time(deployment, run, monkeypatch):
    """They were asked one after another, as if their models were in one memory, and waited for each other's slow links."""
    monkeypatch.setattr(round_loop, "COPIES", 1 << 40)
    asked = []
    evaluate = SiteEngine.evaluate_models
    monkeypatch.setattr(
        SiteEngine,
        "evaluate_models",
        lambda self, deliveries, *rest: asked.append(list(deliveries)) or evaluate(self, deliveries, *rest),
    )
    LocalGrid(deployment).run_server(run)
    assert asked == [["a", "b", "c"]]


def test_the_status_page_is_for_this_machine_and_changes_nothing(finished, monkeypatch):
    federation = Federation.read(finished.federation)
    page = status_page.server(lambda: status.of_server(federation), 0)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    host = f"127.0.0.1:{page.server_address[1]}"
    try:

        def ask(path, **headers):
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer.status, text

        code, text = ask("/")
        assert code == 200
        assert f"Federation at {federation.address}" in text
        assert "2 of 2" in text
        assert 'http-equiv="refresh"' in text
        assert json.loads(ask("/status.json")[1])["runs"]["experiment"]["rounds"] == 2
        metrics = ask("/metrics")[1]
        assert "fedme_up 0" in metrics
        assert 'fedme_run_rounds{run="experiment"} 2' in metrics
        assert ask("/etc/passwd")[0] == 404
        log = finished.federation / "runs" / "experiment" / transfer_log.NAME
        log.write_bytes(log.read_bytes() + b"[]\n")
        monkeypatch.setattr(status_page, "REFRESH", 0)
        wait_for(lambda: ask("/")[0] == 503, "the next look")
        assert "line" in ask("/")[1]  # the page says what is damaged, and stays
        assert ask("/", Host="federation.example")[0] == 403  # a page elsewhere whose name leads to this machine
    finally:
        page.shutdown()
        page.server_close()
        thread.join()


def test_a_certificate_is_renewed_for_the_same_keys(deployment, fedme):
    server = deployment.federation / "server"
    before = {name: (server / name).read_bytes() for name in ("ca.crt", "server.crt", "ca.key", "server.key")}
    code, out, err = fedme("deploy", "renew", deployment.federation)
    assert code == 0
    assert "server.crt" in out
    assert "send the new ca.crt to every site" in err
    after = {name: (server / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["ca.crt", "server.crt"]
    assert (deployment.site("a") / "ca.crt").read_bytes() == after["ca.crt"]
    leaf = x509.load_pem_x509_certificate(after["server.crt"])
    for trusted in (before["ca.crt"], after["ca.crt"]):  # sites with either file accept the new certificate
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(trusted))


def test_a_resting_site_has_no_pytorch_in_memory():
    code = "import sys, fedme.deployment.node_supervisor; print({'torch', 'flwr', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@needs_chromium
def test_the_status_page_in_a_browser_refreshes_itself_and_shows_names_as_text(finished, monkeypatch):
    monkeypatch.setattr(status_page, "REFRESH", 1)
    state = status.of_server(Federation.read(finished.federation))
    state["sites"]["<img src=x onerror=alert(1)>"] = state["sites"]["a"]
    asked = []
    server = status_page.server(lambda: asked.append(1) or state, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with chromium.launch() as browser:
            page, messages = new_page(browser, width=390)
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
            assert "<img src=x onerror=alert(1)>" in page.inner_text("body")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            wait_for(lambda: page.wait_for_timeout(200) or len(asked) > 1, "the second load", 60)
            assert [text for text in messages if "favicon" not in text] == []
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
