"""How a client goes through its data, and how pieces of work run side by side."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import (
    BatchSchedule,
    Evaluate,
    Predict,
    Train,
    evaluate,
    evaluate_each,
    immediately,
    in_parallel,
    predict,
    train,
)
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_support import LINEAR, split

KEY = Key(3).at("batches")


def lists(batches):
    return [batch.tolist() for batch in batches]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(1, 35), st.integers(1, 4), st.booleans())
def test_whole_epochs_see_every_sample_once_each(samples, batch, epochs, shuffle):
    batches = lists(BatchSchedule(epochs, batch, shuffle=shuffle).batches(samples, KEY))
    per_epoch = -(-samples // batch)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain(*part)) == list(range(samples))
        assert all(len(each) == batch for each in part[:-1])  # only the last one may be small


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 12))
def test_a_number_of_steps_is_the_beginning_of_enough_epochs(samples, batch, steps):
    some = lists(BatchSchedule(1, batch, steps).batches(samples, KEY))
    many = lists(BatchSchedule(20, batch).batches(samples, KEY))
    assert len(some) == steps
    assert some == many[:steps]


def test_epochs_are_in_different_orders_and_keys_decide():
    first, second = lists(BatchSchedule(2, 50).batches(40, KEY))
    assert first != second
    assert first != sorted(first)
    assert lists(BatchSchedule(2, 50).batches(40, KEY)) == [first, second]
    assert lists(BatchSchedule(2, 50).batches(40, Key(4)))[0] != first


def test_the_order_does_not_depend_on_the_batch_size():
    small, large = lists(BatchSchedule(1, 3).batches(10, KEY)), lists(BatchSchedule(1, 10).batches(10, KEY))
    assert list(chain(*small)) == large[0]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (BatchSchedule(1, 2, shuffle=False), [[0, 1], [2, 3], [4]]),
        (BatchSchedule(2, 2, shuffle=False), [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]),
        (BatchSchedule(1, 2, steps=2, shuffle=False), [[0, 1], [2, 3]]),
        (BatchSchedule(1, 2, steps=2, shuffle=False, offset=2), [[4], [0, 1]]),
        (BatchSchedule(1, 2, steps=4, shuffle=False, offset=7), [[2, 3], [4], [0, 1], [2, 3]]),
        (BatchSchedule(1, 9, steps=2, shuffle=False, offset=5), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        (BatchSchedule(1, 2, steps=0, shuffle=False), []),
    ],
)
def test_without_shuffling_the_order_of_the_data_wraps_around(local, expected):
    assert lists(local.batches(5, KEY)) == expected


def test_steps_go_on_over_the_rounds_where_the_last_one_stopped():
    rounds = [lists(BatchSchedule(1, 2, steps=4, shuffle=False, offset=4 * t).batches(5, KEY)) for t in range(3)]
    assert list(chain(*rounds)) == [[0, 1], [2, 3], [4]] * 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_tiny_and_missing_data(shuffle):
    assert lists(BatchSchedule(3, 20, shuffle=shuffle).batches(1, KEY)) == [[0]] * 3
    assert lists(BatchSchedule(1, 20, 2, shuffle).batches(1, KEY)) == [[0]] * 2
    assert BatchSchedule(3, 20, shuffle=shuffle).batches(0, KEY) == []
    assert BatchSchedule(3, 20, 5, shuffle).batches(0, KEY) == []


LAST = ("keep", "drop", "scale")


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, 40), st.integers(1, 25), st.integers(1, 4), st.booleans(), st.none() | st.integers(0, 9), st.integers(0, 7)
)
def test_drop_leaves_out_the_incomplete_batches_of_keep_and_scale_leaves_out_none(
    samples, batch, epochs, shuffle, steps, offset
):
    kept, dropped, scaled = (BatchSchedule(epochs, batch, None, shuffle, last_batch=last) for last in LAST)
    everything = lists(kept.batches(samples, KEY))
    assert lists(scaled.batches(samples, KEY)) == everything
    whole = [each for each in everything if len(each) == batch or samples < batch]
    assert lists(dropped.batches(samples, KEY)) == whole
    for schedule in (kept, dropped, scaled):
        positions, sizes = schedule.positions(samples, KEY)
        assert len(positions) == len(sizes) == schedule.count(samples)
        some = replace(schedule, steps=steps, offset=offset)
        assert len(some.batches(samples, KEY)) == some.count(samples)


@pytest.mark.parametrize(
    ("samples", "keep", "drop", "scale"),
    [
        (7, [1, 1, 1, 1], [1, 1], [1, 3 / 4, 1, 3 / 4]),
        (8, [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]),
        (3, [1, 1], [1, 1], [1, 1]),  # the only batch of a client is neither dropped nor scaled
        (4, [1, 1], [1, 1], [1, 1]),
        (0, [], [], []),
    ],
)
def test_the_weight_of_a_batch_in_the_loss(samples, keep, drop, scale):
    for last, expected in zip(LAST, (keep, drop, scale), strict=True):
        schedule = BatchSchedule(2, 4, last_batch=last)
        _, sizes = schedule.positions(samples, KEY)
        weights = sizes.double() / schedule.divisors(samples, sizes)
        assert weights.tolist() == expected
        assert schedule.scales(samples) == any(weight != 1 for weight in expected)


def test_without_shuffling_dropped_samples_stay_dropped_and_rounds_go_on():
    rounds = [
        lists(BatchSchedule(1, 2, steps=3, shuffle=False, offset=3 * t, last_batch="drop").batches(5, KEY)) for t in range(2)
    ]
    assert rounds == [[[0, 1], [2, 3], [0, 1]], [[2, 3], [0, 1], [2, 3]]]


@pytest.mark.parametrize("last", LAST)
def test_poisson_sampling_has_no_last_batch(last):
    schedule, keep = BatchSchedule(2, 4, poisson=True, last_batch=last), BatchSchedule(2, 4, poisson=True)
    for samples in (3, 4, 7, 8):
        assert schedule.count(samples) == keep.count(samples) == 2 * -(-samples // 4)
        assert schedule.rate(samples) == keep.rate(samples)
        assert lists(schedule.batches(samples, KEY)) == lists(keep.batches(samples, KEY))
        _, sizes = schedule.positions(samples, KEY)
        assert schedule.divisors(samples, sizes).tolist() == [min(4, samples)] * len(sizes)
        assert not schedule.scales(samples)


# Work that runs side by side. Operations are stood in for by text; whoever drives them answers with the text in capitals.


def work(name, count):
    heard = []
    for i in range(count):
        answer = yield (f"{name}{i}",)
        heard.extend(answer)
    return name, heard


def run(steps):
    """Drive to the end: the result and every tuple of operations that was handed over."""
    handed = []
    try:
        operations = next(steps)
        while True:
            handed.append(operations)
            operations = steps.send([text.upper() for text in operations])
    except StopIteration as done:
        return done.value, handed


def test_together_hands_over_what_all_wait_for_and_gives_answers_back_in_order():
    results, handed = run(in_parallel([work("a", 2), work("b", 3), work("c", 1)]))
    assert handed == [("a0", "b0", "c0"), ("a1", "b1"), ("b2",)]
    assert results == [("a", ["A0", "A1"]), ("b", ["B0", "B1", "B2"]), ("c", ["C0"])]


def test_together_keeps_the_order_of_the_work_not_of_its_end():
    results, handed = run(in_parallel([work("a", 3), work("b", 0), work("c", 1)]))
    assert [name for name, _ in results] == ["a", "b", "c"]
    assert handed == [("a0", "c0"), ("a1",), ("a2",)]


def test_together_of_nothing_and_of_work_without_operations():
    assert run(in_parallel([])) == ([], [])
    assert run(in_parallel([immediately(1), immediately(2)])) == ([1, 2], [])
    assert run(immediately("x")) == ("x", [])


def test_together_within_together():
    def pair(name):
        inner = yield from in_parallel([work(name + "x", 1), work(name + "y", 2)])
        after = yield from work(name + "z", 1)
        return [*inner, after]

    results, handed = run(in_parallel([pair("a"), work("b", 1), pair("c")]))
    assert handed == [("ax0", "ay0", "b0", "cx0", "cy0"), ("ay1", "cy1"), ("az0", "cz0")]
    assert results[1] == ("b", ["B0"])
    for name, result in (("a", results[0]), ("c", results[2])):
        upper = name.upper()
        assert result == [
            (name + "x", [upper + "X0"]),
            (name + "y", [upper + "Y0", upper + "Y1"]),
            (name + "z", [upper + "Z0"]),
        ]


def test_several_operations_at_once_come_back_to_who_asked():
    def greedy(name, count):
        answers = yield tuple(f"{name}{i}" for i in range(count))
        return list(answers)

    results, handed = run(in_parallel([greedy("a", 2), greedy("b", 0), greedy("c", 3)]))
    assert handed == [("a0", "a1", "c0", "c1", "c2")]
    assert results == [["A0", "A1"], [], ["C0", "C1", "C2"]]


def test_an_error_in_one_piece_of_work_comes_out():
    def broken():
        yield ("x",)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run(in_parallel([work("a", 3), broken()]))


def test_the_helpers_hand_over_one_operation_and_return_its_result():
    model, data, local = Model.init(LINEAR, Key(0)), split(4, Key(1)), BatchSchedule()
    optimizer = SGD(CrossEntropy(), 0.1)
    for steps, expected in [
        (evaluate(model, data), Evaluate(model, data)),
        (evaluate(model, data, timed=True), Evaluate(model, data, True)),
        (predict(model, data), Predict(model, data)),
        (
            train({"own": model}, optimizer, data, local, Key(2)),
            Train({"own": model}, optimizer, data, local, Key(2), {}, {}, keep_opt=False),
        ),
        (
            train({"own": model}, optimizer, data, local, Key(2), {"own": {"w": torch.ones(1)}}, {"own": model}),
            Train({"own": model}, optimizer, data, local, Key(2), {"own": {"w": torch.ones(1)}}, {"own": model}),
        ),
    ]:
        (operation,) = next(steps)
        assert repr(operation) == repr(expected)
        with pytest.raises(StopIteration) as done:
            steps.send(["the result"])
        assert done.value.value == "the result"


def test_evaluating_several_models_asks_for_all_at_once():
    models, data = [Model.init(LINEAR, Key(n)) for n in range(3)], split(5, Key(1))
    together, alone = evaluate_each(models, data, True), in_parallel([evaluate(model, data, True) for model in models])
    assert next(together) == next(alone) == tuple(Evaluate(model, data, True) for model in models)
    for asked in (together, alone):
        with pytest.raises(StopIteration) as end:
            asked.send(["a", "b", "c"])
        assert end.value.value == ["a", "b", "c"]
