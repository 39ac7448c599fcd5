"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedme.api.client import Client as Client
    from fedme.api.comparison import Comparison as Comparison, compare as compare
    from fedme.api.learner import Learner as Learner, learner as learner
    from fedme.api.methods import (
        APFL as APFL,
        FD as FD,
        FML as FML,
        PFML as PFML,
        SCAFFOLD as SCAFFOLD,
        Centralized as Centralized,
        Ditto as Ditto,
        FedAMP as FedAMP,
        FedAvg as FedAvg,
        FedBN as FedBN,
        FedDF as FedDF,
        FedMD as FedMD,
        FedMe as FedMe,
        FedPer as FedPer,
        FedProto as FedProto,
        FedProx as FedProx,
        FedRep as FedRep,
        HeteroFL as HeteroFL,
        HypCluster as HypCluster,
        LGFedAvg as LGFedAvg,
        Local as Local,
        Mapper as Mapper,
        PFedMe as PFedMe,
    )
    from fedme.api.result import Result as Result, load_run as load_run
    from fedme.artifacts.personal_model import Personal as Personal
    from fedme.artifacts.saved_models import load_model as load_model
    from fedme.core.callbacks import Callback as Callback
    from fedme.core.key import Key as Key
    from fedme.core.method import Method as Method
    from fedme.core.model import Arch as Arch, Model as Model
    from fedme.networks import register as register

__version__ = "0.1.0"

_METHODS = [
    *("APFL", "FD", "FML", "PFML", "SCAFFOLD", "Centralized", "Ditto", "FedAMP", "FedAvg", "FedBN", "FedDF", "FedMD"),
    *("FedMe", "FedPer", "FedProto", "FedProx", "FedRep", "HeteroFL", "HypCluster", "LGFedAvg", "Local", "Mapper", "PFedMe"),
]
_MODULES = {
    "fedme.api.methods": _METHODS,
    "fedme.api.client": ["Client"],
    "fedme.api.comparison": ["Comparison", "compare"],
    "fedme.api.learner": ["Learner", "learner"],
    "fedme.api.result": ["Result", "load_run"],
    "fedme.artifacts.personal_model": ["Personal"],
    "fedme.artifacts.saved_models": ["load_model"],
    "fedme.core.callbacks": ["Callback"],
    "fedme.core.key": ["Key"],
    "fedme.core.method": ["Method"],
    "fedme.core.model": ["Arch", "Model"],
    "fedme.networks": ["register"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing the package alone is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedme' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
