"""Splits of a client's rows into training, validation and test rows.

A split by a fraction f turns n rows into int((1 - f) n) rows and the rest; two rows become one and one, and a single row is
both the training set and the validation set. There are four ways:

* stratified, for classes: both parts have the classes in the proportions of all rows, and a class with two rows or more is in
  both parts where the sizes allow it;
* by groups: all rows of one person are in the same part; if there are classes as well, their proportions are kept as far as
  whole groups allow;
* at random, for regression and multi-label tasks, and where `data.stratify` is off;
* in time order, if the rows are overlapping windows: the validation and test sets are the later rows, and the rows before them
  that overlap with them are dropped, but never more than half of the training rows.

With folds, the test part is one of k parts of all rows, made in the same four ways: every row is in one of them. A client with
fewer rows, or groups, than folds has folds without test rows.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import GivenSplits
from fedme.datasets.partition_result import Parts

EPSILON = 1e-9  # compensates rounding errors: 10 rows and a fraction of 0.9 leave 1 row, not 0


@dataclass(frozen=True, eq=False)
class Splitting:
    """How the rows of all clients are split; every tensor has one entry per row of the source."""

    test_fraction: float | None  # None: the clients have test rows
    val_fraction: float
    gap: int = 0  # rows are in time order, and each one overlaps with this many rows after it
    classes: Tensor | None = None  # stratify by these
    groups: Tensor | None = None  # rows with the same number belong to one person
    fold: tuple[int, int] | None = None  # the number of the test fold, from 0, and of how many

    def __call__(self, client: ClientId, rows: tuple[Tensor, Tensor], key: Key, given: GivenSplits | None = None) -> Parts:
        """Split the training and test rows of a client in three."""
        given = given or GivenSplits()
        train, test = rows
        if self.fold is not None:
            train = torch.cat([part for part in (train, given.val, given.test) if part is not None])
            given = GivenSplits()
            self._require_two(client, train)
            train, test = self._held_out_fold(client, train, *self.fold, key.at("folds"))
        elif given.test is not None:
            test = given.test
        elif self.test_fraction is not None:
            self._require_two(client, train)
            train, test = self._cut(client, train, self.test_fraction, key.at("test"))
        if given.val is not None or self.val_fraction == 0:
            parts = Parts(train, given.val if given.val is not None else train[:0], test)
        elif len(train) == 1:
            parts = Parts(train, train, test)
        else:
            parts = Parts(*self._cut(client, train, self.val_fraction, key.at("val")), test)
        self._require_separate_groups(client, parts)
        return parts

    def _require_two(self, client: ClientId, rows: Tensor) -> None:
        if len(rows) < 2:
            raise DataError(f"client {client} has {len(rows)} sample, but training and test need 2; raise min_samples to 2")

    def _held_out_fold(self, client: ClientId, rows: Tensor, number: int, count: int, key: Key) -> tuple[Tensor, Tensor]:
        """The rows outside and inside a fold."""
        if self.gap:  # a block in time, and on both sides of it the rows that overlap with it are dropped
            start, end = len(rows) * number // count, len(rows) * (number + 1) // count
            gap = min(self.gap, (len(rows) - end + start) // 4) if end > start else 0
            return torch.cat((rows[: max(0, start - gap)], rows[end + gap :])), rows[start:end]
        order = torch.randperm(len(rows), generator=key.torch())
        fold_of_row = torch.empty(len(rows), dtype=torch.int64)
        if self.groups is not None:
            fold_of_row[order] = self._folds_of_groups(client, rows[order], count)
        else:
            if self.classes is not None:  # the rows of a class lie one after the other, and are dealt out
                order = order[self.classes[rows[order]].argsort(stable=True)]
            fold_of_row[order] = torch.arange(len(rows)) % count
        return rows[fold_of_row != number], rows[fold_of_row == number]

    def _folds_of_groups(self, client: ClientId, rows: Tensor, count: int) -> Tensor:
        """The fold of every row; large groups are dealt out first, each to the fold with the fewest rows of its class."""
        names, group_of_row, sizes, order, strata = self._grouped(client, rows)
        order = order[sizes[order].argsort(descending=True, stable=True)]
        fold_of_group = torch.empty(len(names), dtype=torch.int64)
        filled = torch.zeros((int(strata.max()) + 1, count), dtype=torch.int64)
        for group in order.tolist():
            stratum = int(strata[group])
            least = min(range(count), key=lambda fold: (int(filled[stratum, fold]), int(filled[:, fold].sum())))
            fold_of_group[group] = least
            filled[stratum, least] += sizes[group]
        return fold_of_group[group_of_row]

    def _cut(self, client: ClientId, rows: Tensor, fraction: float, key: Key) -> tuple[Tensor, Tensor]:
        size = max(1, int((1 - fraction) * len(rows) + EPSILON))
        if self.gap:
            return rows[: size - min(self.gap, size // 2)], rows[size:]
        order = torch.randperm(len(rows), generator=key.torch())
        if self.groups is not None:
            held_out = self._groups_held_out(client, rows[order], len(rows) - size)
        elif self.classes is not None:
            held_out = _rows_held_out(self.classes[rows[order]], len(rows) - size)
        else:
            held_out = torch.arange(len(rows)) >= size
        held_out_row = np.empty(len(rows), dtype=bool)
        held_out_row[order.numpy()] = held_out.numpy()
        return rows[torch.from_numpy(np.flatnonzero(~held_out_row))], rows[torch.from_numpy(np.flatnonzero(held_out_row))]

    def _grouped(self, client: ClientId, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The groups, the group of every row, the sizes of groups, their order by first rows, and their classes."""
        assert self.groups is not None
        names, group_of_row = torch.unique(self.groups[rows], return_inverse=True)
        if len(names) < 2:
            raise DataError(
                f"client {client}: {len(rows)} samples of one group are left to split, but training, validation and test need "
                "one group each; add samples of others, set data.val = 0, or remove data.group"
            )
        sizes = torch.bincount(group_of_row)
        first = torch.full((len(names),), len(rows)).scatter_reduce(0, group_of_row, torch.arange(len(rows)), "amin")
        order = first.argsort()
        strata = torch.zeros(len(names), dtype=torch.int64)
        if self.classes is not None:  # a group belongs to the most frequent class of its rows
            classes = self.classes[rows]
            counts = torch.zeros((len(names), int(classes.max()) + 1), dtype=torch.int64)
            counts.index_put_((group_of_row, classes), torch.ones_like(classes), accumulate=True)
            strata = counts.argmax(1)
        return names, group_of_row, sizes, order, strata

    def _groups_held_out(self, client: ClientId, rows: Tensor, count: int) -> Tensor:
        """Whether each row belongs to a group that is held out; groups come in the order of their first rows."""
        names, group_of_row, sizes, order, strata = self._grouped(client, rows)
        chosen = torch.zeros(len(names), dtype=torch.bool)
        for stratum in strata.unique().tolist():
            members = order[strata[order] == stratum]
            target = float(sizes[members].sum()) * count / len(rows)
            reached = torch.cat((torch.zeros(1, dtype=torch.int64), sizes[members].cumsum(0)))
            chosen[members[: int((reached - target).abs().argmin())]] = True
        if not chosen.any():
            chosen[order[sizes[order].argmin()]] = True
        if chosen.all():
            chosen[order[sizes[order].argmax()]] = False
        return chosen[group_of_row]

    def _require_separate_groups(self, client: ClientId, parts: Parts) -> None:
        """Parts that were given as files may share persons."""
        if self.groups is None or torch.equal(parts.train, parts.val):
            return
        named = {name: self.groups[getattr(parts, name)].unique() for name in ("train", "val", "test")}
        for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
            if shared := int(torch.isin(named[one], named[other]).sum()):
                raise DataError(
                    f"client {client}: {shared} groups of data.group have samples in the {one} part and in the {other} part; "
                    "give parts without common groups, or let FedMe split them"
                )


