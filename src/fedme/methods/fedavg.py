"""FedAvg: clients train copies of one model, the server averages them.

McMahan et al. 2017, Algorithm 1; in the FedMe papers section 5.1.3, in FML Eq. 2.

Deviations: none. `weighting = "uniform"` is Eq. 4 of the first version of FedMe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Report, Round
from fedme.core.operations import Computation, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.methods.shared_model import SharedModel, SharedModelMethod, TrainedCopy, averaged, sample_counts, told_samples


@dataclass(frozen=True)
class FedAvg(SharedModelMethod[Empty, SharedModel, TrainedCopy]):
    """Clients train copies of one model, the server averages them."""

    train: Training = field(default_factory=Training)
    weighting: Literal["samples", "uniform"] = setting("samples", "weights of the mean: numbers of training samples, or equal")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        "H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "
        '"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv:1602.05629'
    )
    proximal = 0.0  # weight of the pull towards the received model (FedProx)

    hides_samples = True
    not_by_name = ""

    def client_round(
        self, state: Empty, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, TrainedCopy, Report]]:
        optimizer = self.train.local_optimizer(CrossEntropy(), when, prox=self.proximal)
        schedule = self.train.batch_schedule(when)
        received = {"global": down.model}
        trained = yield from train(received, optimizer, data.train, schedule, key.at("train"), frozen=received)
        up = TrainedCopy(trained.models["global"], told_samples(self.weighting, data))
        return state, up, Report(trained.losses)

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, sample_counts(replies) if self.weighting == "samples" else None, self.defence)
