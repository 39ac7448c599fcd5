"""What a federation needs: memory and processor time of its sites on one machine, and a large model over a slow link.

    PYTHONPATH=tests python benchmarks/federation.py sites [--sites 25] [--gigabytes 20]
    PYTHONPATH=tests python benchmarks/federation.py link [--width 4900]

`sites` starts a server and so many sites on loopback and measures them at rest and in a round of FedAvg with a small network.
It gives up when the sites need more than `--gigabytes`. Memory is the proportional set size: pages that processes share are
divided among them. `link` lets two sites take part in a round over links of 10 Mbit/s with a loss of 1 %, in network namespaces
(Linux).
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from fedme.deployment import submitted_runs, transfer_log
from fedme_test_deployment import Deployment, wait_for
from fedme_test_hosts import Hosts, unavailable

TICKS = os.sysconf("SC_CLK_TCK")
REST = 60.0  # seconds to look at sites that have nothing to do
AT_SITE = ("fedme.deployment.node_supervisor", "flower_site_internals")


def megabytes(pid: int) -> float:
    """The proportional set size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("Pss:"))


def seconds(pid: int) -> float:
    """The processor time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def pids_of_sites(deployment: Deployment) -> list[int]:
    """All processes of all sites."""
    return [pid for program in AT_SITE for pid in deployment.pids(program, "sites/")]


def sites(count: int, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Measure sites at rest and at work."""
    names = [f"site{number:02d}" for number in range(count)]
    deployment = Deployment(folder, names, min_sites=count, min_replies=count)
    try:
        deployment.agree(method={"name": "fedavg"}, models={"pool": ["mlr"]}, rounds=1, evaluate_every=1)
        for name in names:
            deployment.change(deployment.site(name) / "site.toml", model="mlr")
        deployment.server()
        for name in names:
            deployment.node(name)
            wait_for(lambda name=name: "connected to" in deployment.output_of(name).read_text(), f"{name} to connect")
            used = sum(map(megabytes, pids_of_sites(deployment))) / 1000
            print(f"{name}: all sites at rest {used:.2f} GB", flush=True)
            if used > gigabytes:
                raise SystemExit(f"{name}: sites at rest need {used:.1f} GB, more than {gigabytes}")
        pids = pids_of_sites(deployment)
        before = sum(map(seconds, pids))
        time.sleep(REST)
        rest = (sum(map(seconds, pids)) - before) / count * 60 / REST
        resting = sum(map(megabytes, pids)) / count
        before, most = sum(map(seconds, pids)), 0.0
        deployment.submit("--detach").wait(600)
        run = deployment.federation / "runs" / "experiment"
        while not submitted_runs.done(run):
            used = sum(map(megabytes, pids_of_sites(deployment)))
            most = max(most, used)
            if used > 1000 * gigabytes:
                raise SystemExit(f"the sites need {used / 1000:.1f} GB, more than {gigabytes}")
            time.sleep(1)
        time.sleep(10)  # the last client apps end
        work = (sum(map(seconds, pids)) - before) / count
        programs = {"superlink": "flower-superlink", "superexec": "flower-superexec", "proxy": "fedme.deployment.reverse_proxy"}
        server = {name: round(sum(map(megabytes, deployment.pids(words)))) for name, words in programs.items()}
        return {
            "sites": count,
            "MB per site at rest": round(resting),
            "processor seconds per site and minute at rest": round(rest, 2),
            "MB of all sites at most, in a run of one round": round(most),
            "processor seconds per site for a run of one round": round(work, 1),
            "MB of the server's programs": server,
        }
    finally:
        deployment.end()


def link(width: int, folder: Path) -> dict[str, Any]:
    """Send a large model over slow links."""
    if reason := unavailable():
        raise SystemExit(reason)
    hosts = Hosts(folder, "ab", disk="2g", min_replies=2)
    try:
        hosts.agree(method={"name": "fedavg"}, models={"pool": [f"dnn-5000-{width}"]}, rounds=1, evaluate_every=1)
        for name in "ab":
            hosts.change(hosts.site(name) / "site.toml", model=f"dnn-5000-{width}")
            hosts.link(name, "slow")
            hosts.service(name)
        hosts.service("server")
        began = time.monotonic()
        assert hosts.submit().wait(3600) == 0, hosts.output_of("submit").read_text()
        run = hosts.federation / "runs" / "experiment"
        transfers = transfer_log.read(run)
        return {
            "MB per model": round(max(line["bytes"] for line in transfers) / 1e6, 1),
            "transfers": [(line["time"], line["what"], line["peer"], round(line["bytes"] / 1e6, 1)) for line in transfers],
            "seconds of the run, with the start of all programs": round(time.monotonic() - began),
            "log": hosts.log().splitlines(),
        }
    finally:
        hosts.end()


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sites", "link"))
    parser.add_argument("--sites", type=int, default=25)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=4900, help="5000 x WIDTH weights of four bytes; 4900: 100 MB")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = sites(asked.sites, asked.gigabytes, Path(place)) if asked.what == "sites" else link(asked.width, Path(place))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
