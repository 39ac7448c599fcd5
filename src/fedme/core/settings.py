"""Settings: dataclass fields that carry a help text, which `fedme list` and the reference pages show."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
def setting(default: T, help: str) -> T: ...
@overload
def setting(*, help: str, default_factory: Callable[[], T]) -> T: ...
@overload
def setting(*, help: str) -> Any: ...
def setting(default: Any = dataclasses.MISSING, help: str = "", default_factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with a help text. Without `default` and `default_factory`, the setting is required."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata={"help": help})
