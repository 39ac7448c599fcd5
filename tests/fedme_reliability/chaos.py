"""Federations under random kills, reboots, cut and slow links and full disks: all runs end by themselves.

    python -m fedme_reliability.chaos [--runs 10] [--first SEED] [--events 20]

A server and three sites are in network namespaces. After `fedme deploy submit`, nobody types anything: what a machine starts at
boot is started again when it ends, as systemd does. Every run must end, and every site must have its model, with the bits of a
run in one process without any disturbance (a round needs the replies of all sites, so none is lost).
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from fedme.deployment import submitted_runs
from fedme.running.progress import Display
from fedme_reliability.frame import Row
from fedme_test_deployment import wait_for
from fedme_test_hosts import Hosts, unavailable

RUNS, EVENTS, ROUNDS = 10, 20, 6
SITES = "abc"
AT_SERVER = {
    "superlink": "flower-superlink",
    "superexec": "flower-superexec",
    "server app": "flwr-serverapp",
    "proxy": "fedme.deployment.reverse_proxy",
    "server supervisor": "deploy server",
}
AT_SITE = {
    "node": "flower_site_internals node",
    "client app": "flower_site_internals client",
    "node supervisor": "fedme.deployment.node_supervisor",
}
OTHERS = ("reboot of server", "reboot", "cut link", "slow link", "full disk")
KINDS = (*AT_SERVER, *AT_SITE, *OTHERS)
END = 1800.0  # seconds after the last event, for a machine that does other things as well


class Chaos:
    """Random events, and what ends them: services are started again, links mended, the disk emptied."""

    def __init__(self, hosts: Hosts, seed: int) -> None:
        self.hosts, self.random = hosts, random.Random(seed)
        self.done: list[str] = []
        self.slow: set[str] = set()
        self.later: list[tuple[float, Callable[[], None]]] = []  # when something ends

    def event(self) -> None:
        """Let something happen."""
        kind, site = self.random.choice(KINDS), self.random.choice(SITES)
        hosts, effect = self.hosts, ""
        if kind in AT_SERVER:
            effect = self._kill("server", AT_SERVER[kind])
        elif kind in AT_SITE:
            effect = self._kill(site, AT_SITE[kind])
        elif kind == "reboot of server":
            hosts.reboot("server")
        elif kind == "reboot":
            hosts.reboot(site)
            effect = f"of {site}"
        elif kind == "full disk":
            seconds = self.random.uniform(5, 30)
            hosts.fill_disk()
            self._later(seconds, hosts.empty_disk)
            effect = f"{seconds:.0f} s"
        elif kind == "cut link":
            seconds = self.random.uniform(5, 60)
            hosts.link(site, "cut")
            self._later(seconds, lambda: hosts.link(site, "slow" if site in self.slow else "up"))
            effect = f"{site}: {seconds:.0f} s"
        else:
            self.slow ^= {site}
            hosts.link(site, "slow" if site in self.slow else "up")
            effect = f"{site}: {'slow' if site in self.slow else 'fast'}"
        self.done.append(f"{kind} {effect}".strip())

    def _kill(self, name: str, program: str) -> str:
        """Kill a program; some run only now and then, and are waited for."""
        for _ in range(20):
            if killed := self.hosts.hosts[name].kill(program):
                return f"at {name}: {killed} killed"
            self.wait(0.5)
        return f"at {name}: not running"

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, end))

    def wait(self, seconds: float) -> None:
        """Pass the time as machines do: start services that have ended, and end what has its time."""
        until = time.monotonic() + seconds
        while True:
            for name in ("server", *SITES):
                self.hosts.service(name)
            now = time.monotonic()
            for due in [entry for entry in self.later if entry[0] <= now]:
                self.later.remove(due)
                due[1]()
            if now >= until:
                return
            time.sleep(min(1.0, until - now))

    def calm(self) -> None:
        """Mend everything."""
        for _, end in self.later:
            end()
        self.later.clear()


def play(hosts: Hosts, seed: int, events: int, rounds: int, on_event: Callable[[], None] = lambda: None) -> Chaos:
    """A run with this many random events; an AssertionError tells what is wrong with its end."""
    hosts.agree(rounds=rounds, evaluate_every=rounds)
    chaos = Chaos(hosts, seed)
    chaos.wait(0)
    submit = hosts.submit("--detach")
    folder = hosts.federation / "runs" / "experiment"
    assert submit.wait(900) == 0, hosts.output_of("submit").read_text()
    wait_for(lambda: "c connected" in hosts.log(), "the sites", 900)
    while len(chaos.done) < events:
        chaos.event()
        on_event()
        chaos.wait(chaos.random.uniform(1, 12))
    chaos.calm()
    deadline = time.monotonic() + END
    while not (submitted_runs.done(folder) and not submitted_runs.without_model(folder)):
        assert time.monotonic() < deadline, f"no end\n{_said(hosts, chaos)}"
        chaos.wait(1)
    runs = [path.name for path in folder.parent.iterdir()]
    assert runs == ["experiment"], f"{runs}\n{_said(hosts, chaos)}"
    token = submitted_runs.token(folder)
    for name, model in hosts.expected().items():
        saved = load_file(hosts.site(name) / "state" / "runs" / token / "clients" / name / "model.safetensors")
        same = all((saved[key] == value).all() for key, value in {**model.params, **model.buffers}.items())
        assert same, f"{name} has another model\n{_said(hosts, chaos)}"
    return chaos


def _said(hosts: Hosts, chaos: Chaos) -> str:
    """Everything that helps to understand a run."""
    outputs = [f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(hosts.folder.glob("*.output"))]
    return "\n".join([str(chaos.done), *outputs, "== server.log", hosts.log()[-8000:]])


def one(seed: int, events: int, rounds: int, place: Path, on_event: Callable[[], None]) -> dict[str, object]:
    """One run: what happened, and what was wrong."""
    folder = place / f"run-{seed}"
    folder.mkdir()
    began, done, wrong = time.monotonic(), list[str](), ""
    hosts = Hosts(folder, SITES, min_replies=len(SITES), timeout=120.0)
    try:
        done = play(hosts, seed, events, rounds, on_event).done
    except AssertionError as error:
        wrong = str(error)
    finally:
        hosts.end()
    if wrong:
        (folder / "wrong.txt").write_text(wrong)
    else:
        shutil.rmtree(folder)
    return {"seed": seed, "wrong": wrong[:200], "events": done, "minutes": round((time.monotonic() - began) / 60, 1)}


def rows(display: Display, quick: bool, runs: int = RUNS, first: int = 0, events: int = EVENTS) -> Iterator[Row]:
    """Ten runs with twenty events each."""
    what = "a federation under random events ends with the models of an undisturbed run"
    if reason := unavailable():
        yield Row(what, 1, 0, f"not tried: {reason}")
        return
    runs, events, rounds = (1, 4, 2) if quick else (runs, events, ROUNDS)
    place = Path(tempfile.mkdtemp(prefix="fedme-chaos-"))
    display.start("events", runs * events)
    played = []
    for seed in range(first, first + runs):
        played.append(one(seed, events, rounds, place, display.advance))
        display.note(json.dumps(played[-1]))
    bad = [run["seed"] for run in played if run["wrong"]]
    detail = f"{events} events each" + (f"; {place} has the files of seeds {', '.join(map(str, bad))}" if bad else "")
    yield Row(what, runs, runs - len(bad), detail)
    if not bad:
        place.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--events", type=int, default=EVENTS)
    asked = parser.parse_args()
    with Display(Console(stderr=True)) as display:
        (row,) = rows(display, False, asked.runs, asked.first, asked.events)
    print(row)
    raise SystemExit(not row.kept)


if __name__ == "__main__":
    main()
