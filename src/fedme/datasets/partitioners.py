"""Partitioners divide samples among clients; each is a frozen dataclass of options, called with the samples and a key.

A published test set is divided alongside the training set: a client is tested on the classes it is trained on, in the same
proportions. All randomness comes from the key, and no loop is unbounded: an impossible partition raises a `PartitionError`
that names the option to change.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fedme.core.key import Key
from fedme.core.settings import setting
from fedme.datasets.data_errors import PartitionError, require, require_choice
from fedme.datasets.dataset import ClientRows

Layout = Literal["disjoint", "ring"]
TEST_REMEDY = "lower clients, or set data.test to a fraction, which splits the test set off the samples of every client"


@dataclass(frozen=True, eq=False)
class Pool:
    """The rows to divide."""

    labels: Tensor  # of all rows of the source
    train: Tensor
    test: Tensor
    owners: ClientRows | None = None

    def classes(self) -> list[int]:
        """The classes that occur, in ascending order."""
        return [int(c) for c in torch.unique(self.labels[torch.cat((self.train, self.test))])]

    def by_class(self, key: Key) -> list[tuple[Tensor, Tensor]]:
        """The shuffled training rows and test rows of every class that occurs."""
        shuffled = []
        for rows, name in ((self.train, "train"), (self.test, "test")):
            rows = rows[torch.randperm(len(rows), generator=key.at(name).torch())]
            shuffled.append((rows, self.labels[rows]))
        (train, train_labels), (test, test_labels) = shuffled
        return [(train[train_labels == c], test[test_labels == c]) for c in self.classes()]


class Partitioner(Protocol):
    """Divides a pool among clients, each of which gets at least `min_samples` training rows."""

    @property
    def min_samples(self) -> int: ...

    def __call__(self, pool: Pool, key: Key) -> ClientRows: ...


@dataclass(frozen=True, kw_only=True)
class Seeded:
    """What all partitioners have."""

    seed: int | None = setting(None, "seed of the partition and of the splits; default: the seed of the experiment")


@dataclass(frozen=True)
class Iid(Seeded):
    """Independent and identically distributed: random parts of equal size."""

    clients: int = setting(10, "number of clients")
    min_samples: int = setting(2, "minimum number of training samples per client")

    def __post_init__(self) -> None:
        _check_options(self.clients, self.min_samples)

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        even = np.ones(self.clients)
        parts = []
        for rows, name in ((pool.train, "train"), (pool.test, "test")):
            rows = rows[torch.randperm(len(rows), generator=key.at(name).torch())]
            parts.append(_cut(rows, _sizes(even, len(rows))))
        return _checked("iid", _named(*parts), pool, self.min_samples)


@dataclass(frozen=True)
class Dirichlet(Seeded):
    """Label proportions and sizes drawn from Dirichlet distributions (FedMe section 5.1, after FedMA).

    Every class is divided in proportions drawn from Dir(alpha_label); a client that has reached its fraction of the samples,
    drawn from Dir(alpha_size), gets nothing of the remaining classes. Test rows use the same proportions and fractions. The
    draw is repeated until every client has `min_samples` training rows and a test row. alpha_size = None: sizes are not
    limited.

    Deviations: FedMe's notebooks require training rows only; a client without a test row could not be evaluated.
    """

    clients: int = setting(10, "number of clients")
    alpha_label: float = setting(0.5, "concentration of the label proportions; small: few classes per client")
    alpha_size: float | None = setting(10.0, "concentration of sizes; small: very unequal; none: sizes follow from the labels")
    min_samples: int = setting(10, "minimum number of training samples per client")
    tries: int = setting(100, "maximum number of draws")

    def __post_init__(self) -> None:
        _check_options(self.clients, self.min_samples)
        for name, value in (("alpha_label", self.alpha_label), ("alpha_size", self.alpha_size)):
            finite = value is None or 0 < value < float("inf")
            require(finite, name, f"must be finite and > 0, got {value}", PartitionError)
        require(self.tries >= 1, "tries", f"must be >= 1, got {self.tries}", PartitionError)

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
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
            f"dirichlet: each of {self.tries} draws left a client with fewer than {self.min_samples} training samples"
            f"{' or without a test sample' if len(pool.test) else ''}; lower clients or min_samples, raise alpha_label "
            f"(now {self.alpha_label}) or alpha_size (now {self.alpha_size}), or use more samples"
        )

    def _draw(self, available: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """The number of training and test rows per class and client: classes x clients x 2."""
        caps = np.full((self.clients, 2), np.inf)
        if self.alpha_size is not None:
            fractions = _dirichlet(draw, self.alpha_size, self.clients)
            caps = np.floor(fractions[:, None] * available.sum(axis=0))
            caps[-1] = available.sum(axis=0) - caps[:-1].sum(axis=0)
        sizes = np.zeros((len(available), self.clients, 2), dtype=np.int64)
        for c, counts in enumerate(available):
            proportions = _dirichlet(draw, self.alpha_label, self.clients)
            for part, count in enumerate(counts):
                not_full = sizes[:, :, part].sum(axis=0) < caps[:, part]
                masked = np.where(not_full, proportions, 0)
                # If only full clients have positive proportions, the others get equal parts of the class.
                sizes[c, :, part] = _sizes(masked if masked.sum() > 0 else not_full.astype(float), int(count), np.floor)
        return sizes


@dataclass(frozen=True)
class Shards(Seeded):
    """Shards of single classes, so that a client has at most `shards_per_client` classes (FML section 5.1).

    Deviations: FML sorts by label and cuts into equal shards, which straddle classes of unequal size; here every class is
    cut into the same number of shards (larger classes into one more, if the number of shards requires it).
    """

    clients: int = setting(10, "number of clients")
    shards_per_client: int = setting(2, "shards per client; a shard contains one class")
    min_samples: int = setting(2, "minimum number of training samples per client")

    def __post_init__(self) -> None:
        _check_options(self.clients, self.min_samples)
        valid = self.shards_per_client >= 1
        require(valid, "shards_per_client", f"must be >= 1, got {self.shards_per_client}", PartitionError)

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        _check_amount("shards", pool, self.clients, self.min_samples)
        classes = pool.by_class(key)
        count = self.clients * self.shards_per_client
        if count < len(classes):
            raise PartitionError(
                f"shards: {self.clients} clients with {self.shards_per_client} shards need at least {len(classes)} shards, "
                f"one per class, got {count}; raise clients or shards_per_client"
            )
        fewest, more = divmod(count, len(classes))
        largest = sorted(range(len(classes)), key=lambda c: -len(classes[c][0]))[:more]
        shards: list[tuple[Tensor, Tensor]] = []
        for c, (train, test) in enumerate(classes):
            even = np.ones(fewest + (c in largest))
            shards += zip(_cut(train, _sizes(even, len(train))), _cut(test, _sizes(even, len(test))), strict=True)
        order = torch.randperm(count, generator=key.at("assignment").torch()).reshape(self.clients, -1).tolist()
        parts = [[torch.cat([shards[s][part] for s in client_shards]) for client_shards in order] for part in (0, 1)]
        return _checked("shards", _named(*parts), pool, self.min_samples)


@dataclass(frozen=True)
class Pathological(Seeded):
    """A fixed number of classes for every client (PFML, after pFedMe).

    layout = "disjoint": the classes form groups of `classes_per_client`, client u has group u modulo their number, and the
    clients of a group divide all samples of its classes, in proportion to draws from U(0.1, 0.5).
    layout = "ring": client u has the classes u, u + 1, ... (modulo their number): 10 samples of each, then twice the sum of a
    log-normal number and 5 to 10 % of the class; additions that would exhaust the class are skipped. Some samples are unused.

    Deviations: pFedMe adds 300 to 600 samples, 5 to 10 % of a class of CIFAR-10; fractions suit any number of samples.
    """

    clients: int = setting(10, "number of clients")
    classes_per_client: int = setting(2, "exact number of classes per client")
    layout: Layout = setting("disjoint", "disjoint: groups of classes; ring: neighbouring clients have classes in common")
    min_samples: int = setting(2, "minimum number of training samples per client")

    def __post_init__(self) -> None:
        _check_options(self.clients, self.min_samples)
        valid = self.classes_per_client >= 1
        require(valid, "classes_per_client", f"must be >= 1, got {self.classes_per_client}", PartitionError)
        require_choice("layout", self.layout, get_args(Layout), PartitionError)

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        _check_amount("pathological", pool, self.clients, self.min_samples)
        classes = pool.by_class(key)
        if self.classes_per_client > len(classes):
            raise PartitionError(
                f"pathological: classes_per_client must be at most the number of classes, {len(classes)}, "
                f"got {self.classes_per_client}; lower it"
            )
        counts = np.array([len(train) for train, _ in classes])
        draw = key.at("sizes").numpy()
        sizes = self._disjoint(counts, draw) if self.layout == "disjoint" else self._ring(counts, draw)
        if (np.count_nonzero(sizes, axis=0) != self.classes_per_client).any():
            raise PartitionError(
                f"pathological: a client would get no sample of one of its {self.classes_per_client} classes; "
                "use more samples or fewer clients"
            )
        train = [_cut(rows, sizes[c]) for c, (rows, _) in enumerate(classes)]
        test = [_cut(rows, _sizes(sizes[c], len(rows), total=counts[c])) for c, (_, rows) in enumerate(classes)]
        return _checked("pathological", _named(_joined(train), _joined(test)), pool, self.min_samples)

    def _disjoint(self, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        groups, rest = divmod(len(counts), self.classes_per_client)
        if rest:
            raise PartitionError(
                f"pathological: classes_per_client must divide the number of classes, {len(counts)}, "
                f'got {self.classes_per_client}; choose a divisor, or layout = "ring"'
            )
        proportions = np.zeros((len(counts), self.clients))
        for client in range(self.clients):
            first = client % groups * self.classes_per_client
            proportions[first : first + self.classes_per_client, client] = draw.uniform(0.1, 0.5, self.classes_per_client)
        return np.stack([_sizes(of_class, int(n)) for of_class, n in zip(proportions, counts, strict=True)])

    def _ring(self, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        sizes = np.zeros((len(counts), self.clients), dtype=np.int64)
        places = [(u, j, (u + j) % len(counts)) for u in range(self.clients) for j in range(self.classes_per_client)]
        for u, _, c in places:
            sizes[c, u] = 10
        if (short := np.flatnonzero(sizes.sum(axis=1) > counts)).size:
            c = int(short[0])
            raise PartitionError(
                f"pathological: class {c} needs {sizes[c].sum()} samples, 10 per client, but has {counts[c]}; "
                "use more samples or fewer clients"
            )
        additions = draw.lognormal(0, 2, (len(counts), self.clients, self.classes_per_client))
        additions *= (np.maximum(counts - self.clients, 0) / additions.sum(axis=(1, 2)))[:, None, None]
        column = max(1, self.clients // len(counts))
        for u, j, c in places:
            least, most = round(counts[c] * 0.05), round(counts[c] * 0.1)
            size = 2 * (int(additions[c, u // column, j]) + int(draw.integers(least, most, endpoint=True)))
            if sizes[c].sum() + size < counts[c]:
                sizes[c, u] += size
        return sizes


@dataclass(frozen=True)
class Natural(Seeded):
    """The natural clients of the data set: writers, roles, users.

    `clients` owners are drawn at random, or as many as hold `fraction` of all samples, or those that `owners` names, or all of
    them. Owners with fewer
    than `min_samples` training samples are excluded, and so are owners without test samples if others have some.
    """

    clients: int | None = setting(None, "number of owners, drawn at random; default: all")
    fraction: float | None = setting(None, "alternative to clients: draw owners until they hold this fraction of the samples")
    min_samples: int = setting(2, "minimum number of training samples per client")
    owners: tuple[str, ...] | None = setting(None, "alternative to clients: the names of the owners, as in a published split")

    def __post_init__(self) -> None:
        _check_options(1 if self.clients is None else self.clients, self.min_samples)
        both = self.clients is not None and self.fraction is not None
        require(not both, "fraction", "set clients or fraction, not both", PartitionError)
        drawn = self.clients is not None or self.fraction is not None
        require(self.owners is None or not drawn, "owners", "set clients, fraction or owners, only one", PartitionError)
        once = self.owners is None or 0 < len(self.owners) == len(set(self.owners))
        require(once, "owners", "must name at least one owner, and every one once", PartitionError)
        valid = self.fraction is None or 0 < self.fraction <= 1
        require(valid, "fraction", f"must be > 0 and <= 1, got {self.fraction}", PartitionError)

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        if pool.owners is None:
            others = ", ".join(name for name in PARTITIONS if name != "natural")
            raise PartitionError(f"natural: this data set has no natural clients; use one of {others}")
        tested = any(len(test) for _, test in pool.owners.values())
        eligible = {
            owner: rows
            for owner, rows in pool.owners.items()
            if len(rows[0]) >= self.min_samples and (len(rows[1]) or not tested)
        }
        if self.owners is not None:
            return self._named_owners(self.owners, pool.owners, eligible)
        count = len(eligible) if self.clients is None else self.clients
        if not eligible or count > len(eligible):
            raise PartitionError(
                f"natural: {max(count, 1)} clients are required, but only {len(eligible)} of {len(pool.owners)} owners have "
                f"{self.min_samples} or more training samples{' and a test sample' if tested else ''}; "
                "lower clients or min_samples"
            )
        owners = list(eligible)
        order = torch.randperm(len(owners), generator=key.at("owners").torch()).tolist()
        if self.fraction is not None:
            held = np.cumsum([sum(map(len, eligible[owners[o]])) for o in order])
            count = 1 + int(np.searchsorted(held, self.fraction * held[-1] * (1 - 1e-9)))
        return {owners[o]: eligible[owners[o]] for o in sorted(order[:count])}

    def _named_owners(self, names: tuple[str, ...], owners: ClientRows, eligible: ClientRows) -> ClientRows:
        if unknown := [name for name in names if name not in owners]:
            known = ", ".join(list(owners)[:5])
            raise PartitionError(f"natural: partition.owners: unknown owner '{unknown[0]}'; the data set has {known}, ...")
        if small := [name for name in names if name not in eligible]:
            raise PartitionError(
                f"natural: partition.owners: '{small[0]}' has fewer than {self.min_samples} training samples, or no test "
                "sample; leave it out, or lower min_samples"
            )
        return {owner: rows for owner, rows in eligible.items() if owner in names}


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "pathological": Pathological,
    "natural": Natural,
}


def _check_options(clients: int, min_samples: int) -> None:
    require(clients >= 1, "clients", f"must be >= 1, got {clients}", PartitionError)
    require(min_samples >= 1, "min_samples", f"must be >= 1, got {min_samples}", PartitionError)


def _check_amount(name: str, pool: Pool, clients: int, min_samples: int) -> None:
    if len(pool.train) < clients * min_samples:
        raise PartitionError(
            f"{name}: {clients} clients with at least {min_samples} samples need {clients * min_samples} training samples, "
            f"but there are {len(pool.train)}; lower clients or min_samples, or use more samples"
        )
    if 0 < len(pool.test) < clients:
        raise PartitionError(
            f"{name}: {clients} clients need at least {clients} test samples, but there are {len(pool.test)}; {TEST_REMEDY}"
        )


def _checked(name: str, rows: ClientRows, pool: Pool, min_samples: int) -> ClientRows:
    _check_amount(name, pool, len(rows), min_samples)
    client, smallest = min(((client, len(train)) for client, (train, _) in rows.items()), key=lambda pair: pair[1])
    if smallest < min_samples:
        raise PartitionError(
            f"{name}: client {client} would get {smallest} training samples, fewer than min_samples = {min_samples}; "
            "lower clients or min_samples, or use more samples"
        )
    if len(pool.test) and (untested := [client for client, (_, test) in rows.items() if not len(test)]):
        raise PartitionError(f"{name}: client {untested[0]} would get no test sample; {TEST_REMEDY}")
    return rows


def _named(train: list[Tensor], test: list[Tensor]) -> ClientRows:
    return {str(u): pair for u, pair in enumerate(zip(train, test, strict=True))}


def _dirichlet(draw: np.random.Generator, alpha: float, count: int) -> np.ndarray:
    """Proportions from Dir(alpha); for extreme alpha its limits: a single 1, or equal proportions."""
    if not 1e-6 < alpha < 1e12:
        return np.eye(count)[draw.integers(count)] if alpha < 1 else np.full(count, 1 / count)
    return draw.dirichlet(np.full(count, alpha))


def _sizes(proportions: np.ndarray, rows: int, to_integer: np.ufunc = np.rint, total: float | None = None) -> np.ndarray:
    """Sizes in these proportions, from rounded cumulative bounds; all rows are used unless `total` exceeds their sum."""
    total_or_sum = proportions.sum() if total is None else total
    bounds = to_integer(np.cumsum(proportions) / max(total_or_sum, 1e-300) * rows).astype(np.int64).clip(0, rows)
    if total is None:
        bounds[-1] = rows
    return np.diff(bounds, prepend=0)


def _cut(rows: Tensor, sizes: np.ndarray) -> list[Tensor]:
    """Consecutive pieces of these sizes; remaining rows are unused."""
    sizes = np.asarray(sizes)
    return list(torch.split(rows[: sizes.sum()], sizes.tolist()))


def _joined(by_class: list[list[Tensor]]) -> list[Tensor]:
    """The rows of every client, from pieces by class and client."""
    return [torch.cat(pieces) for pieces in zip(*by_class, strict=True)]
