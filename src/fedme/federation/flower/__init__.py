"""Flower as a transport: clients in the processes of a Ray cluster, or at real sites. Only this package imports flwr.

The environment is set before Flower and Ray are imported: no telemetry, no update checks, no downloads. Whoever reaches a Ray
process can run code in it, so the processes that FedMe starts listen on loopback only and ask for a secret that is new in every
process of FedMe; Ray reads it once, and writes none to a file because it is given.
"""

import importlib
import importlib.util
import os
import secrets
from types import ModuleType

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.update(ENVIRONMENT)


def keep_ray_private() -> None:
    """Set the environment of Ray processes that are started on this machine. A cluster's own is left as it is."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # every socket on loopback; `_node_ip_address` does not do that
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class EngineError(RuntimeError):
    """Flower, or a client that runs on it, failed; the message names the client and the reason."""


def load_module(name: str) -> ModuleType:
    """Import a module of `fedme` that needs Flower; `name` is relative to the package, as in "deployment.node"."""
    missing = [package for package in ("flwr", "ray") if importlib.util.find_spec(package) is None]
    if missing:
        raise EngineError(f"{' and '.join(missing)} not installed; run `pip install 'fedme[flower]'`")
    return importlib.import_module(f"fedme.{name}")
