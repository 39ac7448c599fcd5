"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedme.api.client import Client
    from fedme.api.methods import FML, PFML, Centralized, FedAvg, FedMD, FedMe, FedProx, HypCluster, Local, Mapper, PFedMe
    from fedme.api.result import Result, load_run
    from fedme.artifacts.personal_model import Personal
    from fedme.artifacts.saved_models import load_model
    from fedme.core.key import Key
    from fedme.core.model import Arch, Model
    from fedme.networks import register

__version__ = "0.1.0"

__all__ = [
    "FML",
    "PFML",
    "Arch",
    "Centralized",
    "Client",
    "FedAvg",
    "FedMD",
    "FedMe",
    "FedProx",
    "HypCluster",
    "Key",
    "Local",
    "Mapper",
    "Model",
    "PFedMe",
    "Personal",
    "Result",
    "load_model",
    "load_run",
    "register",
]

_HOMES = {
    "FML": "fedme.api.methods",
    "PFML": "fedme.api.methods",
    "Arch": "fedme.core.model",
    "Centralized": "fedme.api.methods",
    "Client": "fedme.api.client",
    "FedAvg": "fedme.api.methods",
    "FedMD": "fedme.api.methods",
    "FedMe": "fedme.api.methods",
    "FedProx": "fedme.api.methods",
    "HypCluster": "fedme.api.methods",
    "Key": "fedme.core.key",
    "Local": "fedme.api.methods",
    "Mapper": "fedme.api.methods",
    "Model": "fedme.core.model",
    "PFedMe": "fedme.api.methods",
    "Personal": "fedme.artifacts.personal_model",
    "Result": "fedme.api.result",
    "load_model": "fedme.artifacts.saved_models",
    "load_run": "fedme.api.result",
    "register": "fedme.networks",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: importing the package alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedme' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
