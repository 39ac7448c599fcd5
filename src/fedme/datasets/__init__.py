"""Data sets in their publishers' own formats, and ways to divide them among clients."""

from fedme.datasets.allotment import Partition, Parts
from fedme.datasets.cifar import Cifar10, Cifar100
from fedme.datasets.dataset import Dataset
from fedme.datasets.digits import Digits
from fedme.datasets.download import root
from fedme.datasets.errors import DataError, PartitionError
from fedme.datasets.federation import DataOptions, Federation, federate
from fedme.datasets.femnist import Femnist
from fedme.datasets.images import Images
from fedme.datasets.mnist import Emnist, FashionMnist, Mnist
from fedme.datasets.own import Clients, Given
from fedme.datasets.partition import PARTITIONS, Partitioner
from fedme.datasets.shakespeare import Shakespeare
from fedme.datasets.sites import Sites
from fedme.datasets.synthetic import Synthetic

DATASETS: dict[str, type] = {
    "synthetic": Synthetic,
    "images": Images,
    "digits": Digits,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "emnist": Emnist,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "femnist": Femnist,
    "shakespeare": Shakespeare,
    "clients": Clients,
    "given": Given,
    "sites": Sites,
}

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataError",
    "DataOptions",
    "Dataset",
    "Federation",
    "Partition",
    "PartitionError",
    "Partitioner",
    "Parts",
    "federate",
    "root",
]
