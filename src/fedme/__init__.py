"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedme.api.client import Client as Client
    from fedme.api.learner import Learner as Learner
    from fedme.api.learner import learner as learner
    from fedme.api.methods import FML as FML
    from fedme.api.methods import PFML as PFML
    from fedme.api.methods import Centralized as Centralized
    from fedme.api.methods import FedAvg as FedAvg
    from fedme.api.methods import FedMD as FedMD
    from fedme.api.methods import FedMe as FedMe
    from fedme.api.methods import FedProx as FedProx
    from fedme.api.methods import HypCluster as HypCluster
    from fedme.api.methods import Local as Local
    from fedme.api.methods import Mapper as Mapper
    from fedme.api.methods import PFedMe as PFedMe
    from fedme.api.result import Result as Result
    from fedme.api.result import load_run as load_run
    from fedme.artifacts.personal_model import Personal as Personal
    from fedme.artifacts.saved_models import load_model as load_model
    from fedme.core.key import Key as Key
    from fedme.core.method import Method as Method
    from fedme.core.model import Arch as Arch
    from fedme.core.model import Model as Model
    from fedme.networks import register as register

__version__ = "0.1.0"

_METHODS = ["FML", "PFML", "Centralized", "FedAvg", "FedMD", "FedMe", "FedProx", "HypCluster", "Local", "Mapper", "PFedMe"]
_HOMES = dict.fromkeys(_METHODS, "fedme.api.methods") | {
    "Arch": "fedme.core.model",
    "Client": "fedme.api.client",
    "Key": "fedme.core.key",
    "Learner": "fedme.api.learner",
    "Method": "fedme.core.method",
    "Model": "fedme.core.model",
    "Personal": "fedme.artifacts.personal_model",
    "Result": "fedme.api.result",
    "learner": "fedme.api.learner",
    "load_model": "fedme.artifacts.saved_models",
    "load_run": "fedme.api.result",
    "register": "fedme.networks",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing the package alone is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedme' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
