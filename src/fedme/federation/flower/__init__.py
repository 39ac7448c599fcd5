"""Flower as a transport: clients in the processes of a Ray cluster, or at real sites. Only this package imports flwr.

The environment is set before Flower is imported: no telemetry, no update checks, no downloads. `execution/ray` does the same
for Ray, and keeps the Ray processes that are started on this machine private.
"""

import os
from types import ModuleType

from fedme.execution import ray
from fedme.execution.ray import EngineError

__all__ = ["ENVIRONMENT", "EngineError", "load_module"]

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    **ray.ENVIRONMENT,
}
os.environ.update(ENVIRONMENT)


def load_module(name: str) -> ModuleType:
    """Import a module of `fedme` that needs Flower; `name` is relative to the package, as in "deployment.node"."""
    return ray.load_module(name, "flower", ("flwr", "ray"))
