"""Distances of many models from each other, and many weighted means of them, without a copy of all their weights."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pdist

from fedme.core.flat_params import FlatLayout, FlatParams, flat_layout
from fedme.core.model import Model

TILE = 1 << 16  # weights of every model that are looked at together: tiles take little memory and stay in the cache


def squared_distances(models: Sequence[Model], chosen: Sequence[int]) -> Tensor:
    """A row per chosen model with its squared distances from all models."""
    tiles = _tiles(models, _layout(models))
    # Not by products of matrices, which would lose digits where models are close to each other.
    if len(chosen) < len(models):
        some, exact = list(chosen), "donot_use_mm_for_euclid_dist"
        return _sum(torch.cdist(tile[some], tile, compute_mode=exact).square() for tile in tiles)
    pairs = _sum(pdist(tile).square() for tile in tiles)  # every pair once: several times faster
    above = pairs.new_zeros(len(models), len(models))
    above[tuple(torch.triu_indices(len(models), len(models), 1))] = pairs
    return above + above.T


def mixtures(models: Sequence[Model], weights: Tensor) -> list[FlatParams]:
    """A set of weights for every row of `weights`, which has the weight of every model in it."""
    layout = _layout(models)
    mixed = [weights @ tile for tile in _tiles(models, layout)]
    # A tensor per mixture: memory of that size is used again in the next round, that of one large tensor would be new.
    return [FlatParams(layout, torch.cat([tile[i] for tile in mixed])) for i in range(len(weights))]


def _layout(models: Sequence[Model]) -> FlatLayout:
    layout = flat_layout(models[0].params)
    assert layout is not None  # weights are of the type of the experiment
    return layout


def _tiles(models: Sequence[Model], layout: FlatLayout) -> Iterator[Tensor]:
    """Some weights, a row per model; then the next ones."""
    rows = (layout.flat(model.params).split(TILE) for model in models)
    return (torch.stack(tile) for tile in zip(*rows, strict=True))


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)
