"""Logits of many models on many splits at once.

One model on the data of many clients (a global model) is one pass over all of it; different models on their own data are
stacked in chunks of similar size, so that little is computed for padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedme.core.data import Split
from fedme.core.model import Model
from fedme.execution import vmapped
from fedme.execution.batch_gathering import Fetch
from fedme.execution.dense_networks import chain, forward
from fedme.execution.reference import EVALUATION_BATCH

CHUNK = 1 << 22  # numbers of input that one program takes


def predict_stacked(work: Sequence[tuple[Model, Split]], fetch: Fetch, dense: bool) -> list[Tensor]:
    """The logits of every pair; all models have one architecture, all splits one source, whose inputs `fetch` has.

    `dense` says that the architecture is a chain, to be run as one.
    """
    results: list[Tensor | None] = [None] * len(work)
    by_model: dict[int, list[int]] = {}
    for index, (model, _) in enumerate(work):
        by_model.setdefault(id(model), []).append(index)
    shared = [group for group in by_model.values() if len(group) > 1]
    for group in shared:
        sizes = [len(work[index][1]) for index in group]
        rows = torch.cat([work[index][1].rows for index in group])
        parts = rows.split(EVALUATION_BATCH * 8)
        logits = torch.cat([_run([work[group[0]][0]], part[None], fetch, dense)[0] for part in parts])
        for index, part in zip(group, logits.split(sizes), strict=True):
            results[index] = part
    single = [group[0] for group in by_model.values() if len(group) == 1]
    single.sort(key=lambda index: -len(work[index][1]))
    while single:
        longest = len(work[single[0]][1])
        count = max(1, CHUNK // (longest * fetch.table.shape[1]))
        # Not more than half of the work may be padding.
        chunk = [index for index in single[:count] if 2 * len(work[index][1]) >= longest]
        single = single[len(chunk) :]
        rows = torch.zeros((len(chunk), longest), dtype=torch.int64)
        for place, index in enumerate(chunk):
            rows[place, : len(work[index][1])] = work[index][1].rows
        logits = _run([work[index][0] for index in chunk], rows, fetch, dense)
        for place, index in enumerate(chunk):
            results[index] = logits[place, : len(work[index][1])].clone()
    return [result.to("cpu") for result in results if result is not None]


def _run(models: Sequence[Model], rows: Tensor, fetch: Fetch, dense: bool) -> Tensor:
    rows = rows.to(fetch.table.device)
    network = chain(models[0].arch) if dense else None
    weights = {name: torch.stack([model.params[name] for model in models]) for name in models[0].params}
    if network is not None:
        return forward(network, weights, fetch.flat(rows), None)[0]
    with torch.no_grad():
        return vmapped.logits(models[0].arch, weights, fetch.shaped(rows), None)
