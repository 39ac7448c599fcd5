"""Dropout whose mask is a pure function of a seed and a position.

Masks come from integer hashing (the finalisers of splitmix64 for seeds and of a 32-bit hash for positions), without generator
state. A stack of clients, with one seed per client, therefore gets in one operation the masks that each client gets alone.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedme.core.attention import attention, attention_of, is_plain

_INCREMENT = -7046029254386353131  # of splitmix64: 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLIER_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -7723592293110705685  # 0x94D049BB133111EB
_MULTIPLIER_3 = 0x7FEB352D
_MULTIPLIER_4 = -2073254261  # 0x846CA68B as a signed 32-bit integer


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """A 64-bit hash of each element."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift(x, 27)) * _MULTIPLIER_2
    return x ^ _shift(x, 31)


def at_draw(seed: Tensor, draw: int | Tensor) -> Tensor:
    """The seed of the `draw`-th mask of a layer, or of several."""
    return mixed(seed + torch.as_tensor(draw, device=seed.device) * _INCREMENT)


def uniform(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """`count` uniform numbers in [0, 1) per seed, starting at position `first`: shape ``seed.shape + (count,)``."""
    return _hashed(seed, count, first).to(torch.float32) * 2.0**-24


def kept(seed: Tensor, count: int, p: float, first: int | Tensor = 0) -> Tensor:
    """Whether each of the uniform numbers is at least `p`, a single-precision number as they are."""
    return _hashed(seed, count, first) >= math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2.0**24)


def _hashed(seed: Tensor, count: int, first: int | Tensor) -> Tensor:
    """Integers of 24 bits. Positions are hashed in 32 bits, because 32-bit multiplication vectorises.

    Both halves of the seed are used.
    """
    low, high = seed.to(torch.int32).unsqueeze(-1), (seed >> 32).to(torch.int32).unsqueeze(-1)
    places = torch.arange(1, count + 1, dtype=torch.int32, device=seed.device)
    x = (places + first if isinstance(first, Tensor) or first else places) ^ low
    x = (x ^ _shift32(x, 16)) * _MULTIPLIER_3
    x = (x ^ _shift32(x, 15) ^ high) * _MULTIPLIER_4
    return _shift32(x ^ _shift32(x, 16), 8)


def _shift32(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 32-bit integers."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with a seed, stored as a buffer, instead of the global generator."""

    seed: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.calls = 0  # a layer called twice in one forward pass draws two masks
        # Position of the first sample in its batch: a single sample gets the mask it has in the full batch. In a vmap a tensor.
        self.first: int | Tensor = 0
        self.ahead: Callable[[int], Tensor] | None = None  # what the first call keeps of so many values, if known already
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(x, self.p) if self.training else x

    def masked(self, x: Tensor, p: float) -> Tensor:
        """`x` with the next mask."""
        if p == 0.0:
            return x
        seed = at_draw(self.seed, -self.calls) if self.calls else self.seed
        start = self.first * x[0].numel()
        ahead = self.ahead if not self.calls else None
        keep = (kept(seed, x.numel(), p, start) if ahead is None else ahead(x.numel())).reshape(x.shape)
        self.calls += 1
        return x * keep / (1.0 - p) if p < 1.0 else torch.zeros_like(x)


class FunctionalDropout(KeyedDropout):
    """The masks of `F.dropout` in the forward pass of the module that this layer is put into; every call says its own p."""

    def __init__(self) -> None:
        super().__init__(float("nan"))

    def forward(self, x: Tensor, p: float = 0.5) -> Tensor:
        ahead, self.ahead = self.ahead, None  # computed for another p
        try:
            return self.masked(x, p)
        finally:
            self.ahead = ahead


FUNCTIONAL = "functional_dropout"  # the name of such a layer


class _Redirect(TorchFunctionMode):
    """Lets a layer compute what `F.dropout` is asked for."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = getattr(self.owner, FUNCTIONAL)
        if func is F.scaled_dot_product_attention:
            return self._attention(layer, *args, **(kwargs or {}))
        if func is not F.dropout and func is not torch.dropout:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | (kwargs or {})
        x = given["input"]
        if not given.get("training", given.get("train", True)):
            return x
        result = layer(x, given.get("p", 0.5))
        return x.copy_(result) if given.get("inplace", False) else result

    @staticmethod
    def _attention(
        drop: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        if not dropout_p or others.get("enable_gqa", False):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
        return attention(drop, query, key, value, attn_mask, dropout_p, is_causal, others.get("scale"))[0]


def key_functional_dropout(module: nn.Module) -> None:
    """Give every module whose forward pass calls a function with dropout, also that of attention, a layer with keyed masks.

    Of the modules of torch these are `nn.MultiheadAttention`; recurrent layers have dropout inside their kernels.
    """
    for child in list(module.modules()):
        if type(child) is nn.MultiheadAttention and child.dropout and is_plain(child) and not hasattr(child, FUNCTIONAL):
            child.add_module(FUNCTIONAL, FunctionalDropout().train(child.training))
            child.forward = _keyed_attention(child, child.forward)  # type: ignore[method-assign]
            continue
        code = getattr(inspect.getattr_static(type(child), "forward", None), "__code__", None)
        of_torch = type(child).__module__.startswith(("torch.nn.", "fedme.core."))
        names = code.co_names if code is not None else ()
        is_layer = isinstance(getattr(child, "dropout", None), nn.Module)
        calls_function = ("dropout" in names and not is_layer) or "scaled_dot_product_attention" in names
        if calls_function and not of_torch and not hasattr(child, FUNCTIONAL):
            child.add_module(FUNCTIONAL, FunctionalDropout().train(child.training))
            child.forward = _redirected(child, child.forward)


def _keyed_attention(layer: nn.MultiheadAttention, forward: Callable[..., Any]) -> Callable[..., Any]:
    def keyed(query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Any:
        if not layer.training or query.dim() != 3 or query.is_nested:
            return forward(query, key, value, *masks, **options)
        return attention_of(layer, getattr(layer, FUNCTIONAL), query, key, value, *masks, **options)

    return keyed


def _redirected(owner: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def keyed(*inputs: Any, **options: Any) -> Any:
        with _Redirect(owner):
            return forward(*inputs, **options)

    return keyed
