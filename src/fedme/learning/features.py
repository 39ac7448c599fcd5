"""Features of a network, the inputs of its last linear layer, as further outputs: losses and predictions can use them.

The network with features has the weights of the network itself, under the same names. It exists while an operation runs, and is
in no state and no message.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedme.core.method import TaskError
from fedme.core.model import Arch, Model, output_of, template
from fedme.learning.partial_model import head_of


@dataclass(frozen=True)
class WithFeatures:
    """Builds a network whose outputs are its logits, followed by its features."""

    factory: Callable[..., nn.Module]
    head: str

    def __call__(self, **options: Any) -> nn.Module:
        network = self.factory(**options)
        head = network.get_submodule(self.head)
        forward, last, seen = network.forward, head.forward, list[Tensor]()

        def remember(features: Tensor) -> Tensor:
            seen[:] = [features]
            return last(features)  # type: ignore[no-any-return]

        def both(*inputs: Any, **named: Any) -> Tensor:
            outputs = [output_of(forward(*inputs, **named)), *seen]
            seen.clear()
            return torch.cat(outputs, -1)

        network.forward, head.forward = both, remember  # not by a hook: networks with hooks are not batched
        return network


@functools.lru_cache(maxsize=256)
def with_features(arch: Arch) -> Arch:
    """The architecture with features as further outputs."""
    factory = WithFeatures(arch.factory, head_of(arch).removesuffix("."))
    return Arch.named(f"{arch.name} with features", factory, **dict(arch.options))


def widened(model: Model) -> Model:
    """The same model with features as further outputs."""
    return Model(with_features(model.arch), model.params, model.buffers)


@functools.lru_cache(maxsize=256)
def feature_width(arch: Arch) -> int:
    """The number of features. A TaskError says why a network has none that a method could use."""
    head = head_of(arch)
    if not any(not name.startswith(head) for name, _ in template(arch, False).named_parameters()):
        raise TaskError(
            f"{arch.name} has no layer before its last one, so its features would be the samples; use another network"
        )
    layer = template(arch, False).get_submodule(head.removesuffix("."))
    assert isinstance(layer, nn.Linear)
    return layer.in_features


NEVER = -1e4  # the logit of a class without a prototype


def with_prototypes(model: Model, prototypes: Tensor, known: Tensor) -> Model:
    """The same model with a last layer that predicts the class of the nearest prototype.

    The squared distance of features f from a prototype c is |f|^2 - 2 c f + |c|^2. The first term is the same for all classes,
    so 2 c f - |c|^2 is a logit: the largest one is that of the nearest prototype, and their softmax is that of the negative
    squared distances. A class without a prototype is never predicted.
    """
    head, prototypes = head_of(model.arch), prototypes.to(model.device, model.dtype)
    weight = torch.where(known[:, None], 2 * prototypes, 0.0)
    bias = torch.where(known, -prototypes.square().sum(1), NEVER)
    return model.with_params({**model.params, f"{head}weight": weight, f"{head}bias": bias})


def require_head_bias(arch: Arch, client: str) -> None:
    """Raise a TaskError if the last layer has no bias, which `with_prototypes` needs."""
    layer = template(arch, False).get_submodule(head_of(arch).removesuffix("."))
    if layer.bias is None:
        raise TaskError(
            f"client {client}: the last layer of {arch.name} has no bias, which prediction by the nearest prototype needs: "
            'give it one, or use method.predict = "head"'
        )
