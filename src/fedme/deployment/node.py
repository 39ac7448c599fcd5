"""Run a site: keep Flower's node running. It retries until the server accepts it, and reconnects after every restart."""

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import locked
from fedme.deployment.operator_folder import flower_environment, program
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import NAME, Site
from fedme.deployment.supervisor import Supervisor
from fedme.running.privacy_budget import require_private_training

CONNECTED = "SuperNode ID"  # Flower's node logs this when the server has accepted it


def command(site: Site) -> list[str]:
    """The command of Flower's node, with a free local port for its own processes."""
    server = site.settings.server
    if server.insecure:
        trust = ["--insecure"]
    else:
        files = {"--root-certificates": server.certificate, "--auth-supernode-private-key": server.key}
        for file in files.values():
            if not site.path(file).exists():
                raise ConfigError(f"{site.path(file)}: no such file; copy it from the folder that the operator sent")
        trust = [word for option, file in files.items() for word in (option, str(site.path(file)))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        local = ["--host", "127.0.0.1", "--port", str(free.getsockname()[1])]
    settings = f"site={json.dumps(str(site.folder / NAME))}"
    return [program("flower-supernode"), *trust, "--superlink", server.address, *local, "--node-config", settings]


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
    return f"{member.id}: {member.arch.name}, {parts} samples; accepts {', '.join(archs)}"


def run(site: Site, log: Callable[[str], None]) -> None:
    """Keep the node running until it is stopped by a signal."""
    log(check(site))
    with locked(site.state):
        name, address = site.settings.name, site.settings.server.address
        supervisor = Supervisor(site.state / "log", environment(site), lambda text: log(f"{name}: {text}"))
        announced = -1  # the start of the node whose connection was logged

        def announce() -> None:
            nonlocal announced
            if announced != supervisor.log_start["node"] and CONNECTED in supervisor.output("node"):
                announced = supervisor.log_start["node"]
                log(f"{name}: connected to {address}")

        supervisor.start("node", lambda: command(site))
        log(f"{name}: connecting to {address}; the log is in {site.state / 'log'}; Ctrl-C stops")
        supervisor.run_until_stopped(announce)
