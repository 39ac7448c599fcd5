"""Private training of any network that `torch.vmap` can run: the gradients of all samples of a batch at once.

Clipping, noise and steps are those of the reference backend, which computes one sample after another.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import Arrays, Split
from fedme.core.dropout import at_draw
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import Batch, BatchSchedule, GaussianMechanism, Models, Op, Role, Train
from fedme.core.tree import Params
from fedme.execution import reference
from fedme.execution.memory_format import sample_shape
from fedme.execution.reference import DRAWS_PER_STEP, PerExample, cast
from fedme.execution.routing import Tick, models_of
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD

LARGEST = 1 << 25  # numbers of gradients that are kept at once


class PrivateBatches:
    """Trains privately, a batch at a time."""

    name = "private by vmap"

    def supports(self, op: Op) -> str:
        """Why the operation is left to the reference; empty if it is not."""
        if not isinstance(op, Train) or op.mechanism is None:
            return "only for private training"
        shape = sample_shape(op.data)
        if shape is None:
            return "the inputs are not one tensor"
        floating = op.data.inputs(torch.arange(min(1, len(op.data)))).is_floating_point() if len(op.data) else True
        return next((reason for model in models_of(op) if (reason := obstacle(model.arch, shape, floating))), "")

    def group(self, op: Op) -> Hashable:
        return None

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        results: list[Any] = []
        for op in ops:
            assert isinstance(op, Train)
            results.append(reference.train(op, PerSample))
            tick()
        return results


class PerSample(PerExample):
    """The private gradient, with the gradients of many samples computed at once."""

    def add_clipped(self, total: Mapping[Role, Params], models: Models, batch: Batch, draw: int) -> Mapping[Role, Params]:
        """Add the clipped gradients of all samples."""
        count = max(1, LARGEST // sum(model.parameters for model in models.values()))
        for chosen in torch.arange(len(batch.y), device=batch.y.device).split(count):
            grads = self._gradients(models, batch, chosen, draw)
            flat = [g.flatten(1) for params in grads.values() for g in params.values()]
            sizes = torch.stack([g.square().sum(1) for g in flat]).sum(0).sqrt()
            # A sample whose gradient is NaN or infinite adds nothing.
            factors = torch.where(sizes.isfinite(), (self.mechanism.clip / sizes).clamp(max=1.0), 0.0)
            keep = sizes.isfinite()
            total = {
                role: {name: value + _weighted(grads[role][name], factors, keep) for name, value in params.items()}
                for role, params in total.items()
            }
        return total

    def _gradients(self, models: Models, batch: Batch, chosen: Tensor, draw: int) -> dict[Role, dict[str, Tensor]]:
        """The gradients of the chosen samples, by role and weight."""
        number = batch.step * DRAWS_PER_STEP + draw
        masks = {role: {layer: at_draw(seed, number) for layer, seed in self.seeds.get(role, {}).items()} for role in models}

        def loss(
            weights: Mapping[Role, Mapping[str, Tensor]], x: Mapping[Role, Tensor], y: Tensor, place: Tensor
        ) -> tuple[Tensor, Mapping[Role, Tensor]]:
            # Buffers that the forward pass changes are thrown away, as by the reference; tensors of a transform must not stay.
            buffers = {role: {name: b.clone() for name, b in model.buffers.items()} for role, model in models.items()}
            logits = {
                role: Model(model.arch, weights[role], buffers[role])(
                    x[role].unsqueeze(0), training=True, masks=masks[role], first=place
                )
                for role, model in models.items()
            }
            losses = self.objective(logits, y.unsqueeze(0))
            return torch.stack([own.mean() for own in losses.values()]).sum(), {r: own.detach() for r, own in losses.items()}

        x = {role: cast(batch.x, model)[chosen] for role, model in models.items()}
        weights = {role: dict(model.params) for role, model in models.items()}
        places = chosen.to(torch.int32)
        gradients, losses = torch.vmap(torch.func.grad(loss, has_aux=True), (None, 0, 0, 0), randomness="error")(
            weights, x, batch.y[chosen], places
        )
        self.record({role: own.flatten() for role, own in losses.items()}, batch.step, draw)
        return gradients  # type: ignore[no-any-return]


def _weighted(gradients: Tensor, factors: Tensor, keep: Tensor) -> Tensor:
    if not bool(keep.all()):  # zero times NaN is NaN
        gradients, factors = gradients[keep], factors[keep]
    summed: Tensor = torch.tensordot(factors, gradients, 1)
    return summed


@functools.lru_cache(maxsize=256)
def obstacle(arch: Arch, shape: tuple[int, ...], floating: bool) -> str:
    """Why a network cannot run in a vmap over samples; empty if it can, with the results of the reference."""
    key, samples = Key(0).at("check"), torch.arange(4)
    model = Model.init(arch, key, torch.float64)
    x = torch.randn((4, *shape), generator=key.torch(), dtype=torch.float64)
    try:
        x = x if floating else torch.zeros((4, *shape), dtype=torch.int64)
        outputs = model(x).shape[-1]
        data = Split(Arrays(x, torch.rand((4, outputs), generator=key.torch()) > 0.5), samples)
        schedule, mechanism = BatchSchedule(1, 4, poisson=False), GaussianMechanism(0.5, 0.0)
        op = Train({"net": model}, SGD(CrossEntropy(), 0.1), data, schedule, key, mechanism=mechanism)
        wanted = reference.train(op).models["net"].params
        batched_result = reference.train(op, PerSample).models["net"].params
    except Exception as error:  # vmap or a user's network may raise anything; the network then runs sample by sample
        return f"{arch.name} does not run in a vmap over samples ({type(error).__name__})"
    agree = all(torch.allclose(batched_result[name], value, rtol=1e-9, atol=1e-9) for name, value in wanted.items())
    return "" if agree else f"{arch.name} gives other results in a vmap over samples"
