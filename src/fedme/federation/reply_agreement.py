"""Replies compared with each other: the last check, for methods whose replies do not look like anything that was sent."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from fedme.core import tree
from fedme.core.data import ClientId


def different_from_most(replies: Mapping[ClientId, Any], form: Callable[[Any], Hashable]) -> list[ClientId]:
    """The clients whose replies have another form than more than half of them; nobody if there is no such form."""
    forms = {client: form(reply) for client, reply in replies.items()}
    common, count = Counter(forms.values()).most_common(1)[0] if forms else (None, 0)
    return [client for client, shape in forms.items() if shape != common] if 2 * count > len(forms) else []


def tensor_kinds(reply: Any) -> Hashable:
    """The dimensions and types of the tensors that are fields of a reply. Sizes may differ between clients, these do not."""
    fields = type(reply).__dataclass_fields__
    return tuple([(name, value.dim(), value.dtype) for name in fields if isinstance(value := getattr(reply, name), Tensor)])


def full_form(reply: Any) -> Hashable:
    """The place, shape and type of everything in a reply."""
    leaves = tree.leaves(reply)
    return tuple((at, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (at, type(leaf)) for at, leaf in leaves)
