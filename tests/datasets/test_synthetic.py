import numpy as np
import pytest
import torch

from fedme.datasets import DataError
from fedme.datasets.synthetic import Synthetic


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Synthetic().load(tmp_path_factory.mktemp("unused"))


def test_sizes_are_those_of_the_pfedme_generator(dataset):
    sizes = torch.tensor([len(rows) for rows, _ in dataset.owners.values()])
    assert list(dataset.owners) == [str(user) for user in range(100)]
    assert (int(sizes.sum()), int(sizes.min()), int(sizes.max())) == (205_795, 250, 25_810)
    assert float(sizes.double().quantile(0.5)) == 577.5
    assert int(sizes[0]) == 9545


def test_labels_are_those_of_the_pfedme_generator(dataset):
    expected = [20440, 15477, 13612, 7703, 17542, 21572, 9409, 48331, 32221, 19488]
    assert torch.bincount(dataset.source.labels).tolist() == expected
    first = dataset.source.labels[dataset.owners["0"][0]]
    assert torch.bincount(first, minlength=10).tolist() == [9352, 187, 0, 0, 0, 0, 6, 0, 0, 0]


def test_inputs_are_those_of_the_pfedme_generator(dataset):
    assert float(dataset.source.x.double().sum()) == pytest.approx(-931087.705, abs=0.05)  # float32 in memory
    assert dataset.source.x.dtype == torch.float32
    assert dataset.source.inputs(torch.tensor([3, 5])).shape == (2, 60)


def test_draws_are_those_of_a_loop_with_multivariate_normal(tmp_path):
    made = Synthetic(users=3, alpha=1.0, beta=0.0, seed=7).load(tmp_path)
    draw = np.random.RandomState(7)
    sizes = 5 * (draw.lognormal(4, 2, 3).astype(int) + 50)
    u, b = draw.normal(0, 1.0, 3), draw.normal(0, 0.0, 3)
    v = [draw.normal(b[i], 1, 60) for i in range(3)]
    covariance = np.diag([(j + 1) ** -1.2 for j in range(60)])
    for i in range(3):
        w, c = draw.normal(u[i], 1, (60, 10)), draw.normal(u[i], 1, 10)
        x = draw.multivariate_normal(v[i], covariance, sizes[i])
        rows, test = made.owners[str(i)]
        assert len(rows) == sizes[i]
        assert len(test) == 0
        np.testing.assert_allclose(made.source.x[rows], x, rtol=1e-5, atol=1e-5)
        assert made.source.labels[rows].tolist() == (x @ w + c).argmax(1).tolist()


@pytest.mark.parametrize("options", [{"users": 0}, {"alpha": -1.0}, {"beta": float("nan")}, {"seed": -1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(DataError, match=next(iter(options))):
        Synthetic(**options)


def test_clients_can_be_cut_to_a_number_of_samples(tmp_path):
    made = Synthetic(users=500, samples=30).load(tmp_path)
    assert [len(rows) for rows, _ in made.owners.values()] == [30] * 500
    assert len(made.source.labels) == 15_000


def test_more_samples_than_the_memory_holds_are_refused_before_they_are_made(tmp_path):
    with pytest.raises(DataError, match=r"^users: 5000000 makes [\d,]+ samples, which take [\d,.]+ GB, .*; set data.samples"):
        Synthetic(users=5_000_000).load(tmp_path)
