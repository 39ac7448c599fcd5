"""Flower as the engine: clients in the processes of a Ray cluster, or at real sites. Everything that imports flwr is in here.

Flower and Ray are told to keep quiet before they are imported: no telemetry, no look for updates, nothing downloaded.
"""

import importlib
import importlib.util
import os
from types import ModuleType

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.update(QUIET)


class EngineError(RuntimeError):
    """Flower, or a client on it, failed; the message says who and why."""


def part(name: str) -> ModuleType:
    """A module of this package, if Flower is installed."""
    missing = [package for package in ("flwr", "ray") if importlib.util.find_spec(package) is None]
    if missing:
        raise EngineError(f"{' and '.join(missing)} not installed; `pip install 'fedme[flower]'` brings what Flower needs")
    return importlib.import_module(f"{__name__}.{name}")