def _rows_held_out(classes: Tensor, count: int) -> Tensor:
    """Whether each row is held out: `count` rows, with every class in proportion; the last rows of a class are held out."""
    # By NumPy and lists: with thousands of clients of a few rows each, tensors would take most of the time.
    labels = classes.numpy()
    sizes = np.bincount(labels)
    exact = (sizes * count / len(labels)).tolist()
    quota = [math.floor(share + EPSILON) for share in exact]
    # The remaining rows go to the classes with the largest remainders: first to classes that have two rows or more and would
    # otherwise be missing in the held-out part, last to classes with a single row, which then is a training row.
    # The smallest comes first; of equal ones, the smallest label.
    waiting = [
        ((2.0 if size == 1 else -2.0 if quota[label] == 0 else 0.0) - (exact[label] - quota[label]), label)
        for label, size in enumerate(sizes.tolist())
        if quota[label] < size
    ]
    heapq.heapify(waiting)
    for _ in range(count - sum(quota)):
        _, label = heapq.heappop(waiting)
        quota[label] += 1
        if quota[label] < sizes[label]:
            heapq.heappush(waiting, (quota[label] - exact[label], label))
    rank_from_end = np.empty(len(labels), dtype=np.int64)
    by_class = labels.argsort(kind="stable")
    rank_from_end[by_class] = sizes.cumsum().repeat(sizes) - 1 - np.arange(len(labels))
    return torch.from_numpy(rank_from_end < np.array(quota)[labels])
