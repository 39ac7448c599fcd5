"""Private gradients of many clients at once: every sample's gradient is clipped, and the sum gets noise."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedme.core.operations import Batch, Role
from fedme.core.tree import Params
from fedme.execution.stacked_training import ForwardPass, StackedGradient
from fedme.learning.differential_privacy import deviation, normal


class PrivateGradient(StackedGradient):
    """The gradients of the active clients: clipped per sample over all roles together, with noise."""

    def gradients(
        self, passes: Sequence[ForwardPass], logit_gradients: Mapping[Role, Tensor], batch: Batch, draw: int
    ) -> dict[Role, dict[str, Tensor]]:
        weights = self.batches.weights[: len(batch.y), batch.step]
        squares = torch.zeros_like(weights)
        for forward in passes:
            squares.index_add_(0, forward.ranks, forward.run.squared_norms(logit_gradients[forward.role][forward.ranks]))
        limits = weights.new_tensor([op.mechanism.clip for op in self.ops[: len(weights)] if op.mechanism]).unsqueeze(-1)
        # A sample whose gradient is NaN or infinite adds nothing.
        factors = torch.where(squares.isfinite(), (limits / squares.sqrt()).clamp(max=1.0), 0.0) * weights
        finite = bool(squares.isfinite().all())
        grads: dict[Role, dict[str, Tensor]] = {role: {} for role in logit_gradients}
        for forward in passes:
            role, ranks = forward.role, forward.ranks
            clipped = forward.run.weighted_sum(logit_gradients[role][ranks], factors[ranks], finite)
            noise = [self._noise(rank, role, clipped, batch.step, draw) for rank in ranks.tolist()]
            for key, g in clipped.items():
                grads[role][f"{forward.name}:{key}"] = g + torch.stack([client[key] for client in noise])
        return grads

    def _noise(self, rank: int, role: Role, like: Params, step: int, draw: int) -> dict[str, Tensor]:
        """The noise on one client's mean gradient."""
        op = self.ops[rank]
        assert op.mechanism is not None
        batch_size = min(op.batch_schedule.batch, len(op.data))
        shapes = {name: g[0] for name, g in like.items()}
        return normal(op.key.at("noise", step, draw, role), shapes, deviation(op.mechanism) / batch_size)
