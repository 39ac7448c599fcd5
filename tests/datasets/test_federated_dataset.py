import contextlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.datasets import DATASETS, DataError, DataOptions, PartitionError, federate
from fedme.datasets.digits import Digits
from fedme.datasets.partitioners import Dirichlet, Iid, Natural, Pathological

KEY = Key(5, ("data",))


def owners(sizes: list[int], tests: list[int] | None = None):
    tests = tests or [0] * len(sizes)
    train = torch.split(torch.arange(sum(sizes)), sizes)
    test = torch.split(torch.arange(sum(sizes), sum(sizes) + sum(tests)), tests)
    return {f"o{i}": pair for i, pair in enumerate(zip(train, test, strict=True))}


def sizes(client) -> tuple[int, int, int]:
    return len(client.train), len(client.val), len(client.test)


@settings(deadline=None, max_examples=80)
@given(
    unlabeled=st.integers(0, 60),
    public=st.integers(0, 60),
    val=st.sampled_from([0.0, 0.2, 0.3, 0.9]),
    test=st.none() | st.sampled_from([0.1, 0.25, 0.9]),
    limit=st.none() | st.integers(50, 500),
    partitioner=st.sampled_from([Iid(4), Dirichlet(4, min_samples=3), Pathological(4), Natural(), Natural(clients=3)]),
    published=st.booleans(),
    seed=st.integers(0, 3),
)
def test_parts_are_disjoint_and_repeatable(labelled, unlabeled, public, val, test, limit, partitioner, published, seed):
    train, rest = list(range(8)) * 50, list(range(8)) * 12 if published else []
    dataset = labelled(train, rest, owners([60, 90, 50, 120, 80], [20, 20, 20, 20, 16] if published else None))
    options = DataOptions(unlabeled, public, val, test, limit)
    federation = federate(dataset, partitioner, options, Key(seed))
    pieces = [federation.partition.unlabeled, federation.partition.public]
    for client, data in federation.clients.items():
        assert min(sizes(data)[::2]) > 0
        assert (len(data.val) > 0) == (val > 0)
        parts = federation.partition.clients[client]
        assert all(
            torch.equal(split.rows, part)
            for split, part in ((data.train, parts.train), (data.val, parts.val), (data.test, parts.test))
        )
        only = len(parts.train) == 1 and torch.equal(parts.train, parts.val)  # one sample serves for both
        pieces += [parts.train, parts.val[:0] if only else parts.val, parts.test]
        if isinstance(partitioner, Natural):
            assert limit is None or sum(sizes(data)) <= limit + 2
            assert torch.isin(parts.all(), torch.cat(dataset.owners[client])).all()
    rows = torch.cat(pieces)
    assert len(torch.unique(rows)) == len(rows)
    assert (len(pieces[0]), len(pieces[1])) == (unlabeled, public)
    if published and test is None:
        assert torch.isin(torch.cat([data.test.rows for data in federation.clients.values()]), dataset.test).all()
    assert not torch.isin(torch.cat(pieces[:2]), dataset.test).any() or test is not None
    assert federate(dataset, partitioner, options, Key(seed)).partition.digest() == federation.partition.digest()
    if val > 0:
        with contextlib.suppress(PartitionError):  # other samples set aside may leave too few for the same division
            assert federate(dataset, partitioner, options, Key(99)).partition.digest() != federation.partition.digest()


@pytest.mark.parametrize(
    ("count", "val", "expected"),
    [
        (1, 0.3, (1, 1)),
        (2, 0.3, (1, 1)),
        (2, 0.9, (1, 1)),
        (10, 0.3, (7, 3)),
        (10, 0.9, (1, 9)),
        (7, 0.2, (5, 2)),
        (5, 0, (5, 0)),
    ],
)
def test_validation_parts(labelled, count, val, expected):
    dataset = labelled([0] * count, [0], owners([count], [1]))
    client = federate(dataset, Natural(min_samples=1), DataOptions(val=val), KEY).clients["o0"]
    assert sizes(client) == (*expected, 1)
    if count == 1:
        assert torch.equal(client.train.rows, client.val.rows)


