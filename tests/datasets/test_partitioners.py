import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.datasets import PARTITIONS, DataError, Partition, PartitionError, Parts
from fedme.datasets.partitioners import Dirichlet, Iid, Natural, Pathological, Pool, Shards


def balanced(per_class: int, classes: int = 10, test: int = 0) -> Pool:
    """Equal classes, training rows first."""
    labels = torch.arange(classes).repeat(per_class + test)
    rows = torch.arange(len(labels))
    return Pool(labels, rows[: per_class * classes], rows[per_class * classes :])


def uneven(test: int = 0) -> Pool:
    sizes = [60, 80, 101, 97, 73, 55, 120, 88, 64, 92]
    labels = torch.cat([torch.full((size,), c) for c, size in enumerate(sizes)] + [torch.arange(10).repeat(test)])
    rows = torch.arange(len(labels))
    return Pool(labels, rows[: sum(sizes)], rows[sum(sizes) :])


def check_rows_are_used_once(pool: Pool, shares: dict) -> None:
    for part, available in enumerate((pool.train, pool.test)):
        rows = torch.cat([pair[part] for pair in shares.values()])
        assert len(torch.unique(rows)) == len(rows)
        assert torch.isin(rows, available).all()


def classes_of(pool: Pool, rows: torch.Tensor) -> set[int]:
    return set(pool.labels[rows].tolist())


partitioners = st.one_of(
    st.builds(Iid, clients=st.integers(1, 30), min_samples=st.integers(1, 5)),
    st.builds(
        Dirichlet,
        clients=st.integers(1, 30),
        alpha_label=st.sampled_from([1e-9, 0.01, 0.1, 0.5, 5.0, 1000.0, 1e15]),
        alpha_size=st.sampled_from([None, 1e-9, 0.01, 1.0, 10.0, 1000.0, 1e15]),
        min_samples=st.integers(1, 12),
        tries=st.integers(1, 20),
    ),
    st.builds(Shards, clients=st.integers(1, 20), shards_per_client=st.integers(1, 12), min_samples=st.integers(1, 5)),
    st.builds(
        Pathological,
        clients=st.integers(1, 20),
        classes_per_client=st.integers(1, 11),
        layout=st.sampled_from(["disjoint", "ring"]),
        min_samples=st.integers(1, 5),
    ),
)


@settings(deadline=None, max_examples=200)
@given(
    partitioner=partitioners,
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    copies=st.integers(1, 12),
    test_share=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 5),
)
def test_every_partition_uses_rows_once_and_honours_the_minimum(partitioner, labels, copies, test_share, seed):
    labels = torch.tensor(labels).repeat(copies)
    rows = torch.arange(len(labels))
    cut = round(len(rows) * (1 - test_share))
    pool = Pool(labels, rows[:cut], rows[cut:])
    try:
        shares = partitioner(pool, Key(seed))
    except PartitionError as error:
        assert any(word in str(error) for word in ("lower", "raise", "more", "fewer", "choose", "but there are"))
        return
    assert list(shares) == [str(client) for client in range(partitioner.clients)]
    check_rows_are_used_once(pool, shares)
    assert min(len(train) for train, _ in shares.values()) >= partitioner.min_samples
    assert not len(pool.test) or min(len(test) for _, test in shares.values()) >= 1
    again = partitioner(pool, Key(seed))
    assert all(torch.equal(a, b) for client in shares for a, b in zip(shares[client], again[client], strict=True))


MADE = [Iid(5), Dirichlet(5), Shards(5), Pathological(10), Pathological(5, 3, "ring")]


@pytest.mark.parametrize("partitioner", MADE)
def test_another_key_gives_another_partition(partitioner):
    pool = balanced(60)
    first, second = partitioner(pool, Key(1)), partitioner(pool, Key(2))
    assert any(not torch.equal(first[client][0].sort().values, second[client][0].sort().values) for client in first)


