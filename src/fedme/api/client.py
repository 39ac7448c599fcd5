"""A client as a program describes it: its samples and its network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from fedme.config.settings import Spec
from fedme.core.data import ClientId
from fedme.core.model import Arch
from fedme.core.typed import TypedError
from fedme.datasets.data_files import Label
from fedme.datasets.python_objects import read_object
from fedme.datasets.user_data import ClientSamples
from fedme.networks import Entry, InMemoryNetwork, from_instance, has_qualified_name, user_entry

Network = Arch | nn.Module | type[nn.Module] | Spec


@dataclass(frozen=True, eq=False, repr=False)
class Client:
    """A client: its name, its samples with labels, and its network.

    Samples are ``(inputs, labels)`` as tensors or arrays, a pandas frame, a torch data set or `DataLoader`, a Hugging Face data
    set, or the path of a file; `label` names the column or entry with the labels (or several) where there are names. What is
    not given of `val` and `test` is cut from `train`. `rename` gives labels of this client the names that the others use. The
    network is an ``Arch(MyNet, width=64)``, a module, or the name of a built-in one.
    """

    id: ClientId
    train: Any
    val: Any = None
    test: Any = None
    model: Network | None = None
    label: str | Sequence[str] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> Label:
        """The columns with its labels."""
        return self.label if self.label is None or isinstance(self.label, str) else tuple(self.label)

    def __repr__(self) -> str:
        parts = {name: getattr(self, name) for name in ("train", "val", "test")}
        texts = [repr(self.id), *(f"{name}: {_about(part)}" for name, part in parts.items() if part is not None)]
        model = self.model
        if model is not None:
            name = model.name if isinstance(model, Arch) else model.__name__ if isinstance(model, type) else None
            texts.append(f"model: {name or (type(model).__name__ if isinstance(model, nn.Module) else model)}")
        return f"Client({', '.join(texts)})"

    def piece(self) -> ClientSamples:
        """Its samples, read."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        samples = {
            name: read_object(given, self.columns, f"client {self.id}, {name}")
            for name, given in parts.items()
            if given is not None
        }
        if "train" not in samples:
            raise TypedError(f"client {self.id}", "there are no samples; give them as train=(inputs, labels)")
        return ClientSamples(**samples, rename=self.rename)


def _about(samples: Any) -> str:
    """A few words about samples, without reading them."""
    if isinstance(samples, str | Path):
        return str(samples)
    pair = isinstance(samples, tuple | list) and len(samples) == 2
    try:
        inside: Any = samples[1] if pair else samples.dataset if isinstance(samples, DataLoader) else samples
        count = len(inside)
    except (TypeError, IndexError):
        return type(samples).__name__
    return f"{count} samples" if pair else f"{count} samples ({type(samples).__name__})"


class Networks:
    """Networks that were given as objects, and the names an experiment calls them by."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._instances: dict[int, tuple[nn.Module, str]] = {}
        self._unnamed: list[Any] = []

    def copy(self) -> "Networks":
        """The same networks, to which others can be added."""
        other = Networks()
        other.entries, other._instances, other._unnamed = dict(self.entries), dict(self._instances), list(self._unnamed)
        return other

    def spec(self, network: Network) -> Spec:
        """What the experiment says for this network."""
        if isinstance(network, str | Mapping):
            return network
        if isinstance(network, nn.Module):
            return self._instance(network)
        if isinstance(network, type):
            network = Arch(network)
        if not isinstance(network, Arch):
            raise TypedError(
                "model", f"must be fedme.Arch(MyNet, ...) of a class or a function, an nn.Module or a name, got {network!r}"
            )
        return self._recipe(network)

    def _recipe(self, arch: Arch) -> Spec:
        factory: Any = arch.factory
        named = hasattr(factory, "__qualname__")  # not a functools.partial, nor an object that can be called
        name = f"{factory.__module__}:{factory.__qualname__}" if named else f"{arch.name}#{self._number(factory)}"
        if name not in self.entries:
            label = factory.__qualname__ if named else arch.name
            self.entries[name] = user_entry(name, factory if has_qualified_name(factory) else InMemoryNetwork(factory, label))
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in arch.options}
        return {"name": name, **options} if options else name

    def _number(self, factory: Any) -> int:
        """The number of a factory without a name: equal names may mean different factories."""
        if not any(factory is known for known in self._unnamed):
            self._unnamed.append(factory)
        return 1 + next(i for i, known in enumerate(self._unnamed) if factory is known)

    def _instance(self, module: nn.Module) -> str:
        if id(module) not in self._instances:
            name = f"{type(module).__name__}#{len(self._instances) + 1}"
            self._instances[id(module)] = module, name
            self.entries[name] = user_entry(name, from_instance(module))
        return self._instances[id(module)][1]
