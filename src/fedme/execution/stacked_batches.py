"""The batches of many clients side by side, and their losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.operations import Objective, Role, Train

PENDING = 1 << 20  # logits kept before their losses are computed


@dataclass(frozen=True)
class StackedBatches:
    """The samples of every client at every step; clients are sorted by falling number of steps.

    So the clients that still train are a prefix of every stack, and nothing is computed for those that have finished.
    """

    rows: Tensor  # clients x steps x batch: row numbers of the source
    targets: Tensor  # clients x steps x batch (x classes)
    weights: Tensor  # clients x steps x batch: of the losses in their sum (`BatchSchedule.divisors`), 0 for padding
    active: list[int]  # per step, the number of clients that have a batch

    @classmethod
    def of(cls, ops: Sequence[Train], dtype: torch.dtype, device: torch.device) -> tuple[list[int], "StackedBatches"]:
        """The order of the operations, and their batches in this order."""
        drawn = [op.batch_schedule.positions(len(op.data), op.key.at("batches")) for op in ops]
        order = sorted(range(len(ops)), key=lambda i: -len(drawn[i][1]))
        steps = [len(drawn[i][1]) for i in order]
        width, longest = max(positions.shape[1] for positions, _ in drawn), max(steps, default=0)
        sample = ops[0].data.y
        rows = torch.zeros((len(ops), longest, width), dtype=torch.int64)
        targets = torch.zeros((len(ops), longest, width, *sample.shape[1:]), dtype=sample.dtype)
        weights = torch.zeros((len(ops), longest, width), dtype=dtype)
        inside = torch.arange(width)
        for rank, i in enumerate(order):
            positions, sizes = drawn[i]
            count, batch = positions.shape
            if count:
                rows[rank, :count, :batch] = ops[i].data.rows[positions]
                targets[rank, :count, :batch] = ops[i].data.y[positions]
                divisors = ops[i].batch_schedule.divisors(len(ops[i].data), sizes)
                weights[rank, :count] = (inside < sizes[:, None]).to(dtype) / divisors[:, None].to(dtype)
        active = (torch.tensor(steps)[:, None] > torch.arange(longest)).sum(0).tolist()
        return order, cls(rows.to(device), targets.to(device), weights.to(device), active)


class Losses:
    """The training losses of all clients, computed for many steps at once: nothing waits for them."""

    def __init__(self, batches: StackedBatches, objective: Objective) -> None:
        self.batches, self.objective = batches, objective
        self.pending: list[tuple[Mapping[Role, Tensor], Tensor]] = []
        self.pending_size = 0
        self.computed: dict[Role, list[Tensor]] = {}

    def add(self, logits: Mapping[Role, Tensor], y: Tensor) -> None:
        """Note the logits and targets of the active clients in the next step."""
        self.pending.append((logits, y))
        self.pending_size += sum(z.numel() for z in logits.values())
        if self.pending_size > PENDING:
            self._compute()

    def _compute(self) -> None:
        if not self.pending:
            return
        y = torch.cat([targets.flatten(0, 1) for _, targets in self.pending])
        logits = {role: torch.cat([step[role].flatten(0, 1) for step, _ in self.pending]) for role in self.pending[0][0]}
        for role, loss in self.objective(logits, y).items():
            self.computed.setdefault(role, []).append(loss.detach())
        self.pending, self.pending_size = [], 0

    def means(self) -> list[dict[Role, float]]:
        """The mean over the samples seen, for every client and role."""
        self._compute()
        counts = self.batches.weights.transpose(0, 1) > 0  # steps x clients x batch
        totals = counts.sum((0, 2))
        active = torch.arange(counts.shape[1]) < torch.tensor(self.batches.active)[:, None]
        means = {}
        for role, losses in self.computed.items():
            stacked = losses[0].new_zeros(counts.shape)
            stacked[active.to(stacked.device)] = torch.cat(losses).view(-1, counts.shape[2])
            means[role] = (torch.where(counts, stacked, 0.0).sum((0, 2)) / totals).tolist()
        return [{role: mean[rank] for role, mean in means.items()} for rank in range(len(totals))]
