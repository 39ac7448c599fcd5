"""What a site does: keep Flower's node running. It tries until it is accepted, and comes back after every restart."""

import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import locked
from fedme.deployment.operator_folder import environment, program
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import NAME, Site
from fedme.deployment.supervisor import Keeper
from fedme.running.privacy_budget import require_private_training

CONNECTED = "SuperNode ID"  # what Flower's node says when the server has accepted it


def command(site: Site) -> list[str]:
    """The command of Flower's node, with a free port for its own processes."""
    server = site.settings.server
    if server.insecure:
        trust = ["--insecure"]
    else:
        files = {"--root-certificates": server.certificate, "--auth-supernode-private-key": server.key}
        for file in files.values():
            if not site.path(file).exists():
                raise ConfigError(f"{site.path(file)}: no such file; it comes with the folder that the operator sends")
        trust = [word for option, file in files.items() for word in (option, str(site.path(file)))]
    own = ["--host", "127.0.0.1", "--port", str(_free_port())]
    settings = f"site={json.dumps(str(site.folder / NAME))}"
    return [program("flower-supernode"), *trust, "--superlink", server.address, *own, "--node-config", settings]


def check(site: Site) -> str:
    """Look at everything before the first message: the experiment, the model, the data. What was found, in words."""
    sys.path.insert(0, str(site.folder))  # a network of the site's own may be beside its file
    task, archs = site.task()
    data = client_data(site)
    site.experiment.method.check(replace(task, public=len(data.public or ())))
    require_private_training(site.experiment, archs.values(), [data])
    me = task.members[site.settings.name]
    parts = ", ".join(f"{len(getattr(data, part))} {part}" for part in ("train", "val", "test"))
    return f"{me.id}: {me.arch.name}, {parts} samples; lets in {', '.join(archs)}"


def programs(site: Site) -> dict[str, str]:
    """The environment of Flower's programs at a site; its own network may be beside its file."""
    return environment(site.state / "flwr", site.folder)


def run(site: Site, say: Callable[[str], None]) -> None:
    """Keep the node running."""
    say(check(site))
    with locked(site.state):
        name, address = site.settings.name, site.settings.server.address
        keeper = Keeper(site.state / "log", programs(site), lambda text: say(f"{name}: {text}"))
        connected = -1  # the start that was announced

        def start() -> Sequence[str]:
            return command(site)

        def announce() -> None:
            nonlocal connected
            if connected != keeper.began["node"] and CONNECTED in keeper.said("node"):
                connected = keeper.began["node"]
                say(f"{name}: connected to {address}")

        keeper.keep("node", start)
        say(f"{name}: connecting to {address}; the log is in {site.state / 'log'}; Ctrl-C stops")
        keeper.until_stopped(announce)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
