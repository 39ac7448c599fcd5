"""Splits are lists of rows; inputs are gathered, augmented and scaled in the right order."""

import pytest
import torch

from fedme.core.data import Arrays, CropFlip, Scaling, Split, join
from fedme.core.key import Key


@pytest.fixture
def source():
    return Arrays(torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3)


def test_a_split_is_rows_of_its_source(source):
    part = Split(source, torch.tensor([7, 0, 7]))
    assert len(part) == 3
    assert part.y.tolist() == [1, 0, 1]
    assert part.inputs().tolist() == [[14.0, 15.0], [0.0, 1.0], [14.0, 15.0]]
    assert part.inputs(torch.tensor([1])).tolist() == [[0.0, 1.0]]
    assert len(part.take(torch.tensor([], dtype=torch.int64))) == 0


def test_take_counts_within_the_split_and_keeps_targets_beside_their_samples(source):
    part = Split(source, torch.tensor([9, 4, 2, 5]))
    again = part.take(torch.tensor([3, 1]))
    assert again.rows.tolist() == [5, 4]
    assert again.y.tolist() == [2, 1]
    other = part.labelled(torch.tensor([10, 11, 12, 13]))
    assert other.y.tolist() == [10, 11, 12, 13]
    assert other.take(torch.tensor([3, 1])).y.tolist() == [13, 11]
    assert other.take(torch.tensor([3, 1])).inputs().tolist() == again.inputs().tolist()
    assert part.y.tolist() == [0, 1, 2, 2]  # as it was
    assert part.targets is None


def test_targets_may_be_rows_of_numbers(source):
    consensus = torch.rand(4, 6)
    part = Split(source, torch.tensor([9, 4, 2, 5])).labelled(consensus)
    assert torch.equal(part.y, consensus)
    assert torch.equal(part.take(torch.tensor([2])).y, consensus[[2]])


def test_join_puts_splits_of_one_source_one_after_another(source):
    a, b = Split(source, torch.tensor([3, 1])), Split(source, torch.tensor([8]))
    whole = join([a, b, Split(source, torch.tensor([], dtype=torch.int64))])
    assert whole.source is source
    assert whole.rows.tolist() == [3, 1, 8]
    assert whole.y.tolist() == [0, 1, 2]
    twin = Arrays(source.x, source.labels)
    with pytest.raises(ValueError, match="one source"):
        join([a, Split(twin, torch.tensor([0]))])
    with pytest.raises(ValueError, match="its own labels"):
        join([a, b.labelled(torch.tensor([0]))])


def test_scaling_is_factor_then_mean_then_std():
    raw = torch.tensor([[[0, 51]], [[102, 255]]], dtype=torch.uint8)[None]  # one sample of two channels
    scaling = Scaling(1 / 255, torch.tensor([0.5, 0.1]).reshape(2, 1, 1), torch.tensor([0.25, 2.0]).reshape(2, 1, 1))
    expected = [[[[-2.0, -1.2]], [[0.15, 0.45]]]]
    assert torch.allclose(scaling(raw), torch.tensor(expected))
    assert scaling(raw).dtype == torch.float32
    assert Scaling()(raw).tolist() == raw.tolist()
    assert Scaling(2.0)(torch.tensor([200], dtype=torch.uint8)).tolist() == [400.0]  # not in eight bits


def slow(x, key, padding, flip):
    """One image and one pixel at a time, with the draws as documented: top, left, mirrored."""
    count, channels, height, width = x.shape
    draw = key.torch()
    top = torch.randint(0, 2 * padding + 1, (count, 1), generator=draw)[:, 0].tolist()
    left = torch.randint(0, 2 * padding + 1, (count, 1), generator=draw)[:, 0].tolist()
    mirrored = (torch.rand((count, 1), generator=draw)[:, 0] < 0.5).tolist()
    result = torch.zeros_like(x)
    for i in range(count):
        for c in range(channels):
            for row in range(height):
                for column in range(width):
                    r, k = row + top[i] - padding, column + left[i] - padding
                    value = x[i, c, r, k] if 0 <= r < height and 0 <= k < width else 0
                    result[i, c, row, width - 1 - column if flip and mirrored[i] else column] = value
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("padding", "flip"), [(2, True), (1, False), (0, True)])
def test_crop_and_flip_agree_with_a_slow_loop(padding, flip, dtype):
    x = torch.randint(1, 256, (9, 2, 4, 6), generator=Key(1).torch()).to(dtype)
    key = Key(5).at("augment", 3)
    changed = CropFlip(padding, flip)(x, key)
    assert changed.shape == x.shape
    assert changed.dtype == dtype
    assert torch.equal(changed, slow(x, key, padding, flip))
    assert torch.equal(changed, CropFlip(padding, flip)(x, key))
    assert not torch.equal(changed, CropFlip(padding, flip)(x, Key(6))) or (padding, flip) == (0, False)


def test_crops_and_flips_are_evenly_spread():
    x = torch.zeros(2000, 1, 3, 3)
    x[:, :, 1, 0] = 1.0  # a dot that shows both where the crop was and whether it was mirrored
    changed = CropFlip(1)(x, Key(0))[:, 0]
    rows = changed.sum(2)[changed.sum((1, 2)) > 0].mean(0)
    assert rows.tolist() == pytest.approx([1 / 3] * 3, abs=0.04)
    whole = CropFlip(0)(x, Key(0))[:, 0, 1]
    assert whole.mean(0).tolist() == pytest.approx([0.5, 0.0, 0.5], abs=0.04)
    unmoved = CropFlip(0, flip=False)(x, Key(0))
    assert torch.equal(unmoved, x)


def test_images_are_changed_before_they_are_scaled_and_only_when_asked():
    x = torch.full((30, 1, 4, 4), 200, dtype=torch.uint8)
    source = Arrays(x, torch.zeros(30, dtype=torch.int64), Scaling(1 / 200, torch.tensor(0.5)), CropFlip(2))
    part = Split(source, torch.arange(30))
    assert part.inputs().unique().tolist() == [0.5]
    assert part.inputs(augment=Key(0)).unique().tolist() == [-0.5, 0.5]  # padding is black: (0 - mean), not the mean
    plain = Split(Arrays(x, source.labels, source.scaling), torch.arange(30))
    assert torch.equal(plain.inputs(augment=Key(0)), part.inputs())


def test_inputs_may_be_a_dictionary():
    source = Arrays({"left": torch.arange(6), "right": torch.arange(12).reshape(6, 2)}, torch.arange(6))
    part = Split(source, torch.tensor([4, 2]))
    assert {name: value.tolist() for name, value in part.inputs(torch.tensor([1]), Key(0)).items()} == {
        "left": [2],
        "right": [[4, 5]],
    }
    assert part.inputs()["right"].tolist() == [[8, 9], [4, 5]]
    assert len(part) == 2