@pytest.mark.parametrize("partitioner", MADE)
def test_clients_are_tested_on_the_classes_they_learn(partitioner):
    pool = balanced(200, test=40)
    for train, test in partitioner(pool, Key(0)).values():
        assert classes_of(pool, test) <= classes_of(pool, train)


@pytest.mark.parametrize("partitioner", [Iid, Dirichlet, Shards, Pathological])
def test_more_clients_than_samples(partitioner):
    with pytest.raises(PartitionError, match=r"1000 clients.*there are 100"):
        partitioner(1000)(balanced(10), Key(0))
    with pytest.raises(PartitionError, match="40 clients need at least 40 test samples, but there are 10"):
        partitioner(40)(balanced(100, test=1), Key(0))


@pytest.mark.parametrize("name", PARTITIONS)
def test_impossible_counts_are_refused(name):
    with pytest.raises(PartitionError, match="^clients: must be >= 1, got 0"):
        PARTITIONS[name](clients=0)
    with pytest.raises(PartitionError, match="^min_samples: must be >= 1, got 0"):
        PARTITIONS[name](clients=1, min_samples=0)


def test_iid_is_equal_parts():
    shares = Iid(7)(balanced(10, test=3), Key(0))
    assert {len(train) for train, _ in shares.values()} == {14, 15}
    assert sum(len(test) for _, test in shares.values()) == 30


def test_dirichlet_uses_every_row():
    pool = uneven(test=20)
    shares = Dirichlet(5)(pool, Key(3))
    assert sum(len(train) for train, _ in shares.values()) == len(pool.train)
    assert sum(len(test) for _, test in shares.values()) == len(pool.test)


def test_dirichlet_skew_falls_with_alpha():
    pool = balanced(300)

    def skew(alpha: float) -> float:
        """Mean share of a client's most frequent class."""
        shares = Dirichlet(8, alpha, None, min_samples=1)(pool, Key(0))
        counts = [torch.bincount(pool.labels[train], minlength=10).float() for train, _ in shares.values()]
        return float(torch.stack([count.max() / count.sum() for count in counts]).mean())

    skews = [skew(alpha) for alpha in (0.1, 0.5, 5.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.4
    assert skews[-1] < 0.13


def test_dirichlet_sizes_follow_alpha_size():
    pool = balanced(400)

    def spread(alpha_size: float) -> float:
        sizes = torch.tensor([float(len(train)) for train, _ in Dirichlet(8, 100.0, alpha_size)(pool, Key(0)).values()])
        return float(sizes.std() / sizes.mean())

    assert spread(0.7) > 2 * spread(100.0)
    assert spread(1000.0) < 0.1


def test_dirichlet_test_rows_have_the_proportions_of_the_training_rows():
    pool = balanced(2000, test=1000)
    for train, test in Dirichlet(5, alpha_size=None)(pool, Key(1)).values():
        of_train, of_test = (torch.bincount(pool.labels[rows], minlength=10) / len(rows) for rows in (train, test))
        torch.testing.assert_close(of_train, of_test, atol=0.01, rtol=0)


def test_dirichlet_gives_up_in_time_and_says_what_to_change():
    began = time.perf_counter()
    with pytest.raises(PartitionError, match=r"100 draws.*raise alpha_label \(now 0.01\)"):
        Dirichlet(20, 0.01, None)(balanced(100), Key(0))
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("options", [{"alpha_label": 0.0}, {"alpha_size": -1.0}, {"alpha_label": float("nan")}, {"tries": 0}])
def test_dirichlet_options(options):
    with pytest.raises(PartitionError, match=next(iter(options))):
        Dirichlet(2, **options)


@pytest.mark.parametrize("per_client", [2, 3, 4, 6])
@pytest.mark.parametrize("seed", range(3))
def test_shards_have_at_most_so_many_classes(per_client, seed):
    pool = uneven(test=8)
    shares = Shards(5, per_client)(pool, Key(seed))
    for train, test in shares.values():
        assert len(classes_of(pool, train)) <= per_client
        assert classes_of(pool, train) == classes_of(pool, test)
    check_rows_are_used_once(pool, shares)
    assert sum(len(train) for train, _ in shares.values()) == len(pool.train)


def test_two_shards_of_ten_classes_for_five_clients_are_disjoint():
    pool = balanced(30)
    owned = [classes_of(pool, train) for train, _ in Shards(5, 2)(pool, Key(0)).values()]
    assert sorted(c for classes in owned for c in classes) == list(range(10))


def test_too_few_shards():
    with pytest.raises(PartitionError, match="at least 10 shards, one per class, got 4"):
        Shards(2, 2)(balanced(10), Key(0))
    with pytest.raises(PartitionError, match="shards_per_client: must be >= 1, got 0"):
        Shards(2, 0)


def test_disjoint_groups():
    pool = uneven()
    shares = Pathological(20)(pool, Key(0))
    for client, (train, _) in shares.items():
        first = 2 * (int(client) % 5)
        assert classes_of(pool, train) == {first, first + 1}
    assert sum(len(train) for train, _ in shares.values()) == len(pool.train)
    assert len({len(train) for train, _ in shares.values()}) > 10


@pytest.mark.parametrize("clients", [4, 10, 20, 25])
def test_ring(clients):
    pool = balanced(600, test=100)
    shares = Pathological(clients, 3, "ring")(pool, Key(0))
    for client, (train, test) in shares.items():
        expected = {(int(client) + j) % 10 for j in range(3)}
        assert classes_of(pool, train) == classes_of(pool, test) == expected
        assert torch.bincount(pool.labels[train]).max() >= 10
    check_rows_are_used_once(pool, shares)


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (Pathological(5, 3), "must divide the number of classes, 10, got 3"),
        (Pathological(5, 11), "at most the number of classes, 10, got 11"),
        (Pathological(20, 3, "ring"), "class 0 needs 60 samples, 10 per client, but has 20"),
        (Pathological(100, 2), "no sample of one of its 2 classes"),
    ],
)
def test_pathological_refusals(partitioner, message):
    with pytest.raises(PartitionError, match=message):
        partitioner(balanced(20), Key(0))


