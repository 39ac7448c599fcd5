"""Every method by its name in an experiment. To add one, write its file and list it here."""

from typing import Any

from fedme.methods.apfl import APFL
from fedme.methods.centralized import Centralized
from fedme.methods.ditto import Ditto
from fedme.methods.fd import FD
from fedme.methods.fedamp import FedAMP
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedbn import FedBN
from fedme.methods.feddf import FedDF
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme import FedMe
from fedme.methods.fedper import FedPer
from fedme.methods.fedproto import FedProto
from fedme.methods.fedprox import FedProx
from fedme.methods.fedrep import FedRep
from fedme.methods.fml import FML
from fedme.methods.heterofl import HeteroFL
from fedme.methods.hypcluster import HypCluster
from fedme.methods.lgfedavg import LGFedAvg
from fedme.methods.local import Local
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML
from fedme.methods.scaffold import SCAFFOLD

BUILT_IN = (
    *(FedMe, FML, PFML),  # mutual learning
    *(Local, Centralized, FedAvg, FedProx, SCAFFOLD),  # one model for all
    *(HypCluster, Mapper, APFL, PFedMe, Ditto, FedPer, FedRep, LGFedAvg, FedBN, FedAMP),  # personal models
    *(FD, FedProto, FedDF, HeteroFL, FedMD),  # personal models of different architectures
)
METHODS: dict[str, type[Any]] = {method.name(): method for method in BUILT_IN}
