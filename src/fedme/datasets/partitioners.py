"""Ways to divide samples among clients; each is a frozen record of options that is called with the samples and a key.

The test rows, if the publisher set some aside, are divided alongside: a client is tested on the classes it learns, in the
proportions it learns them. All randomness comes from the key, and nothing loops without a bound: what cannot be done is
said in a `PartitionError`, with what to change.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.datasets.data_errors import PartitionError
from fedme.datasets.dataset import Owners
from fedme.datasets.partition_result import Partition, Parts

__all__ = [
    "PARTITIONS",
    "Dirichlet",
    "Iid",
    "Natural",
    "Partition",
    "Partitioner",
    "Parts",
    "Pathological",
    "Pool",
    "Shards",
    "Shares",
]

Shares = dict[ClientId, tuple[Tensor, Tensor]]  # rows for training, rows for testing
Layout = Literal["disjoint", "ring"]


@dataclass(frozen=True, eq=False)
class Pool:
    """What is to be divided: rows of a source with these labels."""

    labels: Tensor  # of all rows of the source
    train: Tensor
    test: Tensor
    owners: Owners | None = None

    def classes(self) -> list[int]:
        """The classes that occur, in order."""
        return [int(c) for c in torch.unique(self.labels[torch.cat((self.train, self.test))])]

    def by_class(self, key: Key) -> list[tuple[Tensor, Tensor]]:
        """For every class that occurs, its training rows and its test rows, shuffled."""
        shuffled = []
        for rows, name in ((self.train, "train"), (self.test, "test")):
            rows = rows[torch.randperm(len(rows), generator=key.at(name).torch())]
            shuffled.append((rows, self.labels[rows]))
        (train, train_labels), (test, test_labels) = shuffled
        return [(train[train_labels == c], test[test_labels == c]) for c in self.classes()]


class Partitioner(Protocol):
    """A way to divide a pool; `min_samples` is the least number of training rows that a client may get."""

    @property
    def min_samples(self) -> int: ...

    def __call__(self, pool: Pool, key: Key) -> Shares: ...


@dataclass(frozen=True)
class Iid:
    """Equal random parts: every client has the same amount of data with the same distribution."""

    clients: int = 10  # how many
    min_samples: int = 2  # training samples that every client has at least

    def __post_init__(self) -> None:
        _check_clients("iid", self.clients, self.min_samples)

    def __call__(self, pool: Pool, key: Key) -> Shares:
        even = np.ones(self.clients)
        parts = []
        for rows, name in ((pool.train, "train"), (pool.test, "test")):
            rows = rows[torch.randperm(len(rows), generator=key.at(name).torch())]
            parts.append(_cut(rows, _sizes(even, len(rows))))
        return _checked("iid", _named(*parts), pool, self.min_samples)


@dataclass(frozen=True)
class Dirichlet:
    """Label proportions and sizes drawn from Dirichlet distributions (FedMe section 5.1, after FedMA).

    Every class is divided in proportions drawn from Dir(alpha_label); a client that has reached its share of the samples,
    drawn from Dir(alpha_size), gets nothing of the classes that follow. Test rows use the same proportions and shares. The
    draw is repeated until every client has `min_samples` training rows and a test row. alpha_size = None: no such shares.

    Deviations: FedMe's notebooks ask for training rows only; a client without a test row could not be scored.
    """

    clients: int = 10  # how many
    alpha_label: float = 0.5  # small: few classes a client
    alpha_size: float | None = 10.0  # small: very unequal sizes; none: sizes follow from the labels
    min_samples: int = 10  # training samples that every client has at least
    tries: int = 100  # draws before it gives up

    def __post_init__(self) -> None:
        _check_clients("dirichlet", self.clients, self.min_samples)
        for name, value in (("alpha_label", self.alpha_label), ("alpha_size", self.alpha_size)):
            if value is not None and not 0 < value < float("inf"):
                raise PartitionError(f"dirichlet: {name} = {value}; it must be finite and larger than 0")
        if self.tries < 1:
            raise PartitionError(f"dirichlet: tries = {self.tries}; at least one is needed")

    def __call__(self, pool: Pool, key: Key) -> Shares:
        _check_amount("dirichlet", pool, self.clients, self.min_samples)
        classes = pool.by_class(key)
        available = np.array([[len(train), len(test)] for train, test in classes])
        least = np.array([self.min_samples, 1 if len(pool.test) else 0])
        draw = key.at("proportions").numpy()
        for _ in range(self.tries):
            sizes = self._draw(available, draw)
            if (sizes.sum(axis=0) >= least).all():
                pieces = [
                    [_cut(rows, sizes[c, :, part]) for c, rows in enumerate(column)]
                    for part, column in enumerate(zip(*classes, strict=True))
                ]
                return _named(*(_joined(part) for part in pieces))
        raise PartitionError(
            f"dirichlet: in {self.tries} draws there was always a client with fewer than {self.min_samples} training samples"
            f"{' or without a test sample' if len(pool.test) else ''}; lower clients or min_samples, raise alpha_label "
            f"(now {self.alpha_label}) or alpha_size (now {self.alpha_size}), or use more samples"
        )

    def _draw(self, available: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """How many rows of every class each client gets, for training and for testing: classes x clients x 2."""
        caps = np.full((self.clients, 2), np.inf)
        if self.alpha_size is not None:
            share = _dirichlet(draw, self.alpha_size, self.clients)
            caps = np.floor(share[:, None] * available.sum(axis=0))
            caps[-1] = available.sum(axis=0) - caps[:-1].sum(axis=0)
        sizes = np.zeros((len(available), self.clients, 2), dtype=np.int64)
        for c, counts in enumerate(available):
            proportions = _dirichlet(draw, self.alpha_label, self.clients)
            for part, count in enumerate(counts):
                room = sizes[:, :, part].sum(axis=0) < caps[:, part]
                masked = np.where(room, proportions, 0)
                # All weight may lie on clients that are full; the others then share the class equally.
                sizes[c, :, part] = _sizes(masked if masked.sum() > 0 else room.astype(float), int(count), np.floor)
        return sizes


@dataclass(frozen=True)
class Shards:
    """Pieces of single classes, so that a client has at most `shards_per_client` classes (FML section 5.1).

    Deviations: FML sorts by label and cuts into equal pieces, which straddle classes of unequal size; here each class is cut
    into an equal number of pieces (classes with more samples into one more, if the number of pieces asks for it).
    """

    clients: int = 10  # how many
    shards_per_client: int = 2  # pieces of one class each
    min_samples: int = 2  # training samples that every client has at least

    def __post_init__(self) -> None:
        _check_clients("shards", self.clients, self.min_samples)
        if self.shards_per_client < 1:
            raise PartitionError(f"shards: shards_per_client = {self.shards_per_client}; at least one is needed")

    def __call__(self, pool: Pool, key: Key) -> Shares:
        _check_amount("shards", pool, self.clients, self.min_samples)
        classes = pool.by_class(key)
        count = self.clients * self.shards_per_client
        if count < len(classes):
            raise PartitionError(
                f"shards: {self.clients} clients with {self.shards_per_client} shards make {count} pieces, fewer than the "
                f"{len(classes)} classes; raise clients or shards_per_client"
            )
        fewest, more = divmod(count, len(classes))
        largest = sorted(range(len(classes)), key=lambda c: -len(classes[c][0]))[:more]
        shards: list[tuple[Tensor, Tensor]] = []
        for c, (train, test) in enumerate(classes):
            even = np.ones(fewest + (c in largest))
            shards += zip(_cut(train, _sizes(even, len(train))), _cut(test, _sizes(even, len(test))), strict=True)
        order = torch.randperm(count, generator=key.at("assignment").torch()).reshape(self.clients, -1).tolist()
        parts = [[torch.cat([shards[s][part] for s in mine]) for mine in order] for part in (0, 1)]
        return _checked("shards", _named(*parts), pool, self.min_samples)


@dataclass(frozen=True)
class Pathological:
    """A fixed number of classes for every client (PFML, after pFedMe).

    layout = "disjoint": the classes form groups of `classes_per_client`, client u has group u modulo their number, and the
    clients of a group divide its classes completely, in shares proportional to U(0.1, 0.5).
    layout = "ring": client u has the classes u, u + 1, ... (around the ring): 10 samples of each, then twice a log-normal
    share plus 5 to 10 % of the class; a share that would exhaust the class is skipped. Some samples stay unused.

    Deviations: pFedMe adds 300 to 600 samples, which is 5 to 10 % of a class of CIFAR-10; as fractions they suit any amount.
    """

    clients: int = 10  # how many
    classes_per_client: int = 2  # exactly so many
    layout: Layout = "disjoint"  # or ring: neighbours share classes
    min_samples: int = 2  # training samples that every client has at least

    def __post_init__(self) -> None:
        _check_clients("pathological", self.clients, self.min_samples)
        if self.classes_per_client < 1:
            raise PartitionError(f"pathological: classes_per_client = {self.classes_per_client}; at least one is needed")
        if self.layout not in get_args(Layout):
            raise PartitionError(f"pathological: layout = {self.layout!r}; choose one of {', '.join(get_args(Layout))}")

    def __call__(self, pool: Pool, key: Key) -> Shares:
        _check_amount("pathological", pool, self.clients, self.min_samples)
        classes = pool.by_class(key)
        if self.classes_per_client > len(classes):
            raise PartitionError(
                f"pathological: classes_per_client = {self.classes_per_client}, but there are {len(classes)} classes"
            )
        counts = np.array([len(train) for train, _ in classes])
        draw = key.at("sizes").numpy()
        sizes = self._disjoint(counts, draw) if self.layout == "disjoint" else self._ring(counts, draw)
        if (np.count_nonzero(sizes, axis=0) != self.classes_per_client).any():
            raise PartitionError(
                f"pathological: some client would get no sample of one of its {self.classes_per_client} classes; "
                "use more samples or fewer clients"
            )
        train = [_cut(rows, sizes[c]) for c, (rows, _) in enumerate(classes)]
        test = [_cut(rows, _sizes(sizes[c], len(rows), total=counts[c])) for c, (_, rows) in enumerate(classes)]
        return _checked("pathological", _named(_joined(train), _joined(test)), pool, self.min_samples)

    def _disjoint(self, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        groups, rest = divmod(len(counts), self.classes_per_client)
        if rest:
            raise PartitionError(
                f"pathological: {len(counts)} classes cannot be grouped by {self.classes_per_client}; choose a divisor, "
                'or layout = "ring"'
            )
        shares = np.zeros((len(counts), self.clients))
        for client in range(self.clients):
            first = client % groups * self.classes_per_client
            shares[first : first + self.classes_per_client, client] = draw.uniform(0.1, 0.5, self.classes_per_client)
        return np.stack([_sizes(share, int(n)) for share, n in zip(shares, counts, strict=True)])

    def _ring(self, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        sizes = np.zeros((len(counts), self.clients), dtype=np.int64)
        places = [(u, j, (u + j) % len(counts)) for u in range(self.clients) for j in range(self.classes_per_client)]
        for u, _, c in places:
            sizes[c, u] = 10
        if (short := np.flatnonzero(sizes.sum(axis=1) > counts)).size:
            c = int(short[0])
            raise PartitionError(
                f"pathological: {sizes[c].sum()} samples of the class numbered {c} are needed to give its clients 10 each, "
                f"but there are {counts[c]}; use more samples or fewer clients"
            )
        shares = draw.lognormal(0, 2, (len(counts), self.clients, self.classes_per_client))
        shares *= (np.maximum(counts - self.clients, 0) / shares.sum(axis=(1, 2)))[:, None, None]
        column = max(1, self.clients // len(counts))
        for u, j, c in places:
            least, most = round(counts[c] * 0.05), round(counts[c] * 0.1)
            size = 2 * (int(shares[c, u // column, j]) + int(draw.integers(least, most, endpoint=True)))
            if sizes[c].sum() + size < counts[c]:
                sizes[c, u] += size
        return sizes


@dataclass(frozen=True)
class Natural:
    """The owners that the data set comes with: writers, roles, users.

    `clients` owners are drawn at random, or as many as hold `fraction` of all samples, or all of them. Owners with fewer
    than `min_samples` training samples are left out, and so are those without test samples where others have some.
    """

    clients: int | None = None  # so many owners, drawn at random; all by default
    fraction: float | None = None  # or as many as hold this share of the samples
    min_samples: int = 2  # training samples that every client has at least

    def __post_init__(self) -> None:
        _check_clients("natural", 1 if self.clients is None else self.clients, self.min_samples)
        if self.clients is not None and self.fraction is not None:
            raise PartitionError("natural: give clients or fraction, not both")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise PartitionError(f"natural: fraction = {self.fraction}; it must be larger than 0 and at most 1")

    def __call__(self, pool: Pool, key: Key) -> Shares:
        if pool.owners is None:
            known = ", ".join(name for name in PARTITIONS if name != "natural")
            raise PartitionError(f"natural: this data set does not say whose its samples are; use one of {known}")
        tested = any(len(test) for _, test in pool.owners.values())
        fit = {
            owner: rows
            for owner, rows in pool.owners.items()
            if len(rows[0]) >= self.min_samples and (len(rows[1]) or not tested)
        }
        wanted = len(fit) if self.clients is None else self.clients
        if not fit or wanted > len(fit):
            raise PartitionError(
                f"natural: {max(wanted, 1)} clients are wanted, but of {len(pool.owners)} owners only {len(fit)} have "
                f"{self.min_samples} or more training samples{' and a test sample' if tested else ''}; "
                "lower clients or min_samples"
            )
        owners = list(fit)
        order = torch.randperm(len(owners), generator=key.at("owners").torch()).tolist()
        if self.fraction is not None:
            held = np.cumsum([sum(map(len, fit[owners[o]])) for o in order])
            wanted = 1 + int(np.searchsorted(held, self.fraction * held[-1] * (1 - 1e-9)))
        return {owners[o]: fit[owners[o]] for o in sorted(order[:wanted])}


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "pathological": Pathological,
    "natural": Natural,
}


def _check_clients(name: str, clients: int, min_samples: int) -> None:
    if clients < 1:
        raise PartitionError(f"{name}: clients = {clients}; at least one is needed")
    if min_samples < 1:
        raise PartitionError(f"{name}: min_samples = {min_samples}; a client needs at least one sample")


def _check_amount(name: str, pool: Pool, clients: int, min_samples: int) -> None:
    if len(pool.train) < clients * min_samples:
        raise PartitionError(
            f"{name}: {clients} clients with at least {min_samples} samples need {clients * min_samples} training samples, "
            f"but there are {len(pool.train)}; lower clients or min_samples, or use more samples"
        )
    if 0 < len(pool.test) < clients:
        raise PartitionError(
            f"{name}: {clients} clients share {len(pool.test)} test samples; lower clients, or set test to a fraction, "
            "which cuts each client's test part from its own samples"
        )


def _checked(name: str, shares: Shares, pool: Pool, min_samples: int) -> Shares:
    _check_amount(name, pool, len(shares), min_samples)
    client, smallest = min(((client, len(train)) for client, (train, _) in shares.items()), key=lambda pair: pair[1])
    if smallest < min_samples:
        raise PartitionError(
            f"{name}: client {client} would get {smallest} training samples, fewer than min_samples = {min_samples}; "
            "lower clients or min_samples, or use more samples"
        )
    if len(pool.test) and (bare := [client for client, (_, test) in shares.items() if not len(test)]):
        raise PartitionError(
            f"{name}: client {bare[0]} would get no test sample; lower clients, or set test to a fraction, which cuts each "
            "client's test part from its own samples"
        )
    return shares


def _named(train: list[Tensor], test: list[Tensor]) -> Shares:
    return {str(u): pair for u, pair in enumerate(zip(train, test, strict=True))}


def _dirichlet(draw: np.random.Generator, alpha: float, count: int) -> np.ndarray:
    """Proportions from Dir(alpha), or from its limits where numbers end: all for one, or the same for all."""
    if not 1e-6 < alpha < 1e12:
        return np.eye(count)[draw.integers(count)] if alpha < 1 else np.full(count, 1 / count)
    return draw.dirichlet(np.full(count, alpha))


def _sizes(shares: np.ndarray, rows: int, to_integer: np.ufunc = np.rint, total: float | None = None) -> np.ndarray:
    """Sizes in these proportions, from rounded cumulative boundaries; they use all rows unless `total` exceeds the shares."""
    whole = shares.sum() if total is None else total
    bounds = to_integer(np.cumsum(shares) / max(whole, 1e-300) * rows).astype(np.int64).clip(0, rows)
    if total is None:
        bounds[-1] = rows
    return np.diff(bounds, prepend=0)


def _cut(rows: Tensor, sizes: np.ndarray) -> list[Tensor]:
    """Consecutive pieces of these sizes; rows that are left over belong to nobody."""
    sizes = np.asarray(sizes)
    return list(torch.split(rows[: sizes.sum()], sizes.tolist()))


def _joined(by_class: list[list[Tensor]]) -> list[Tensor]:
    """From pieces by class and client to the rows of each client."""
    return [torch.cat(pieces) for pieces in zip(*by_class, strict=True)]
