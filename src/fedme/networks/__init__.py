"""The built-in networks by name, and the lookup of user-defined networks.

``arch("dnn-64", schema)`` is an architecture for the inputs and outputs of a task. User-defined networks need no registration:
their import path, such as "mypkg.nets:Net", is a valid name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedme.core.data import Schema
from fedme.core.model import Arch
from fedme.networks.convolutional import cnn, cnn_small, fml_cnn1, fml_cnn2, lenet5
from fedme.networks.dense import dnn, mlr
from fedme.networks.described import Description, as_data, described_arch
from fedme.networks.in_memory import InMemoryNetwork, from_instance, has_qualified_name, importable
from fedme.networks.input_sizes import ArchError
from fedme.networks.lookup import DENSE_FAMILY, Entry, Row, check, require_known as require_in, resolve, rows, user_entry
from fedme.networks.recurrent import lstm
from fedme.networks.vgg import vgg

__all__ = [
    "ARCHS",
    "ArchError",
    "Description",
    "Entry",
    "InMemoryNetwork",
    "Row",
    "arch",
    "as_data",
    "check",
    "describe",
    "described_arch",
    "from_instance",
    "has_qualified_name",
    "importable",
    "register",
    "require_known",
    "user_entry",
]

_FEDOPT = "FedMe, after Reddi et al. 2021"
_FEDMA = "FedMe, after Simonyan and Zisserman 2015 and Wang et al. 2020 (FedMA)"

ARCHS: dict[str, Entry] = {
    "mlr": Entry(mlr, "multinomial logistic regression: one linear layer", "pFedMe, PFML"),
    DENSE_FAMILY: Entry(dnn, "dense, hidden layers of these sizes: dnn-16, dnn-64-32", "pFedMe, PFML", {"hidden": ()}),
    "mlp": Entry(dnn, "dense, two hidden layers of 200 units", "FML, after McMahan et al. 2017", {"hidden": (200, 200)}),
    "cnn-small": Entry(cnn_small, "one padded convolution, one dense layer; for 8 x 8 digits", "this library"),
    **{f"cnn-{k}": Entry(cnn, f"3x3 convolutions: {k}; one dense layer of 128", _FEDOPT, {"layers": k}) for k in (1, 2, 3, 4)},
    **{
        f"cnn-{k}-linear": Entry(
            cnn, f"cnn-{k} without ReLU between convolutions", "FedMe's own code", {"layers": k, "conv_relu": False}
        )
        for k in (1, 2, 3, 4)
    },
    **{
        f"vgg{depth}": Entry(vgg, f"VGG with {depth} layers for 32 x 32 images", _FEDMA, {"depth": depth})
        for depth in (11, 13, 16, 19)
    },
    **{
        f"lstm-{k}": Entry(lstm, f"LSTM layers: {k}; predicts the next symbol", _FEDOPT, {"layers": k}, "symbols")
        for k in (1, 2, 3, 4)
    },
    "lenet5": Entry(lenet5, "two 5x5 convolutions, dense layers of 120 and 84", "FML, after LeCun et al. 1998"),
    "fml-cnn1": Entry(fml_cnn1, "3x3 convolutions of 6 and 16 channels, two dense layers", "FML"),
    "fml-cnn2": Entry(fml_cnn2, "three 3x3 convolutions of 128 channels, one dense layer", "FML"),
}


def arch(
    spec: str | Mapping[str, Any],
    schema: Schema,
    classes: int | None = None,
    *,
    imports: bool = True,
    more: Mapping[str, Entry] | None = None,
) -> Arch:
    """The architecture named by `spec`, for the inputs and outputs of a task.

    `spec` is a name of `ARCHS` ("dnn-64"), a name with options ("cnn-2(width=0.25)" or a table
    ``{"name": "cnn-2", "width": 0.25}``), or the import path of a module class or function ("mypkg.nets:Net"). Parameters
    called `shape`, `classes` and `vocabulary` are filled in.

    Resolving an import path executes code, so only trusted local configuration may contain one: pass ``imports=False`` for
    names from messages. `more` adds networks by name.
    """
    return resolve({**ARCHS, **more} if more else ARCHS, spec, schema, classes, imports)


def register(name: str, factory: Callable[..., nn.Module], about: str = "", source: str = "") -> None:
    """Register a user-defined network under a short name; a name can be registered again only with the same factory."""
    if not name or any(letter in "()[]:<>" or letter.isspace() for letter in name) or name.startswith("dnn-"):
        raise ArchError(f"invalid architecture name '{name}': no spaces, brackets or colons, and not 'dnn-...'")
    if name in ARCHS and ARCHS[name].factory is not factory:
        raise ArchError(f"another architecture is already registered as '{name}'; choose another name")
    ARCHS.setdefault(name, user_entry(name, factory, about, source))


def require_known(spec: str | Mapping[str, Any]) -> None:
    """Raise an ArchError for a name that no network has. Import paths are not looked at."""
    require_in(ARCHS, spec)


def describe() -> list[Row]:
    """All named architectures: name, description, source and options."""
    return rows(ARCHS)
