"""Every method by its name in an experiment. To add one, write its file and list it here."""

from typing import Any

from fedme.methods.centralized import Centralized
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme import FedMe
from fedme.methods.fedprox import FedProx
from fedme.methods.fml import FML
from fedme.methods.hypcluster import HypCluster
from fedme.methods.local import Local
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML

BUILT_IN = (Local, Centralized, FedAvg, FedProx, HypCluster, Mapper, FedMD, FML, PFedMe, PFML, FedMe)
METHODS: dict[str, type[Any]] = {method.name(): method for method in BUILT_IN}
