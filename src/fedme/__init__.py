"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.zoo import register

__version__ = "0.1.0"

__all__ = ["Arch", "Key", "Model", "register"]
