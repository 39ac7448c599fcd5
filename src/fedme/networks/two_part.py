"""Networks in two parts that have the same names everywhere: to share one ("features.") is to name it."""

from collections import OrderedDict

from torch import nn


def two_parts(features: nn.Module, classifier: nn.Module) -> nn.Sequential:
    """`features` turn an input into numbers, `classifier` turns the numbers into logits."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(features=features, classifier=classifier)
    return nn.Sequential(parts)
