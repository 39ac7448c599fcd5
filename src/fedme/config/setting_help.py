"""Names, defaults and help texts of the settings in a dataclass, for `fedme list` and the reference pages."""

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fedme.config.settings import EngineOptions, FinetuneOptions, ModelOptions, PrivacyOptions
from fedme.datasets.federated_dataset import DataOptions
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training

# The tables of an experiment with the same keys in every experiment.
TABLES: Mapping[str, type[Any]] = {
    "data": DataOptions,
    "models": ModelOptions,
    "train": Training,
    "finetune": FinetuneOptions,
    "privacy": PrivacyOptions,
    "engine": EngineOptions,
    "faults": Faults,
    "defence": Defence,
    "attack": Attack,
}


class Setting(NamedTuple):
    """One setting: its name, its default as text, and its help text."""

    name: str
    default: str
    about: str


def settings_of(table: type[Any]) -> list[Setting]:
    """The settings of a dataclass, in order, without the tables `train` and `defence`, which are shared by all methods."""
    fields = [field for field in dataclasses.fields(table) if field.init and field.name not in ("train", "defence")]
    annotations = get_type_hints(table)
    return [Setting(field.name, _default(field), _about(field, annotations[field.name])) for field in fields]


def _about(field: "dataclasses.Field[Any]", annotation: Any) -> str:
    """The allowed values, if they are listed in the type annotation, and the help text."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [str(value) for option in options if get_origin(option) is Literal for value in get_args(option)]
    text = field.metadata.get("help", "")
    return "; ".join(part for part in (" | ".join(choices), text) if part)


def _default(field: "dataclasses.Field[Any]") -> str:
    if dataclasses.is_dataclass(field.default):
        return "{}"
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else json.dumps(field.default)
    return "{}" if field.default_factory is not dataclasses.MISSING else "(required)"
