"""Attention in operations that can be seen: torch's kernels draw the dropout of its weights from a global generator."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Drop = Callable[[Tensor, float], Tensor]  # values and a probability


def attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The result of `F.scaled_dot_product_attention`, with weights dropped by `drop`, and these weights."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = seen if attn_mask is None else attn_mask
    if attn_mask is not None:
        scores = scores + _added(attn_mask, query.dtype)
    weights = drop(scores.softmax(-1), dropout_p)
    return weights @ value, weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to scores; of booleans, true is what takes part."""
    return (
        torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
        if mask.dtype == torch.bool
        else mask
    )


def is_plain(layer: nn.MultiheadAttention) -> bool:
    """Whether `attention_of` computes what the layer does."""
    return layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn


def attention_of(
    layer: nn.MultiheadAttention,
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass of a plain layer, of whole batches; `is_causal` only says what the mask is."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch says
    alike = query is key and key is value
    q, k, v = _projected(layer, query, key, value, alike)
    if not layer.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    heads = layer.num_heads
    q, k, v = (x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2) for x in (q, k, v))
    mask = None
    if attn_mask is not None:
        mask = _excluded(attn_mask, q.dtype)
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        padding = _excluded(key_padding_mask, q.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    result, weights = attention(drop, q, k, v, mask, layer.dropout)
    result = layer.out_proj(result.transpose(1, 2).flatten(2))
    result = result if layer.batch_first else result.transpose(0, 1)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def _excluded(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask of a layer adds to scores; of booleans, true is what does not take part."""
    return _added(~mask, dtype) if mask.dtype == torch.bool else mask


def _projected(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, alike: bool) -> Any:
    biases: Any = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    if layer.in_proj_weight is None:  # keys or values of another width
        weights: Any = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    elif alike:
        return F.linear(query, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    else:
        weights = layer.in_proj_weight.chunk(3)
    return [F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases, strict=True)]
