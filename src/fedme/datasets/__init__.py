"""Data set readers, user data, and partitioners that divide samples among clients."""

from fedme.datasets.cifar import Cifar10, Cifar100
from fedme.datasets.data_errors import DataError, PartitionError
from fedme.datasets.dataset import Dataset
from fedme.datasets.digits import Digits
from fedme.datasets.download import root
from fedme.datasets.federated_dataset import DataOptions, Federation, federate
from fedme.datasets.femnist import Femnist
from fedme.datasets.mnist import Emnist, FashionMnist, Mnist
from fedme.datasets.partition_result import Partition, Parts
from fedme.datasets.partitioners import PARTITIONS, Partitioner
from fedme.datasets.several import Several
from fedme.datasets.shakespeare import Shakespeare
from fedme.datasets.site_files import Sites
from fedme.datasets.synthetic import Synthetic
from fedme.datasets.synthetic_images import Images
from fedme.datasets.user_data import FileDataset, ObjectDataset

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
    "several": Several,
    "clients": FileDataset,
    "given": ObjectDataset,
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
