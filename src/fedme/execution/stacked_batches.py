"""The batches of many clients side by side, and what each client's loss was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.operations import Objective, Role, Train

WAITING = 1 << 20  # numbers of output kept before their losses are computed


@dataclass(frozen=True)
class Schedule:
    """Which samples each client sees at each step; clients in order of falling numbers of steps."""

    rows: Tensor  # clients x steps x batch: row numbers of the source
    targets: Tensor  # clients x steps x batch (x classes)
    share: Tensor  # clients x steps x batch: 1 / batch size (its mean, if batches are drawn by chance), 0 for padding
    active: list[int]  # at each step, how many clients have a batch

    def to(self, device: torch.device) -> "Schedule":
        """The same on a device."""
        return Schedule(self.rows.to(device), self.targets.to(device), self.share.to(device), self.active)

    def at_work(self, units: int, counts: Sequence[int]) -> Tensor:
        """For every step, whether each of so many units is among the first, which are still at work."""
        device = self.rows.device
        return torch.arange(units, device=device) < torch.tensor(counts, device=device)[:, None]

    def packed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For every step, the targets and the shares (with an axis for classes) of the clients at work."""
        at_work = self.at_work(len(self.rows), self.active)
        targets, share = (each.transpose(0, 1)[at_work].split(self.active) for each in (self.targets, self.share.unsqueeze(-1)))
        return targets, share


def schedule(ops: Sequence[Train], dtype: torch.dtype) -> tuple[list[int], Schedule]:
    """The order of the operations, and their batches side by side."""
    plans = [op.batch_schedule.positions(len(op.data), op.key.at("batches")) for op in ops]
    order = sorted(range(len(ops)), key=lambda i: -len(plans[i][1]))
    steps = [len(plans[i][1]) for i in order]
    width, longest = max(positions.shape[1] for positions, _ in plans), max(steps, default=0)
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
            local, samples = ops[i].batch_schedule, len(ops[i].data)
            whole = torch.full_like(sizes, min(local.batch, samples)) if local.poisson else sizes
            share[place, :count] = (inside < sizes[:, None]).to(dtype) / whole[:, None].to(dtype)
    active = (torch.tensor(steps)[:, None] > torch.arange(longest)).sum(0).tolist()
    return order, Schedule(rows, targets, share, active)


class Losses:
    """Training losses of all clients; nothing waits for them, so they are computed for many steps at once."""

    def __init__(self, plan: Schedule, objective: Objective) -> None:
        self.plan, self.objective = plan, objective
        self.waiting: list[tuple[Mapping[Role, Tensor], Tensor]] = []
        self.numbers = 0
        self.seen: dict[Role, list[Tensor]] = {}

    def add(self, logits: Mapping[Role, Tensor], y: Tensor) -> None:
        """Note the outputs and targets of the clients at work in the next step."""
        self.waiting.append((logits, y))
        self.numbers += sum(z.numel() for z in logits.values())
        if self.numbers > WAITING:
            self._compute()

    def _compute(self) -> None:
        if not self.waiting:
            return
        y = torch.cat([targets.flatten(0, 1) for _, targets in self.waiting])
        logits = {role: torch.cat([each[role].flatten(0, 1) for each, _ in self.waiting]) for role in self.waiting[0][0]}
        for role, loss in self.objective(logits, y).items():
            self.seen.setdefault(role, []).append(loss.detach())
        self.waiting, self.numbers = [], 0

    def means(self) -> list[dict[Role, float]]:
        """The mean over the samples seen, for every client and role."""
        self._compute()
        counts = self.plan.share.transpose(0, 1) > 0  # steps x clients x batch
        totals = counts.sum((0, 2))
        at_work = self.plan.at_work(counts.shape[1], self.plan.active)
        sums = {}
        for role, losses in self.seen.items():
            whole = losses[0].new_zeros(counts.shape)
            whole[at_work] = torch.cat(losses).view(-1, counts.shape[2])
            sums[role] = torch.where(counts, whole, 0.0).sum((0, 2)) / totals
        means = {role: mean.tolist() for role, mean in sums.items()}
        return [{role: mean[rank] for role, mean in means.items()} for rank in range(len(totals))]
