"""Networks that only this process has: an instance, or a class that was defined inside a function.

They have no import path, so a saved model cannot name them. Worker processes are forked and find them by number.
"""

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_numbers = itertools.count(1)
_here: "weakref.WeakValueDictionary[int, InMemoryNetwork]" = weakref.WeakValueDictionary()


class InMemoryNetwork:
    """A factory without an import path."""

    def __init__(self, factory: Callable[..., nn.Module], name: str) -> None:
        self.factory, self.number = factory, next(_numbers)
        self.__name__ = self.__qualname__ = name
        self.__signature__ = inspect.signature(factory)
        _here[self.number] = self

    def __call__(self, **options: Any) -> nn.Module:
        return self.factory(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.number,)


def _found(number: int) -> InMemoryNetwork:
    return _here[number]


def from_instance(module: nn.Module) -> InMemoryNetwork:
    """The factory of copies of `module`, weights and all."""
    whole = copy.deepcopy(module)  # what happens to the original from now on does not matter
    return InMemoryNetwork(lambda: copy.deepcopy(whole), type(module).__qualname__)


def has_qualified_name(factory: Callable[..., nn.Module]) -> bool:
    """Whether its module and its name in the module can be written down; not so inside a function."""
    return "<" not in f"{factory.__module__}:{getattr(factory, '__qualname__', '<')}"


def importable(factory: Callable[..., nn.Module]) -> bool:
    """Whether another program can have it by its import path."""
    return not isinstance(factory, InMemoryNetwork) and has_qualified_name(factory) and factory.__module__ != "__main__"
