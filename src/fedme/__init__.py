"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedme.core.key import Key
    from fedme.core.model import Arch, Model
    from fedme.experiment.saved import load_model
    from fedme.zoo import register

__version__ = "0.1.0"

__all__ = ["Arch", "Key", "Model", "load_model", "register"]

_HOMES = {
    "Arch": "fedme.core.model",
    "Key": "fedme.core.key",
    "Model": "fedme.core.model",
    "load_model": "fedme.experiment.saved",
    "register": "fedme.zoo",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: importing the package alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedme' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
