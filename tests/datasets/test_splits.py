"""Splits of a client's rows: stratified by class, by groups, and at random."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.datasets import DataError, DataOptions, federate
from fedme.datasets.dataset import GivenSplits
from fedme.datasets.partitioners import Natural
from fedme.datasets.splits import Splitting

NONE = torch.empty(0, dtype=torch.int64)


def split(classes=None, groups=None, count=None, seed=0, test=0.25, val=0.2):
    count = count if count is not None else len(classes if classes is not None else groups)
    splitting = Splitting(test, val, classes=classes, groups=groups)
    return splitting("a", (torch.arange(count), NONE), Key(seed))


def test_a_rare_class_is_in_every_part():
    """8 of 123 samples: at random, one part often had a single class."""
    labels = torch.tensor([1] * 115 + [0] * 8)
    for seed in range(20):
        parts = split(labels, seed=seed)
        assert [int((labels[rows] == 0).sum()) for rows in (parts.train, parts.val, parts.test)] == [5, 1, 2]
    lacking = [seed for seed in range(20) if (labels[split(count=123, seed=seed).test] == 1).all()]
    assert lacking  # the comparison: without classes, some test parts have one class only


@settings(deadline=None, max_examples=200)
@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=60), seed=st.integers(0, 5), test=st.floats(0.05, 0.9))
def test_stratified_parts_have_the_size_of_random_ones_and_all_classes_in_proportion(labels, seed, test):
    y = torch.tensor(labels)
    stratified, random = split(y, seed=seed, test=test, val=0), split(count=len(y), seed=seed, test=test, val=0)
    assert len(stratified.test) == len(random.test)
    rows = torch.cat((stratified.train, stratified.test))
    assert torch.equal(rows.sort().values, torch.arange(len(y)))
    for c in y.unique():
        held_out, exact = int((y[stratified.test] == c).sum()), int((y == c).sum()) * len(stratified.test) / len(y)
        assert abs(held_out - exact) < 1 or (held_out == 1 and exact < 1) or int((y == c).sum()) == 1 or len(y.unique()) > 2


@settings(deadline=None, max_examples=100)
@given(
    persons=st.lists(st.integers(1, 9), min_size=3, max_size=25),
    classes=st.none() | st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_nobody_is_in_two_parts(persons, classes, seed):
    groups = torch.cat([torch.full((count,), 7 * person) for person, count in enumerate(persons)])
    y = None if classes is None else torch.randint(0, classes + 1, (len(groups),), generator=Key(seed).torch())
    parts = split(y, groups, seed=seed)
    members = [set(groups[rows].tolist()) for rows in (parts.train, parts.val, parts.test)]
    assert all(members)
    assert not members[0] & members[1]
    assert not members[0] & members[2]
    assert not members[1] & members[2]
    assert len(parts.all()) == len(groups)


def test_groups_keep_the_sizes_and_the_classes():
    groups = torch.arange(40).repeat_interleave(5)  # 40 persons with five rows each; every fourth one is ill
    y = (groups % 4 == 0).long()
    for seed in range(10):
        parts = split(y, groups, seed=seed)
        assert (len(parts.train), len(parts.val), len(parts.test)) == (120, 35, 45)  # whole persons: not quite 30 and 50
        assert 0.2 <= y[parts.test].double().mean() <= 0.3


def test_too_few_groups_and_given_parts_with_common_groups_are_refused():
    with pytest.raises(DataError, match=r"client a: 3 samples of one group are left to split.*data.group"):
        split(groups=torch.tensor([1, 1, 1, 2]))
    splitting = Splitting(None, 0.0, groups=torch.tensor([1, 1, 2, 2, 1]))
    with pytest.raises(DataError, match="1 groups of data.group have samples in the train part and in the test part"):
        splitting("a", (torch.arange(4), NONE), Key(0), GivenSplits(test=torch.tensor([4])))


def test_stratification_is_the_default_and_can_be_turned_off(labelled):
    dataset = labelled([0] * 115 + [1] * 8, owners={"a": (torch.arange(123), NONE)})
    y = dataset.source.labels
    default = [federate(dataset, Natural(), DataOptions(), Key(seed)).clients["a"] for seed in range(20)]
    off = [federate(dataset, Natural(), DataOptions(stratify=False), Key(seed)).clients["a"] for seed in range(20)]
    assert {int(y[client.test.rows].sum()) for client in default} == {2}
    assert {int(y[client.test.rows].sum()) for client in off} > {2}


def test_a_single_sample_in_two_parts_is_said(labelled):
    dataset = labelled([0, 1, 0, 1, 0, 1], owners={"a": (torch.arange(2), NONE), "b": (torch.arange(2, 6), NONE)})
    (note,) = federate(dataset, Natural(), DataOptions(), Key(0)).notes
    assert note.startswith("client a has a single training sample, which is the validation sample too")
    assert not federate(dataset, Natural(), DataOptions(val=0), Key(0)).notes


def folds(count, classes=None, groups=None, seed=0, gap=0, val=0.2, given=None, rows=None):
    rows = torch.arange(len(classes if classes is not None else groups)) if rows is None else rows
    made = [Splitting(None, val, gap, classes, groups, (number, count)) for number in range(count)]
    return [splitting("a", (rows, NONE), Key(seed), given) for splitting in made]


@settings(deadline=None, max_examples=200)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=60), seed=st.integers(0, 5), count=st.integers(2, 7))
def test_every_row_is_in_one_fold_with_its_class_in_proportion(labels, seed, count):
    y = torch.tensor(labels)
    parts = folds(count, y, seed=seed)
    assert torch.equal(torch.cat([part.test for part in parts]).sort().values, torch.arange(len(y)))
    sizes = [len(part.test) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for c in y.unique():
        of_class = [int((y[part.test] == c).sum()) for part in parts]
        assert max(of_class) - min(of_class) <= 1
    for part in parts:
        assert not torch.isin(part.test, torch.cat((part.train, part.val))).any()
        assert len(part.train)
        assert len(part.all()) == len(y)


@settings(deadline=None, max_examples=100)
@given(
    persons=st.lists(st.integers(1, 9), min_size=3, max_size=25),
    classes=st.none() | st.integers(0, 3),
    seed=st.integers(0, 5),
    count=st.integers(2, 6),
)
def test_folds_of_groups_keep_persons_together(persons, classes, seed, count):
    groups = torch.cat([torch.full((size,), 7 * person) for person, size in enumerate(persons)])
    y = None if classes is None else torch.randint(0, classes + 1, (len(groups),), generator=Key(seed).torch())
    parts = folds(count, y, groups, seed=seed, val=0.0)
    assert torch.equal(torch.cat([part.test for part in parts]).sort().values, torch.arange(len(groups)))
    for part in parts:
        assert not set(groups[part.test].tolist()) & set(groups[part.train].tolist())
    if classes is None:  # the largest group decides how even they can be
        sizes = [len(part.test) for part in parts]
        assert max(sizes) - min(sizes) <= max(persons)


def test_folds_in_time_are_blocks_with_a_gap_on_both_sides():
    y = torch.zeros(100, dtype=torch.int64)
    parts = folds(5, y, gap=3)
    assert [part.test.tolist() for part in parts] == [list(range(20 * i, 20 * i + 20)) for i in range(5)]
    for part in parts:
        for row in torch.cat((part.train, part.val)).tolist():
            assert (part.test - row).abs().min() > 3


def test_folds_take_the_rows_of_given_parts_too():
    y = torch.arange(12) % 2
    parts = folds(3, y, rows=torch.arange(6), given=GivenSplits(torch.arange(6, 9), torch.arange(9, 12)))
    assert torch.equal(torch.cat([part.test for part in parts]).sort().values, torch.arange(12))
    with pytest.raises(DataError, match="client a has 1 sample, but training and test need 2"):
        folds(3, y[:1])


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2 of 5", "", "1/5/2", "-1/5"])
def test_a_fold_that_does_not_exist(fold):
    with pytest.raises(ValueError, match='must be like "2/5", the second of five'):
        DataOptions(fold=fold)
    with pytest.raises(ValueError, match="so does data.test"):
        DataOptions(fold="1/5", test=0.2)
