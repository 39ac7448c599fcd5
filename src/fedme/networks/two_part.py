"""Networks with two named parts, so that a method can share one of them by its prefix, such as "features."."""

from collections import OrderedDict

from torch import nn


def two_parts(features: nn.Module, classifier: nn.Module) -> nn.Sequential:
    """`features` maps inputs to features, `classifier` maps features to logits."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(features=features, classifier=classifier)
    return nn.Sequential(parts)