def test_pathological_options():
    with pytest.raises(PartitionError, match="disjoint, ring"):
        Pathological(2, layout="star")
    with pytest.raises(PartitionError, match="classes_per_client: must be >= 1, got 0"):
        Pathological(2, 0)


def owned(sizes: list[tuple[int, int]]) -> Pool:
    rows = torch.arange(sum(map(sum, sizes)))
    pieces = iter(torch.split(rows, [size for pair in sizes for size in pair]))
    owners = {f"owner {i}": (next(pieces), next(pieces)) for i in range(len(sizes))}
    train, test = (torch.cat([pair[part] for pair in owners.values()]) for part in (0, 1))
    return Pool(torch.zeros(len(rows), dtype=torch.int64), train, test, owners)


def test_natural_takes_all_or_some_owners():
    pool = owned([(10, 2)] * 8)
    assert list(Natural()(pool, Key(0))) == list(pool.owners)
    some = Natural(clients=3)(pool, Key(0))
    assert len(some) == 3
    assert all(some[owner] is pool.owners[owner] for owner in some)
    assert len({tuple(Natural(clients=3)(pool, Key(seed))) for seed in range(6)}) > 1
    assert len(Natural(fraction=0.25)(pool, Key(0))) == 2
    assert len(Natural(fraction=0.26)(pool, Key(0))) == 3
    assert len(Natural(fraction=1.0)(pool, Key(0))) == 8


def test_natural_takes_the_owners_that_are_named():
    pool = owned([(10, 2), (10, 2), (1, 2), (10, 2)])
    names = list(pool.owners)
    for seed in range(3):
        assert list(Natural(owners=(names[3], names[0]))(pool, Key(seed))) == [names[0], names[3]]
    with pytest.raises(PartitionError, match="unknown owner 'nobody'"):
        Natural(owners=("nobody",))(pool, Key(0))
    with pytest.raises(PartitionError, match=f"'{names[2]}' has fewer than 2 training samples"):
        Natural(owners=(names[2],))(pool, Key(0))
    for wrong in (
        {"owners": ()},
        {"owners": ("a", "a")},
        {"owners": ("a",), "clients": 1},
        {"owners": ("a",), "fraction": 0.5},
    ):
        with pytest.raises(PartitionError, match="owners"):
            Natural(**wrong)


