"""Machines of a federation in network namespaces of Linux: links that can be cut or slow, reboots, a server with a small disk.

Nothing leaves the namespaces: they are joined by virtual cables from every site to the server, and to nothing else.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Literal

from fedme.deployment.supervisor import LAUNCHER
from fedme_test_deployment import Deployment, wait_for

SERVER = "10.77.0.1"  # on the server's loopback interface, so that one address serves all cables
SLOW = ("tbf", "rate", "10mbit", "burst", "16kb", "latency", "400ms")
RULES = {"up": "", "slow": "numgen random mod 100 < 1 drop", "cut": "drop"}
ROOT = os.geteuid() == 0
USER = [] if ROOT else ["--user"]  # an ordinary user is root in a user namespace
ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
TRIAL = (
    f"ip link add name near type veth peer name far && tc qdisc add dev near root {' '.join(SLOW)} && "
    "mount -t tmpfs none /mnt && "
    f"nft 'table inet link {{ chain in {{ type filter hook input priority 0; {RULES['slow']}; }}; }}'"
)


def unavailable() -> str:
    """Why there can be no such machines here; empty if there can."""
    for program in ("unshare", "nsenter", "ip", "tc", "nft"):
        if shutil.which(program, path=ENVIRONMENT["PATH"]) is None:
            return f"needs the program {program} (apt-get install iproute2 nftables)"
    done = subprocess.run([*_new("--net", "--mount"), "sh", "-c", TRIAL], env=ENVIRONMENT, capture_output=True, text=True)
    return f"namespaces are not permitted here: {done.stderr.strip()[-200:]}" if done.returncode else ""


def _new(*namespaces: str) -> list[str]:
    return ["unshare", *namespaces, *([] if ROOT else ["--user", "--map-root-user"])]


class Host:
    """A machine: a network namespace that a process without work keeps open, and all processes in it."""

    def __init__(self, start: list[str]) -> None:
        command = [*LAUNCHER, str(os.getpid()), *start, "sleep", "infinity"]
        self.holder = subprocess.Popen(command, env=ENVIRONMENT)
        wait_for(lambda: Path(f"/proc/{self.holder.pid}/comm").read_text() == "sleep\n", "a namespace", 60)
        self.namespace = os.readlink(f"/proc/{self.holder.pid}/ns/net")

    def inside(self, *words: str, at: Path = Path("/")) -> list[str]:
        """The command that runs these words in this machine."""
        enter = ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", *USER]
        return [*enter, *([] if ROOT else ["--preserve-credentials"]), "env", "--chdir", str(at), *words]

    def do(self, *words: str, text: str = "") -> None:
        done = subprocess.run(self.inside(*words), env=ENVIRONMENT, input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

    def processes(self) -> dict[int, str]:
        """The commands of all processes of this machine."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/net") == self.namespace and int(path.name) != self.holder.pid:
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended, or belongs to somebody else
                continue
        return found

    def kill(self, program: str = "") -> int:
        """Kill the processes whose command contains `program`, or all; returns how many."""
        pids = [pid for pid, command in self.processes().items() if program in command]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(pids)

    def close(self) -> None:
        self.kill()
        self.holder.kill()
        self.holder.wait()


class Hosts(Deployment):
    """A federation whose server and sites are machines of their own. The server's folder is a disk of `disk` bytes.

    `federation` is the server's folder as processes outside of its namespaces see it.
    """

    def __init__(self, folder: Path, sites: str = "abc", disk: str = "100m", **settings: Any) -> None:
        super().__init__(folder, sites, host=SERVER, **settings)
        self.hosts: dict[str, Host] = {}
        try:
            self._build(sites, disk)
        except BaseException:
            self.end()
            raise

    def _build(self, sites: str, disk: str) -> None:
        self.hand_over()
        made = self.folder / "made"
        self.federation.rename(made)
        self.federation.mkdir()
        server = self.hosts["server"] = Host(_new("--net", "--mount"))
        server.do("ip", "link", "set", "lo", "up")
        server.do("ip", "address", "add", f"{SERVER}/32", "dev", "lo")
        for number, name in enumerate(sites, 1):
            host = self.hosts[name] = Host(server.inside("unshare", "--net"))
            server.do(
                "ip", "link", "add", "name", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.holder.pid)
            )
            for end, device, last in ((server, f"to-{name}", 1), (host, "eth0", 2)):
                end.do("ip", "address", "add", f"10.77.{number}.{last}/30", "dev", device)
                end.do("ip", "link", "set", device, "up")
            host.do("ip", "link", "set", "lo", "up")
            host.do("ip", "route", "add", "default", "via", f"10.77.{number}.1")
        server.do("mount", "-t", "tmpfs", "-o", f"size={disk},mode=755", "none", str(self.federation))
        server.do("cp", "-a", f"{made}/.", str(self.federation))
        self.federation = Path(f"/proc/{server.holder.pid}/root{self.federation}")

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command at the host with this name, else at the server."""
        host = self.hosts.get(name, self.hosts["server"])
        command = host.inside(*self.command(*words), at=self.folder)
        with self.output_of(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
        return self.processes[name]

    def service(self, name: str) -> None:
        """Start what a machine starts at boot, unless it runs: the server or a site."""
        if name not in self.processes or self.processes[name].poll() is not None:
            self.server() if name == "server" else self.node(name)

    def reboot(self, name: str) -> None:
        """All processes of a machine end at once; `service` is the boot."""
        self.hosts[name].kill()

    def link(self, name: str, state: Literal["up", "slow", "cut"]) -> None:
        """The cable of a site: "slow" is 10 Mbit/s with a loss of 1 % in both directions, and "cut" lets nothing through."""
        host, rule = self.hosts[name], RULES[state]
        chains = (
            f"chain {hook} {{ type filter hook {hook} priority 0; {side} eth0 {rule or 'accept'}; }};"
            for hook, side in (("input", "iifname"), ("output", "oifname"))
        )
        host.do("nft", "-f", "-", text=f"flush ruleset\ntable inet link {{ {' '.join(chains)} }}\n")
        for end, device in ((host, "eth0"), (self.hosts["server"], f"to-{name}")):
            end.do("tc", "qdisc", "replace", "dev", device, "root", *(SLOW if state == "slow" else ["pfifo", "limit", "1000"]))

    def fill_disk(self) -> None:
        """Leave no free byte on the server's disk."""
        with (self.federation / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(2**16)) == 2**16:
                    continue
            except OSError:
                return

    def empty_disk(self) -> None:
        (self.federation / "filler").unlink(missing_ok=True)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
        for host in reversed(self.hosts.values()):
            host.close()
        for process in self.processes.values():
            process.wait()
