"""Run a site: keep Flower's node running. It retries until the server accepts it, and reconnects after every restart."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import require_unlocked
from fedme.datasets.federated_dataset import SINGLE_SAMPLE
from fedme.deployment import append_only, node_supervisor
from fedme.deployment.node_supervisor import now
from fedme.deployment.operator_folder import flower_environment
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import LEFT, NAME, Site, require_member
from fedme.deployment.submitted_runs import running
from fedme.running.privacy_budget import require_private_training

PROGRAM = (sys.executable, "-m", "fedme.deployment.flower_site_internals")  # Flower's node, held to FedMe's own app


def command(site: Site) -> list[str]:
    """The command of Flower's node; it also needs a free local port, for its own processes."""
    server = site.settings.server
    if server.insecure:
        trust = ["--insecure"]
    else:
        files = {"--root-certificates": server.certificate, "--auth-supernode-private-key": server.key}
        for file in files.values():
            if not site.path(file).exists():
                raise ConfigError(f"{site.path(file)}: no such file; copy it from the folder that the operator sent")
        trust = [word for option, file in files.items() for word in (option, str(site.path(file)))]
    settings = f"site={json.dumps(str(site.folder / NAME))}"
    return [*PROGRAM, "node", *trust, "--superlink", server.address, "--node-config", settings]


def environment(site: Site) -> dict[str, str]:
    """The environment of Flower's programs at a site; the site's own network may be in a file beside site.toml."""
    return flower_environment(site.state / "flwr", site.folder)


def check(site: Site) -> str:
    """Check the experiment, the model and the data before the first message, and return a summary."""
    sys.path.insert(0, str(site.folder))
    task, archs = site.task()
    data = client_data(site)
    site.experiment.method.check(replace(task, public=len(data.public or ())))
    require_private_training(site.experiment, archs.values(), [data])
    member = task.members[site.settings.name]
    parts = ", ".join(f"{len(getattr(data, part))} {part}" for part in ("train", "val", "test"))
    summary = f"{member.id}: {member.arch.name}, {parts} samples; accepts {', '.join(archs)}"
    notes = list(site.experiment.dataset.range_notes(data.train.source.x))  # type: ignore[attr-defined]
    if len(data.val) and torch.equal(data.train.rows, data.val.rows):
        notes.append(f"{member.id} has {SINGLE_SAMPLE}")
    return "\n".join([summary, *(f"note: {note}" for note in notes)])


def leave(site: Site, reason: str) -> str:
    """Withdraw this site's agreement: its node does not start again, and every request is refused. Returns what was done."""
    append_only.append(site.records / LEFT, {"time": now(), "reason": reason})
    stopped = ""
    lock = site.state / ".lock"
    if lock.exists() and running(site.state):
        os.kill(int(lock.read_text()), signal.SIGTERM)
        stopped = "; its node is stopped"
    return (
        f"{site.settings.name} has left{stopped}. What was sent before remains with the server and the other sites. "
        f"Ask the operator for `fedme deploy remove FEDERATION {site.settings.name}`; delete {site.records / LEFT} to come back"
    )


def run(site: Site, log: Callable[[str], None]) -> None:
    """Keep the node running until it is stopped by a signal. This process becomes the supervisor, without PyTorch."""
    require_member(site)
    log(check(site))
    require_unlocked(site.state)
    server = site.settings.server
    authority = "" if server.insecure else str(site.path(server.certificate))
    plan = node_supervisor.Plan(
        site.settings.name, server.address, authority, str(site.state), command(site), environment(site)
    )
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", node_supervisor.__name__, json.dumps(asdict(plan))])