def test_test_parts_are_cut_where_the_publisher_has_none(labelled):
    dataset = labelled([0] * 40, [], owners([40]))
    assert sizes(federate(dataset, Natural(), DataOptions(), KEY).clients["o0"]) == (24, 6, 10)
    assert sizes(federate(dataset, Natural(), DataOptions(test=0.5, val=0), KEY).clients["o0"]) == (20, 0, 20)


def test_a_test_share_pools_the_publishers_parts(labelled):
    dataset = labelled([0] * 30, [0] * 10, owners([30], [10]))
    for partitioner in (Natural(), Iid(1)):
        client = next(iter(federate(dataset, partitioner, DataOptions(test=0.25, val=0), KEY).clients.values()))
        assert sizes(client) == (30, 0, 10)
        assert (client.train.rows >= 30).any()


def test_a_client_too_small_to_test_is_named(labelled):
    with pytest.raises(DataError, match=r"client o1 has 1 sample.*min_samples"):
        federate(labelled([0] * 5, [], owners([4, 1])), Natural(min_samples=1), DataOptions(), KEY)


def test_time_order_is_kept_with_a_gap(labelled):
    dataset = labelled([0] * 1000, [], owners([1000]), overlap=80)
    parts = federate(dataset, Natural(), DataOptions(val=0.2, test=0.2), KEY).partition.clients["o0"]
    assert parts.test.tolist() == list(range(800, 1000))
    assert parts.val.tolist() == list(range(576, 720))
    assert parts.train.tolist() == list(range(496))
    tiny = labelled([0] * 10, [], owners([10]), overlap=80)
    parts = federate(tiny, Natural(), DataOptions(val=0.2, test=0.2), KEY).partition.clients["o0"]
    assert (parts.train.tolist(), parts.val.tolist(), parts.test.tolist()) == ([0, 1], [3], [8, 9])


def test_natural_sets_aside_rows_of_other_owners(labelled):
    dataset = labelled([0] * 100, [], owners([25] * 4))
    federation = federate(dataset, Natural(clients=2), DataOptions(unlabeled=30, public=20), KEY)
    others = torch.cat([rows for owner, (rows, _) in dataset.owners.items() if owner not in federation.clients])
    aside = torch.cat((federation.unlabeled.rows, federation.public.rows))
    assert sorted(aside.tolist()) == sorted(others.tolist())
    assert federation.notes == ()
    assert all(client.public is federation.public for client in federation.clients.values())


def test_natural_takes_from_clients_what_others_lack_and_says_so(labelled):
    dataset = labelled([0] * 100, [], owners([25] * 4))
    federation = federate(dataset, Natural(clients=3), DataOptions(unlabeled=40), KEY)
    assert "15 of the 40" in federation.notes[0]
    assert sum(sum(sizes(client)) for client in federation.clients.values()) == 60
    with pytest.raises(DataError, match="must be at most 92.*got 93"):
        federate(dataset, Natural(), DataOptions(unlabeled=93), KEY)
    least = federate(dataset, Natural(), DataOptions(unlabeled=92), KEY).partition
    assert all(len(parts.all()) == 2 for parts in least.clients.values())


def test_nothing_is_set_aside_unless_asked(labelled):
    federation = federate(labelled([0, 1] * 20), Iid(2), DataOptions(), KEY)
    assert federation.unlabeled is None
    assert federation.public is None
    with pytest.raises(DataError, match="data.unlabeled must be at most 40.*got 41"):
        federate(labelled([0, 1] * 20), Iid(2), DataOptions(unlabeled=41), KEY)


def test_limit_counts_training_samples_and_shrinks_the_test_part(labelled):
    dataset = labelled([0, 1] * 100, [0, 1] * 20)
    federation = federate(dataset, Iid(2), DataOptions(limit=50, val=0), KEY)
    assert [sizes(client) for client in federation.clients.values()] == [(25, 0, 5)] * 2


