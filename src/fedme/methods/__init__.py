"""Every method by its name in an experiment. To add one, write its file and list it here."""

from typing import Any

from fedme.methods.centralized import Centralized
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fedprox import FedProx
from fedme.methods.fml import FML
from fedme.methods.hypcluster import HypCluster
from fedme.methods.local import Local
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML

METHODS: dict[str, type[Any]] = {
    "local": Local,
    "centralized": Centralized,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "hypcluster": HypCluster,
    "mapper": Mapper,
    "fedmd": FedMD,
    "fml": FML,
    "pfedme": PFedMe,
    "pfml": PFML,
    "fedme": FedMe,
}
