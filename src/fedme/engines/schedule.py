"""The batches of many clients side by side, and what each client's loss was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.client import Objective, Role, Train


@dataclass(frozen=True)
class Schedule:
    """Which samples each client sees at each step; clients in order of falling numbers of steps."""

    rows: Tensor  # clients x steps x batch: row numbers of the source
    targets: Tensor  # clients x steps x batch (x classes)
    share: Tensor  # clients x steps x batch: 1 / batch size, 0 for padding
    active: list[int]  # at each step, how many clients have a batch


def schedule(ops: Sequence[Train], dtype: torch.dtype) -> tuple[list[int], Schedule]:
    """The order of the operations, and their batches side by side."""
    plans = [op.local.schedule(len(op.data), op.key.at("batches")) for op in ops]
    order = sorted(range(len(ops)), key=lambda i: -len(plans[i][1]))
    steps = [len(plans[i][1]) for i in order]
    width, longest = max(op.local.batch for op in ops), max(steps, default=0)
    sample = ops[0].data.y
    rows = torch.zeros((len(ops), longest, width), dtype=torch.int64)
    targets = torch.zeros((len(ops), longest, width, *sample.shape[1:]), dtype=sample.dtype)
    share = torch.zeros((len(ops), longest, width), dtype=dtype)
    inside = torch.arange(width)
    for place, i in enumerate(order):
        positions, sizes = plans[i]
        count, batch = positions.shape
        if count:
            rows[place, :count, :batch] = ops[i].data.rows[positions]
            targets[place, :count, :batch] = ops[i].data.y[positions]
            share[place, :count] = (inside < sizes[:, None]).to(dtype) / sizes[:, None].to(dtype)
    active = (torch.tensor(steps)[:, None] > torch.arange(longest)).sum(0).tolist()
    return order, Schedule(rows, targets, share, active)


def slopes(
    objective: Objective, logits: Mapping[Role, Tensor], y: Tensor
) -> tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]]:
    """Losses and their derivatives by the logits: the objective's own closed form, or by autograd."""
    closed = getattr(objective, "slopes", None)
    if closed is not None:
        return closed(logits, y)  # type: ignore[no-any-return]
    leaves = {role: z.detach().requires_grad_() for role, z in logits.items()}
    losses = objective(leaves, y)
    grads = torch.autograd.grad(torch.stack([loss.sum() for loss in losses.values()]).sum(), list(leaves.values()))
    return {role: loss.detach() for role, loss in losses.items()}, dict(zip(leaves, grads, strict=True))


class Losses:
    """Training losses of all clients, step by step; means are taken when everything is over."""

    def __init__(self, share: Tensor) -> None:
        self.share = share  # clients x steps x batch; 0 for padding
        self.seen: dict[Role, Tensor] = {}

    def add(self, losses: Mapping[Role, Tensor], step: int) -> None:
        """Note the losses of the clients at work in a step."""
        for role, loss in losses.items():
            if role not in self.seen:
                self.seen[role] = torch.zeros_like(self.share)
            self.seen[role][: len(loss), step] = loss

    def means(self) -> list[dict[Role, float]]:
        """The mean over the samples seen, for every client and role."""
        counts = self.share > 0
        totals = counts.sum((1, 2))
        sums = {role: torch.where(counts, loss, 0.0).sum((1, 2)) / totals for role, loss in self.seen.items()}
        return [{role: float(mean[rank]) for role, mean in sums.items()} for rank in range(len(totals))]
