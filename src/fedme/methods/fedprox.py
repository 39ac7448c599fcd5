"""FedProx: FedAvg whose clients are pulled back to the model they received.

Li et al. 2020, Algorithm 2: the local loss is f(w) + mu/2 |w - w_t|^2; everything else is FedAvg.

Deviations: no simulated stragglers; the pull enters the gradient before clipping and momentum. FML does not give its mu:
0.01 is the middle of the grid that the FedProx authors recommend.
"""

from dataclasses import dataclass

from fedme.core.settings import setting
from fedme.learning.training_settings import require
from fedme.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are pulled back to the model they received."""

    mu: float = setting(0.01, "weight of the pull")

    paper = (
        "T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar and V. Smith, "
        '"Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv:1812.06127'
    )

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", f"must be >= 0, got {self.mu}")

    @property
    def proximal(self) -> float:  # type: ignore[override]
        return self.mu
