"""Private gradients of many clients at once: what one sample adds to a gradient is known without writing it out.

In a dense layer the gradient of one sample is the product of its slope and its input, so its norm is the product of theirs;
samples are clipped by shrinking their slopes before the same multiplication. Other networks are differentiated by sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedme.core.operations import Batch, Role
from fedme.core.tree import Params
from fedme.execution.dense_networks import Linear, backward
from fedme.execution.stacked_optimizers import ByAutograd, ByHand, Pass, StackedGradient
from fedme.learning.differential_privacy import deviation, normal


class PrivateGradient(StackedGradient):
    """The gradients of the clients at work: clipped sample by sample over all roles together, with noise."""

    def _grads(
        self, passes: Sequence[Pass], slope: Mapping[Role, Tensor], batch: Batch, draw: int
    ) -> dict[Role, dict[str, Tensor]]:
        share = self.plan.share[: len(batch.y), batch.step]
        squares = torch.zeros_like(share)
        ways: list[_Chain | _Traced] = []
        for role, _, ranks, back in passes:
            kind = _Chain if isinstance(back, ByHand) else _Traced
            ways.append(kind(back, slope[role][ranks]))  # type: ignore[arg-type]
            squares.index_add_(0, ranks, ways[-1].squares)
        limit = share.new_tensor([op.mechanism.clip for op in self.ops[: len(share)] if op.mechanism]).unsqueeze(-1)
        # A sample whose gradient is not a number says nothing.
        factor = torch.where(squares.isfinite(), (limit / squares.sqrt()).clamp(max=1.0), 0.0) * share
        grads: dict[Role, dict[str, Tensor]] = {role: {} for role in slope}
        for (role, name, ranks, _), way in zip(passes, ways, strict=True):
            found = way.summed(factor[ranks])
            noise = [self._noise(rank, role, found, batch.step, draw) for rank in ranks.tolist()]
            grads[role] |= {f"{name}:{key}": g + torch.stack([each[key] for each in noise]) for key, g in found.items()}
        return grads

    def _noise(self, rank: int, role: Role, like: Params, step: int, draw: int) -> dict[str, Tensor]:
        """The noise on one client's mean gradient."""
        op = self.ops[rank]
        assert op.mechanism is not None
        whole = min(op.batch_schedule.batch, len(op.data))
        shapes = {name: g[0] for name, g in like.items()}
        return normal(op.key.at("noise", step, draw, role), shapes, deviation(op.mechanism) / whole)


class _Chain:
    """Of dense layers: norms first, gradients after."""

    def __init__(self, back: ByHand, slope: Tensor) -> None:
        self.back, self.slope = back, slope
        self.squares = slope.new_zeros(slope.shape[:2])

        def use(layer: Linear, slope: Tensor, x: Tensor) -> None:
            inputs = x.square().sum(-1)
            self.squares += slope.square().sum(-1) * (inputs + 1.0 if layer.bias else inputs)

        backward(back.network, back.weights, back.kept, slope, use)

    def summed(self, factor: Tensor) -> Mapping[str, Tensor]:
        """The sum over samples, each times its factor."""
        out = (factor == 0).unsqueeze(-1)
        back = self.back
        if not bool(self.squares.isfinite().all()):  # nothing times zero would still be nothing of the kind
            back = replace(back, kept=[k.masked_fill(out, 0.0) if k.numel() else k for k in back.kept])
        return back((self.slope * factor.unsqueeze(-1)).masked_fill(out, 0.0))


class _Traced:
    """Of any other network: the gradients of every sample, one after another for all clients."""

    def __init__(self, back: ByAutograd, slope: Tensor) -> None:
        self.each = [back.sample(slope, i) for i in range(slope.shape[1])]
        sizes = [torch.stack([g.square().flatten(1).sum(1) for g in found.values()]).sum(0) for found in self.each]
        self.squares = torch.stack(sizes, 1)

    def summed(self, factor: Tensor) -> Mapping[str, Tensor]:
        """The sum over samples, each times its factor."""
        total: dict[str, Tensor] = {}
        for found, shares in zip(self.each, factor.unbind(1), strict=True):
            for name, g in found.items():
                share = shares.view(-1, *[1] * (g.dim() - 1))
                part = torch.where(share > 0, g * share, 0.0)
                total[name] = total[name] + part if name in total else part
        return total