def test_natural_leaves_small_owners_out():
    pool = owned([(10, 2), (4, 2), (10, 0), (1, 1)])
    assert list(Natural(min_samples=5)(pool, Key(0))) == ["owner 0"]
    assert list(Natural()(pool, Key(0))) == ["owner 0", "owner 1"]
    assert len(Natural(min_samples=1)(owned([(1, 0), (5, 0)]), Key(0))) == 2
    with pytest.raises(PartitionError, match="3 clients are required, but only 2 of 4 owners"):
        Natural(clients=3)(pool, Key(0))
    with pytest.raises(PartitionError, match="only 0"):
        Natural(min_samples=100)(pool, Key(0))


def test_natural_refusals():
    with pytest.raises(PartitionError, match="iid, dirichlet, shards, pathological"):
        Natural()(balanced(2), Key(0))
    with pytest.raises(PartitionError, match="not both"):
        Natural(clients=2, fraction=0.5)
    with pytest.raises(PartitionError, match="fraction: must be > 0"):
        Natural(fraction=0.0)


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def partition():
    clients = {"zoë/1": Parts(rows(4, 2), rows(1), rows(7)), "b": Parts(rows(5), rows(5), rows())}
    return Partition(clients, unlabeled=rows(0, 3), public=rows(6))


def test_partition_survives_a_file(tmp_path, partition):
    path = tmp_path / "deep" / "partition.safetensors"
    partition.save(path)
    loaded = Partition.load(path)
    assert loaded.digest() == partition.digest()
    assert list(loaded.clients) == list(partition.clients)
    assert torch.equal(loaded.clients["zoë/1"].train, rows(4, 2))
    assert [path.name for path in path.parent.iterdir()] == ["partition.safetensors"]


def test_digest_is_stable_and_tells_partitions_apart(partition):
    assert partition.digest() == "76816da62de934429fa8bd2926b7bbfa"
    swapped = Partition(dict(reversed(partition.clients.items())), partition.unlabeled, partition.public)
    moved = Partition(partition.clients, rows(0), rows(3, 6))
    assert len({partition.digest(), swapped.digest(), moved.digest()}) == 3


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damaged_partition_files_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    Partition({"a": Parts(rows(1, 2), rows(3), rows(4))}).save(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        loaded = Partition.load(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert len(loaded.clients) == 1


def test_counts(partition):
    labels = rows(0, 1, 2, 0, 1, 2, 0, 1)
    assert partition.counts(labels, 4).tolist() == [[0, 3, 1, 0], [0, 0, 1, 0]]
    assert Partition({}).counts(labels, 4).shape == (0, 4)


def test_table_of_few_classes(partition):
    labels, classes = rows(0, 1, 2, 0, 1, 2, 0, 1), ("cat", "[dog]", "\n", "eel")
    (header, lines), caption = partition.table(labels, classes)
    assert header == ["client", "train", "val", "test", "cat", "[dog]", r"'\n'", "eel"]
    assert "zoë/1" in [line[0] for line in lines]
    assert caption == "2 clients, 2 unlabeled, 1 public"
    counts = partition.counts(labels, len(classes))
    assert [line[4:] for line in lines[:-1]] == [[str(n) if n else "·" for n in row] for row in counts.tolist()]
    assert lines[-1][4:] == [str(n) if n else "·" for n in counts.sum(0).tolist()]


def test_table_of_many_classes(partition):
    (header, lines), _ = partition.table(rows(0, 1, 2, 0, 1, 2, 0, 1), tuple(f"c{i}" for i in range(62)), first=1)
    assert header[-2:] == ["classes", "most frequent"]
    assert any("c1:3  c2:1" in line[-1] for line in lines)
    assert [line[0] for line in lines][1:] == ["... 1 more", "all"]
