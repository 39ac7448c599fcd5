"""Dense networks: Flatten, Linear, ReLU and Dropout layers, for inputs of any shape.

Multinomial logistic regression and one hidden layer are the models of pFedMe (Dinh et al. 2020) and of PFML; two hidden
layers of 200 are the "2NN" of FedAvg (McMahan et al. 2017), which FML uses as its MLP.
"""

import math

from torch import nn

from fedme.networks.input_sizes import ArchError, positive


def mlr(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Multinomial logistic regression: one linear layer."""
    return dnn(shape, classes, hidden=())


def dnn(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...], dropout: float = 0.0) -> nn.Sequential:
    """Hidden layers of these sizes, each followed by ReLU and, if it is not 0, dropout."""
    if not 0.0 <= dropout < 1.0:
        raise ArchError(f"needs 0 <= dropout < 1, got {dropout}")
    layers: list[nn.Module] = [nn.Flatten()]
    units = math.prod(shape)
    for size in hidden:
        positive(hidden=size)
        layers += [nn.Linear(units, size), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        units = size
    return nn.Sequential(*layers, nn.Linear(units, classes))
