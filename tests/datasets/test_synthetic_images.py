import pytest
import torch

from fedme.datasets import DataError
from fedme.datasets.synthetic_images import Images


def test_every_client_has_its_share_and_a_seed_decides_everything(tmp_path):
    made = Images(users=7, samples=5, side=6, classes=3).load(tmp_path)
    assert [len(rows) for rows, _ in made.owners.values()] == [5] * 7
    assert torch.equal(torch.cat([rows for rows, _ in made.owners.values()]), torch.arange(35))
    x = made.source.inputs(torch.arange(35))
    assert x.shape == (35, 1, 6, 6)
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    again, other = Images(7, 5, 6, 3).load(tmp_path), Images(7, 5, 6, 3, seed=1).load(tmp_path)
    assert torch.equal(again.source.x, made.source.x)
    assert not torch.equal(other.source.x, made.source.x)


def test_classes_can_be_told_apart(tmp_path):
    made = Images(users=1, samples=200, side=10, classes=4).load(tmp_path)
    x, y = made.source.inputs(torch.arange(200)).flatten(1), made.source.labels
    centres = torch.stack([x[y == c].mean(0) for c in range(4)])
    assert (torch.cdist(x, centres).argmin(1) == y).double().mean() > 0.95


@pytest.mark.parametrize("name", ["users", "samples", "side", "classes"])
def test_impossible_options_are_refused(name):
    with pytest.raises(DataError, match=name):
        Images(**{name: 0})


def test_more_samples_than_the_memory_holds_are_refused_before_they_are_made(tmp_path):
    with pytest.raises(DataError, match="users: 1000000000 makes 40,000,000,000 samples"):
        Images(users=1_000_000_000).load(tmp_path)