def test_a_limit_never_leaves_clients_without_a_test_part(labelled):
    with pytest.raises(PartitionError, match="2 clients need at least 2 test samples, but there are 1"):
        federate(labelled([0, 1] * 100, [0, 1]), Iid(2), DataOptions(limit=20), KEY)


def test_limit_of_a_natural_partition_is_for_every_client(labelled):
    dataset = labelled([0] * 1000, [0] * 100, owners([900, 100], [60, 40]))
    federation = federate(dataset, Natural(), DataOptions(limit=96), KEY)
    assert sizes(federation.clients["o0"]) == (72, 18, 6)
    assert sum(sizes(federation.clients["o1"])) in (95, 96, 97)


def test_a_client_may_have_a_label_space_of_its_own(labelled):
    dataset = labelled(list(range(6)) * 20, list(range(6)) * 4, classes=6)
    federation = federate(dataset, Iid(2), DataOptions(groups={"1": ((0, 2), (5,))}), KEY)
    assert federation.classes == {"0": 6, "1": 2}
    for split in (federation.clients["1"].train, federation.clients["1"].val, federation.clients["1"].test):
        original = dataset.source.labels[split.rows].tolist()
        assert set(original) <= {0, 2, 5}
        assert split.y.tolist() == [{0: 0, 2: 0, 5: 1}[label] for label in original]
    assert federation.clients["0"].train.targets is None


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"9": ((0,),)}, "unknown client '9'"),
        ({"0": ()}, "at least one group"),
        ({"0": ((),)}, "at least one class"),
        ({"0": ((0,), (0,))}, "must be distinct"),
        ({"0": ((7,),)}, "between 0 and 1"),
    ],
)
def test_groups_are_checked(labelled, groups, message):
    with pytest.raises(DataError, match=message):
        federate(labelled([0, 1] * 20), Iid(2), DataOptions(groups=groups), KEY)


def test_groups_without_samples_are_refused(labelled):
    with pytest.raises(DataError, match="client 0 has no training or no test samples"):
        federate(labelled([0, 1] * 20, classes=3), Iid(2), DataOptions(groups={"0": ((2,),)}), KEY)


@pytest.mark.parametrize(
    "options",
    [{"unlabeled": -1}, {"public": -1}, {"val": 1.0}, {"test": 0.0}, {"test": 1.0}, {"limit": 0}, {"val": float("nan")}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(DataError, match=next(iter(options))):
        DataOptions(**options)


def test_digits_from_end_to_end(tmp_path):
    dataset = Digits().load(tmp_path)
    federation = federate(dataset, Dirichlet(5), DataOptions(unlabeled=100), KEY)
    assert sum(sum(sizes(client)) for client in federation.clients.values()) == 1697
    x = federation.unlabeled.inputs()
    assert x.shape == (100, 1, 8, 8)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    (header, lines), caption = federation.table()
    assert [line[0] for line in lines] == [*federation.clients, "all"]
    assert (len(header), caption) == (14, "5 clients, 100 unlabeled")


def test_every_data_set_has_a_line_for_the_list():
    for name, dataset_class in DATASETS.items():
        assert dataset_class.__doc__ is not None, name
        assert "\n" not in dataset_class.__doc__, name
        if name != "sites":  # what a sample looks like has no default
            dataset_class()


@pytest.mark.skipif("FEDME_DATA" not in os.environ, reason="needs data sets (FEDME_DATA=DIRECTORY make test)")
def test_fedmes_cifar10_has_the_sizes_of_its_notebooks():
    dataset = DATASETS["cifar10"]().load(Path(os.environ["FEDME_DATA"]))
    federation = federate(dataset, Dirichlet(20), DataOptions(unlabeled=1000), KEY)
    train, val, test = (sum(column) for column in zip(*map(sizes, federation.clients.values()), strict=True))
    assert (train + val, test) == (49_000, 10_000)
    assert abs(train - 39_191) <= 20
