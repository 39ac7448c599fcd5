"""Networks without an import path: instances, and classes defined inside a function.

A saved model cannot refer to them by name. Worker processes are forked, and look them up by number.
"""

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_numbers = itertools.count(1)
_networks: "weakref.WeakValueDictionary[int, InMemoryNetwork]" = weakref.WeakValueDictionary()


class InMemoryNetwork:
    """A factory that exists only in this process and its forks."""

    def __init__(self, factory: Callable[..., nn.Module], name: str) -> None:
        self.factory, self.number = factory, next(_numbers)
        self.__name__ = self.__qualname__ = name
        self.__signature__ = inspect.signature(factory)
        _networks[self.number] = self

    def __call__(self, **options: Any) -> nn.Module:
        return self.factory(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_number, (self.number,)


def _by_number(number: int) -> InMemoryNetwork:
    return _networks[number]


def from_instance(module: nn.Module) -> InMemoryNetwork:
    """A factory of copies of `module`, including its current weights."""
    original = _copied(module)  # later changes of `module` must not matter
    return InMemoryNetwork(lambda: _copied(original), type(module).__qualname__)


def _copied(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    for name, weight in module.named_parameters():
        for hook in (weight._backward_hooks or {}).values():  # which a copy does not have
            copied.get_parameter(name).register_hook(hook)
    return copied


def has_qualified_name(factory: Callable[..., nn.Module]) -> bool:
    """Whether ``module:name`` identifies the factory; not for one defined inside a function."""
    return "<" not in f"{factory.__module__}:{getattr(factory, '__qualname__', '<')}"


def importable(factory: Callable[..., nn.Module]) -> bool:
    """Whether another program can import the factory."""
    return not isinstance(factory, InMemoryNetwork) and has_qualified_name(factory) and factory.__module__ != "__main__"
