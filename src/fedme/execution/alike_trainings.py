"""The most common trainings: by SGD or Adam, from weights in one tensor, without a state, an anchor or dropout.

Many clients have such trainings with the same architectures and one optimizer. What these have in common is found out once.
"""

from collections.abc import Callable
from typing import Any

import torch

from fedme.core.flat_params import FlatParams, flat_params
from fedme.core.model import Model
from fedme.core.operations import Train, Trained
from fedme.execution.compiled_calls import NOT_GIVEN, Call
from fedme.execution.compiled_losses import loss_weights
from fedme.execution.compiled_networks import Head, head_of
from fedme.execution.input_tables import InputTable
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam


class AlikeTrainings:
    """Trainings that share a route: their models have the same roles, architectures and layouts, and one optimizer."""

    def __init__(self, op: Train, heads: list[Head], spec: Any) -> None:
        self.spec = spec
        self.networks = [
            (role, (*head.fields,), loss_weights(op.optimizer.objective, role))
            for role, head in zip(op.models, heads, strict=True)
        ]

    @classmethod
    def of(cls, op: Train, table: InputTable, spec: Callable[[SGD | Adam], Any]) -> "AlikeTrainings | None":
        """Those that are alike to an operation; None if they are not of this kind."""
        rule = op.optimizer
        if not isinstance(rule, SGD | Adam) or rule.prox or rule.shift or op.collect is not None:
            return None
        flats = [flat_params(model.params) for model in op.models.values()]
        if type(rule.objective) not in (CrossEntropy, Mutual) or None in flats:
            return None
        heads = [head_of(model, table, [flat, None, None]) for model, flat in zip(op.models.values(), flats, strict=True)]
        programs = [head.program.program for head in heads]
        if any(program.layers for program in programs) or not all(head.fields for head in heads):
            return None
        return cls(op, heads, spec(rule)) if len({program.classes for program in programs}) == 1 else None

    def add(self, op: Train, call: Call, drawn: Any) -> Callable[[], Trained]:
        """Add a training to a call; its result, after the call."""
        models, first = {}, call.network_count
        for (role, head, weights), model in zip(self.networks, op.models.values(), strict=True):
            source = flat_params(model.params)
            assert source is not None
            layout, weights_before = source.layout, source.flat
            copy = torch.empty(layout.size, dtype=layout.dtype)
            models[role], place = Model(model.arch, FlatParams(layout, copy), {}), copy.data_ptr()
            call.add_network((*head, place, 0, 0, 0, 0, 0, weights_before.data_ptr(), place, copy.nbytes), weights)
            call.keep(weights_before)
        call.keep(models, drawn)
        seeds = call.add_numbers(op.key.at("batches", "epoch").integers(drawn.epochs))
        job = *NOT_GIVEN, seeds, *drawn.fields, first, len(models), call.add_optimizer(self.spec), 0, 0, 0
        number = call.add_job(job)

        def finish() -> Trained:
            samples, _ = call.seen[number]
            losses = {}
            for place, (role, model) in enumerate(models.items(), first):
                losses[role] = call.losses[place] / samples
                if call.finite[place]:
                    model.set_finite()
            return Trained(models, {}, losses)

        return finish
