"""Fill the gaps of a federation's tables, after the splits: every client with values of its own training part.

Rows of the server, and columns of which a client has no value at all, are filled with the mean over the training parts of all
clients, the number that scaling makes 0.
"""

import torch
from torch import Tensor

from fedme.core.data import ClientId
from fedme.datasets.partition_result import Partition
from fedme.datasets.preprocessing import Preparation, standard_scaling


def fill_gaps(
    x: Tensor, preparation: Preparation, partition: Partition
) -> tuple[Tensor, Preparation, dict[ClientId, Preparation]]:
    """The inputs without gaps, the preprocessing of the server, and that of every client."""
    training = torch.cat([parts.train for parts in partition.clients.values()])
    otherwise = preparation.scale.scaling().mean if preparation.scale is not None else standard_scaling(x, training).mean
    shared = preparation.with_values(x[:0], otherwise)
    filled, own = shared.fill(x), {}
    for client, parts in partition.clients.items():
        own[client] = preparation.with_values(x[parts.train], otherwise)
        filled[parts.all()] = own[client].fill(x[parts.all()])
    return filled, shared, own
