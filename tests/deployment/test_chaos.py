"""A federation on loopback whose processes and machines are killed at random: it goes on by itself, to the same models."""

import os
import random
import signal
import time

import pytest
from safetensors.torch import load_file

from fedme.deployment import submitted_runs
from fedme.deployment.operator_folder import Federation
from fedme_test_deployment import Deployment, wait_for

EVENTS = ("superlink", "superexec", "server app", "proxy", "server machine", "node", "client app", "site machine")
PROGRAMS = {
    "superlink": "flower-superlink",
    "superexec": "flower-superexec",
    "server app": "flwr-serverapp",
    "proxy": "fedme.deployment.reverse_proxy",
    "node": "flower_site_internals node",
    "client app": "flower_site_internals client",
}


class Chaos:
    """Kills what a name in EVENTS says. What a machine starts by itself, `fedme deploy server` or `node`, is started again."""

    def __init__(self, deployment, seed):
        self.deployment, self.random = deployment, random.Random(seed)
        self.done = []

    def kill(self, pids):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def site_machine(self, name):
        """Kill all processes of a site at once, and start it again."""
        self.restart(name, [pid for word in PROGRAMS.values() for pid in self.deployment.pids(word, f"sites/{name}")])
        self.deployment.node(name)

    def server_machine(self):
        """The same for the server; its folder contains those of the sites."""
        sites = {pid for name in "abc" for word in PROGRAMS.values() for pid in self.deployment.pids(word, f"sites/{name}")}
        own = ("superlink", "superexec", "server app", "proxy")
        self.restart("server", [pid for name in own for pid in self.deployment.pids(PROGRAMS[name]) if pid not in sites])
        self.deployment.server()

    def restart(self, name, pids):
        process = self.deployment.processes.pop(name)
        self.kill([process.pid, *pids])
        process.wait(60)
        time.sleep(self.random.uniform(0, 3))

    def event(self):
        name = self.random.choice(EVENTS)
        site = self.random.choice("abc")
        self.done.append(f"{name} {site}" if name in ("node", "client app", "site machine") else name)
        if name == "server machine":
            self.server_machine()
        elif name == "site machine":
            self.site_machine(site)
        else:
            self.kill(self.deployment.pids(PROGRAMS[name], f"sites/{site}" if name in ("node", "client app") else ""))


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path, min_replies=3, timeout=600.0)
    yield made
    made.end()


def play(deployment, seed, events, rounds):
    """A run with random events; nobody gives a command after `submit`."""
    deployment.agree(rounds=rounds, evaluate_every=rounds)
    deployment.server()
    for name in "abc":
        deployment.node(name)
    submit = deployment.submit()
    folder = deployment.federation / "runs" / "experiment"
    wait_for(lambda: "c connected" in deployment.log(), "the sites")
    chaos = Chaos(deployment, seed)
    while len(chaos.done) < events and submit.poll() is None:
        chaos.event()
        time.sleep(chaos.random.uniform(2, 20))
    said = lambda: f"{chaos.done}\n{deployment.output_of('submit').read_text()}\n{deployment.log()}"  # noqa: E731
    assert submit.wait(1800) == 0, said()
    wait_for(lambda: not submitted_runs.without_model(folder), "the models of all sites", 900)
    federation = Federation.read(deployment.federation)
    assert submitted_runs.done(folder)
    assert submitted_runs.all_runs(federation) == [folder]
    token = submitted_runs.token(folder)
    for name, model in deployment.expected().items():
        saved = load_file(deployment.site(name) / "state" / "runs" / token / "clients" / name / "model.safetensors")
        assert all((saved[key] == value).all() for key, value in {**model.params, **model.buffers}.items()), (name, said())
    return chaos


@pytest.mark.deploy
def test_a_federation_with_random_kills_ends_with_the_models_of_an_undisturbed_run(deployment):
    assert len(play(deployment, seed=3, events=6, rounds=3).done) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_federations_with_twenty_random_kills_each(deployment, seed):
    play(deployment, seed, events=20, rounds=8)
