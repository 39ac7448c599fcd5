"""FedPer: the lower layers are those of FedAvg, the last layers are every client's own.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2: a client
trains base layers W_B and its personalization layers W_P together; the server averages the base layers by sample counts.

Deviations: none. The personal layers are the last linear layer unless `personal` names others; the paper tries 1 to 4 layers or
blocks. Buffers such as running statistics of batch normalisation belong to their layer: those of base layers are averaged. A
network that has no other layer than its personal ones shares nothing, and its clients train alone.
"""

from dataclasses import dataclass, field
from typing import Literal

from fedme.core.method import Task
from fedme.core.model import Arch
from fedme.core.settings import setting
from fedme.learning.partial_model import Choice, all_but, head_of, named, require_some
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.methods.shared_part import SharedPartMethod


@dataclass(frozen=True)
class FedPer(SharedPartMethod):
    """Clients share the lower layers of one network and keep the last ones to themselves."""

    train: Training = field(default_factory=Training)
    personal: tuple[str, ...] | None = setting(
        None, "patterns of the names of personal weights, for example ['fc2.', '*.bias']; the last linear layer by default"
    )
    weighting: Literal["samples", "uniform"] = setting("samples", "weights of the mean: numbers of training samples, or equal")
    defence: Defence = OPEN

    paper = (
        "M. G. Arivazhagan, V. Aggarwal, A. K. Singh and S. Choudhary, "
        '"Federated Learning with Personalization Layers", 2019, arXiv:1912.00818'
    )
    travels = "all layers but the last, or but those that are named"
    nothing_to_audit = "its clients share some of their layers, not models that could be evaluated"

    def check(self, task: Task) -> None:
        super().check(task)
        require_some(task.shared, self.personal or (), "method.personal")
        self.shared_choice(task.shared)

    def shared_choice(self, arch: Arch) -> Choice:
        return all_but(named(*((head_of(arch),) if self.personal is None else self.personal)))
