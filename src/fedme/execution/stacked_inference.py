"""Logits of many models on many splits at once.

One model on the data of many clients (a global model) is one pass over all of it. Different models on their own data are
stacked in chunks of similar size, so that little is computed for padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedme.core.model import Model
from fedme.core.operations import Evaluate, Predict
from fedme.execution import stacked_vmap
from fedme.execution.batch_sizes import same_for
from fedme.execution.dense_layers import dense_layers
from fedme.execution.input_tables import InputTable
from fedme.execution.reference import EVALUATION_BATCH
from fedme.execution.stacked_dense import dense_pass

CHUNK = 1 << 22  # input values that one pass takes


def predict_stacked(ops: Sequence[Evaluate | Predict], table: InputTable) -> list[Tensor]:
    """The logits of every operation; all models have one architecture, all splits one source."""
    results: dict[int, Tensor] = {}
    by_model: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        by_model.setdefault(id(op.model), []).append(index)
    for group in by_model.values():
        rows = torch.cat([ops[index].data.rows for index in group])
        if len(group) > 1 and _alike(ops[group[0]].model, [len(part) for part in rows.split(EVALUATION_BATCH * 8)], table):
            parts = [_logits([ops[group[0]].model], part[None], table)[0] for part in rows.split(EVALUATION_BATCH * 8)]
            results.update(zip(group, torch.cat(parts).split([len(ops[index].data) for index in group]), strict=True))
    single = sorted((index for index in range(len(ops)) if index not in results), key=lambda index: -len(ops[index].data))
    while single:
        longest = len(ops[single[0]].data)
        count = max(1, CHUNK // (longest * table.features))
        # At most half of the work may be padding.
        chunk = [index for index in single[:count] if 2 * len(ops[index].data) >= longest]
        single = single[len(chunk) :]
        if not all(_alike(ops[index].model, [longest], table) for index in chunk):
            for index in chunk:
                parts = [
                    _logits([ops[index].model], part[None], table)[0] for part in ops[index].data.rows.split(EVALUATION_BATCH)
                ]
                results[index] = torch.cat(parts)
            continue
        rows = torch.zeros((len(chunk), longest), dtype=torch.int64)
        for place, index in enumerate(chunk):
            rows[place, : len(ops[index].data)] = ops[index].data.rows
        logits = _logits([ops[index].model for index in chunk], rows, table)
        for place, index in enumerate(chunk):
            results[index] = logits[place, : len(ops[index].data)].clone()
    return [results[index].to("cpu") for index in range(len(ops))]


def _alike(model: Model, sizes: Sequence[int], table: InputTable) -> bool:
    """Whether a network does the same with batches of these sizes as with those of one client."""
    return all(same_for(model.arch, table.shape, table.symbols, model.dtype, False, size) for size in sizes)


def _logits(models: Sequence[Model], rows: Tensor, table: InputTable) -> Tensor:
    rows = rows.to(table.values.device)
    trees = [{**model.params, **model.buffers} for model in models]  # buffers are frozen weights
    weights = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    layers = dense_layers(models[0].arch, table.shape) if not table.symbols else ""
    if not isinstance(layers, str):
        return dense_pass(layers, weights, table.flat(rows), None).logits
    with torch.no_grad():
        return stacked_vmap.logits(models[0].arch, weights, table.shaped(rows), None)
