"""FedBN: FedAvg for everything but the layers with batch normalisation, which are every client's own.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1: a layer that is not batch normalisation becomes the mean of the clients' layers; weights and running statistics of
batch normalisation never leave a client.

Deviations: none. A layer is recognised by its type: `nn.BatchNorm1d` and its relatives, also instance normalisation. Without
such layers this is FedAvg with equal weights. `models.update_bn` may still replace running statistics at evaluation by those of
the client's training samples.
"""

from dataclasses import dataclass, field
from typing import Literal

from fedme.core.model import Arch
from fedme.core.settings import setting
from fedme.learning.partial_model import Choice, all_but, named, normalisation_of
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.methods.shared_part import SharedPartMethod


@dataclass(frozen=True)
class FedBN(SharedPartMethod):
    """Clients share everything but their layers with batch normalisation."""

    train: Training = field(default_factory=Training)
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    defence: Defence = OPEN

    paper = (
        "X. Li, M. Jiang, X. Zhang, M. Kamp and Q. Dou, "
        '"FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, arXiv:2102.07623'
    )
    travels = "all layers but batch normalisation"

    def shared_choice(self, arch: Arch) -> Choice:
        return all_but(named(*normalisation_of(arch)))
