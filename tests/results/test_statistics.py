"""Our statistics against those of scipy and statsmodels, and their errors in simulations."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import optimize, stats as reference

from fedme.core.key import Key
from fedme.results.statistics import (
    Gain,
    accuracy_gain,
    auroc_gain,
    bootstrap,
    cluster_bootstrap,
    compare,
    equivalent,
    holm,
    mean_gain,
    over_clients,
    paired,
    pairs_needed,
    power,
    proportion,
    refits,
    rmse_gain,
    same_samples,
    share_gain,
    smaller_deviation,
)
from fedme.results.summary import spread

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=10)


@given(numbers)
def test_mean_and_deviation(values):
    mean, std = spread(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


def test_deviation_against_scipy():
    values = [76.5, 78.25, 74.0]
    assert spread(values) == pytest.approx((reference.tmean(values), reference.tstd(values)))


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=10))
def test_paired_comparison(pairs):
    left, right = ([pair[i] for pair in pairs] for i in (0, 1))
    found = paired(dict(enumerate(left)), dict(enumerate(right)))
    if np.std(np.subtract(left, right)) < 1e-6:
        return  # scipy divides by zero there
    expected = reference.ttest_rel(left, right)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(left) - np.mean(right), abs=1e-9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-6)


@given(st.integers(1, 500).flatmap(lambda samples: st.tuples(st.integers(0, samples), st.just(samples))))
def test_interval_of_an_accuracy_against_scipy(counts):
    correct, samples = counts
    expected = reference.binomtest(correct, samples).proportion_ci(0.95, method="wilson")
    assert proportion(correct, samples) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_only_shared_seeds_are_compared():
    found = paired({0: 5.0, 1: 7.0, 2: 100.0}, {0: 4.0, 1: 4.0, 3: 0.0})
    assert found.differences == (1.0, 3.0)
    assert found.count == 2
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_interval():
    one = compare([2.0])
    assert (one.mean, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert math.isnan(one.p)


def test_equal_differences():
    assert compare([0.0, 0.0]).p == 1.0
    same = compare([1.0, 1.0, 1.0])
    assert (same.low, same.high, same.p) == (1.0, 1.0, 0.0)


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12), st.floats(0.1, 5))
def test_equivalence(values, margin):
    if np.std(values) < 1e-6:
        return
    reference_tests = pytest.importorskip("statsmodels.stats.weightstats")
    expected = reference_tests.DescrStatsW(values).ttost_mean(-margin, margin)[0]
    assert equivalent(values, margin) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_equivalence_of_equal_differences():
    assert equivalent([0.1, 0.1, 0.1], 0.2) == 0.0
    assert equivalent([0.3, 0.3, 0.3], 0.2) == 1.0
    assert math.isnan(equivalent([0.1], 0.2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm(values):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    assert holm(values) == pytest.approx(multitest.multipletests(values, method="holm")[1].tolist())


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60)


@given(outcomes)
def test_accuracy_gain_is_mcnemars_test(pairs):
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    right, other = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    gain = accuracy_gain(right, other)
    wins, losses = int((right & ~other).sum()), int((~right & other).sum())
    assert gain.gain == pytest.approx(right.mean() - other.mean())
    assert gain.low <= gain.gain <= gain.high
    if wins + losses:
        expected = tables.mcnemar([[0, wins], [losses, 0]], exact=False, correction=False).pvalue
        assert gain.p == pytest.approx(expected, rel=1e-9)
    if abs(gain.p - 0.05) > 1e-9:  # the interval and the test say the same
        assert (gain.direction != 0) == (gain.p < 0.05)


@pytest.mark.parametrize(("wins", "losses", "samples"), [(1, 0, 50), (14, 5, 44), (0, 7, 20), (3, 3, 200), (20, 0, 20)])
def test_ends_of_the_accuracy_interval(wins, losses, samples):
    """At both ends of the interval, the score statistic of the most likely shares is the quantile; found by search here."""
    gain = accuracy_gain(np.arange(samples) < wins, (np.arange(samples) >= wins) & (np.arange(samples) < wins + losses))
    for end, sign in ((gain.low, 1), (gain.high, -1)):
        if abs(end) == 1:
            continue

        def unlikely(share, end=end):
            shares = np.clip([share + end, share, 1 - 2 * share - end], 1e-300, 1)
            return -np.dot([wins, losses, samples - wins - losses], np.log(shares))

        least, most = max(0.0, -end), (1 - end) / 2
        share = optimize.minimize_scalar(unlikely, bounds=(least, most), method="bounded", options={"xatol": 1e-12}).x
        distance = wins - losses - samples * end
        assert distance / math.sqrt(samples * (2 * share + end - end**2)) == pytest.approx(sign * 1.959964, abs=1e-3)


def test_interval_of_equal_answers():
    same = accuracy_gain(np.ones(50, dtype=bool), np.ones(50, dtype=bool))
    assert (same.low, same.high) == pytest.approx((-0.0713, 0.0713), abs=1e-4)  # z^2 / (n + z^2)
    assert same.direction == 0


@given(st.integers(0, 2**32 - 1), st.integers(4, 60), st.booleans())
def test_auroc_gain(seed, samples, tied):
    """Against DeLong's estimate written out over all pairs of a positive and a negative sample."""
    draw = np.random.default_rng(seed)
    labels = np.arange(samples) % 2
    ours, theirs = (draw.normal(size=samples) + labels for _ in range(2))
    if tied:
        ours, theirs = ours.round(), theirs.round()
    gain = auroc_gain(np.stack((-ours, ours), 1), np.stack((-theirs, theirs), 1), labels)
    placed = []
    for score in (ours, theirs):
        up, down = score[labels == 1], score[labels == 0]
        placed.append((up[:, None] > down) + 0.5 * (up[:, None] == down))
    areas = [psi.mean() for psi in placed]
    up = np.cov(np.stack([psi.mean(1) for psi in placed]))
    down = np.cov(np.stack([psi.mean(0) for psi in placed]))
    together = up / (samples // 2) + down / (samples - samples // 2)
    error = math.sqrt(max(together[0, 0] + together[1, 1] - 2 * together[0, 1], 0.0))
    if gain is None:
        assert error < 1e-7
        return
    assert gain.gain == pytest.approx(areas[0] - areas[1], abs=1e-12)
    assert gain.high == pytest.approx(min(1.0, gain.gain + 1.959964 * error), rel=1e-5, abs=1e-6)
    assert gain.low == pytest.approx(max(-1.0, gain.gain - 1.959964 * error), rel=1e-5, abs=1e-6)


def test_auroc_of_one_class_or_one_sample_of_a_class_has_no_interval():
    scores = np.eye(4)[:, :2]
    assert auroc_gain(scores, scores, np.zeros(4, dtype=int)) is None
    assert auroc_gain(scores, scores, np.array([0, 0, 0, 1])) is None


def test_rmse_gain():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(size=400) ** 2, 4 * draw.normal(size=400) ** 2
    gain = rmse_gain(ours, theirs)
    assert gain.gain == pytest.approx(math.sqrt(theirs.mean()) - math.sqrt(ours.mean()))
    assert gain.direction == 1
    expected = reference.ttest_rel(theirs, ours)
    assert gain.p == pytest.approx(expected.pvalue)
    assert rmse_gain(np.zeros(3), np.zeros(3)).direction == 0


def test_needed_samples_find_the_difference():
    """Of simulations with as many samples as `needed` says, about 80 % find the difference."""
    draw = np.random.default_rng(1)
    first = mean_gain(draw.normal(0.5, 1.0, 4000), np.zeros(4000))
    samples = first.needed
    assert 25 <= samples <= 45
    found = [mean_gain(draw.normal(first.gain, 1.0, samples), np.zeros(samples)).direction == 1 for _ in range(1000)]
    assert 0.75 < np.mean(found) < 0.85
    assert mean_gain(np.zeros(5), np.zeros(5)).needed is None


def simulated(kind, samples, draw):
    """Two models without any difference that often err on the same samples, as models of one task do."""
    hard = draw.normal(size=samples)
    ours, theirs = hard + draw.normal(size=samples), hard + draw.normal(size=samples)
    if kind == "accuracy":
        easy = draw.uniform(-1.5, 0.5)
        return accuracy_gain(ours > easy, theirs > easy)
    if kind == "rmse":
        return rmse_gain(ours**2, theirs**2)
    if kind == "labels":  # five per sample
        hard = draw.normal(size=(samples, 5))
        easy = draw.uniform(-1.5, 0.5)
        right, other = (hard + draw.normal(size=hard.shape) > easy for _ in range(2))
        return share_gain(right.mean(1), other.mean(1))
    labels = draw.permutation(np.arange(samples) % 2)
    ours, theirs = ours + labels, theirs + labels
    return auroc_gain(np.stack((-ours, ours), 1), np.stack((-theirs, theirs), 1), labels)


@pytest.mark.parametrize("samples", [20, 50, 200])
@pytest.mark.parametrize("kind", ["accuracy", "rmse", "auroc", "labels"])
def test_sites_without_a_difference_are_told_so(kind, samples):
    """2,000 federations without any difference: at most 6 % of the sites get another verdict than "cannot tell"."""
    draw = np.random.default_rng(samples)
    sites = 1 if kind == "auroc" else 3
    told = [simulated(kind, samples, draw).direction for _ in range(2000 * sites)]
    assert np.mean(np.array(told) != 0) <= 0.06
    assert np.mean(np.array(told) != 0) >= 0.02  # a test that never finds anything is of no use


@pytest.mark.parametrize("samples", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["accuracy", "rmse", "labels"])
def test_sites_with_a_few_test_samples_get_few_verdicts_by_chance(kind, samples):
    draw = np.random.default_rng(samples)
    told = [simulated(kind, samples, draw).direction != 0 for _ in range(6000)]
    assert np.mean(told) <= 0.06


def test_equal_differences_of_a_few_samples_are_not_certain():
    two, many = (share_gain(np.full(n, 0.75), np.full(n, 0.5)) for n in (2, 200))
    assert two.gain == many.gain == 0.25
    assert (two.direction, many.direction) == (0, 1)
    assert share_gain(np.full(2, 0.5), np.full(2, 0.75)).high == pytest.approx(-two.low)
    none = share_gain(np.full(3, 0.5), np.full(3, 0.5))
    assert (none.gain, none.p) == (0.0, 1.0)
    assert not none.within(0.05)  # three equal samples do not exclude a difference
    assert share_gain(np.full(2000, 0.5), np.full(2000, 0.5)).within(0.05)
    draw = np.random.default_rng(3)
    share, other = draw.random(30), draw.random(30)
    assert share_gain(share, other) == mean_gain(share, other)


def test_bootstrap_covers_the_mean_over_clients_and_seeds():
    draw = np.random.default_rng(2)
    inside = []
    for i in range(400):
        clients, seeds = draw.normal(0, 1, (20, 1)), draw.normal(0, 0.3, (1, 5))
        values = 0.7 + clients + seeds + draw.normal(0, 0.5, (20, 5))
        mean, low, high = bootstrap(values, Key(i), 500)
        assert mean == pytest.approx(values.mean())
        inside.append(low <= 0.7 <= high)
    assert 0.92 <= np.mean(inside) <= 0.985
    assert bootstrap(np.ones((1, 3)), Key(0)) == (1.0, -math.inf, math.inf)


def test_the_interval_over_few_clients_is_wider_than_their_range():
    draw = np.random.default_rng(5)
    for count in (2, 3, 5):
        drawn = draw.normal(0.3, 1, (400, count))
        intervals = [over_clients([Gain(100, g, g, g, 1.0) for g in gains], Key(0)) for gains in drawn]
        assert 0.92 <= np.mean([low <= 0.3 <= high for _, low, high in intervals]) <= 0.98
    equal = [Gain(15, 0.0, -0.2, 0.2, 1.0)] * 2  # two clients without a gain, on few samples
    assert over_clients(equal, Key(0)) == (0.0, pytest.approx(-0.141, abs=1e-3), pytest.approx(0.141, abs=1e-3))
    assert over_clients(equal[:1], Key(0)) == (0.0, -math.inf, math.inf)
    assert math.isnan(over_clients([], Key(0))[0])


def test_bootstrap_agrees_with_scipy():
    values = np.random.default_rng(3).normal(size=(200, 1))
    _, low, high = bootstrap(values, Key(0), 20000)
    expected = reference.bootstrap((values[:, 0],), np.mean, method="percentile", n_resamples=20000, rng=1).confidence_interval
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.01)


def test_refits_of_the_same_samples_are_not_independent():
    """Repeated random splits: the interval of independent gains is wrong far too often, the corrected one is not."""
    draw = np.random.default_rng(4)
    told, naive = [], []
    for _ in range(4000):
        x = draw.normal(size=(80, 2))  # of two models without any difference, the error on every sample
        gains = []
        for _ in range(5):
            part = draw.permutation(80)[:20]
            gains.append(float((x[part, 0] - x[part, 1]).mean()))
        told.append(refits(gains, 20 / 60).p < 0.05)
        floor = refits(gains, 20 / 60, 0.5)
        assert floor.high - floor.mean >= 1.959 * 0.5
        assert (floor.p < 0.05) == (floor.low > 0 or floor.high < 0)
        naive.append(compare(gains).p < 0.05)
    assert np.mean(told) <= 0.06
    assert np.mean(naive) > 0.12


def test_repeated_trainings_on_the_same_test_samples():
    """Samples and trainings both vary; to test on the same samples again does not tell more about the samples."""
    draw = np.random.default_rng(5)
    told, naive = [], []
    for _ in range(2000):
        sample = draw.normal(size=(60, 1))
        gains = [mean_gain((sample[:, 0] + draw.normal(0, 0.3) + 0.5 * draw.normal(size=60)), np.zeros(60)) for _ in range(5)]
        told.append(same_samples(gains).p < 0.05)
        naive.append(compare([gain.gain for gain in gains]).p < 0.05)
    assert np.mean(told) <= 0.06
    assert np.mean(naive) > 0.1
    assert same_samples([mean_gain(np.ones(4), np.zeros(4))]).low == 1.0


def test_auroc_without_variance_has_no_interval():
    """Two models that separate all samples, or one that does and one that is always wrong: no certainty from six samples."""
    y = np.array([0, 0, 0, 1, 1, 1])
    perfect = np.stack((1.0 - y, y.astype(float)), 1)
    assert auroc_gain(perfect, perfect, y) is None
    assert auroc_gain(1 - perfect, perfect, y) is None
    noisy = perfect.copy()
    noisy[0] = noisy[0, ::-1]
    gain = auroc_gain(1 - perfect, noisy, y)
    assert gain is not None
    assert -1.0 <= gain.low <= gain.gain <= gain.high <= 1.0


def test_power_and_needed_pairs_agree_with_statsmodels():
    solver = pytest.importorskip("statsmodels.stats.power").TTestPower()
    for difference, std, pairs in ((1.0, 2.0, 10), (0.5, 0.3, 5), (2.0, 4.0, 30)):
        two_sided = solver.power(difference / std, pairs, 0.05, alternative="two-sided")
        assert power(difference, std, pairs) + power(-difference, std, pairs) == pytest.approx(two_sided, abs=1e-6)
    needed = pairs_needed(1.0, 2.0)
    assert power(1.0, 2.0, needed) >= 0.8 > power(1.0, 2.0, needed - 1)
    assert needed == math.ceil(solver.solve_power(0.5, power=0.8, alpha=0.05))
    assert pairs_needed(1.0, 2.0, level=0.999) > needed
    assert pairs_needed(0.001, 10.0, most=100) is None
    assert power(1.0, 1.0, 1) == 0
    assert (power(1.0, 0.0, 5), power(-1.0, 0.0, 5)) == (1, 0)


def test_clusters_and_their_members_are_resampled():
    draw = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        centres = draw.normal(1.0, 2.0, 12)  # clusters differ by 2, members of a cluster by 3
        clusters = [draw.normal(centre, 3.0, 8) for centre in centres]
        mean, low, high = cluster_bootstrap(clusters, [np.ones(8)] * 12, Key(trial), 500)
        assert mean == pytest.approx(np.mean(clusters))
        covered += low <= 1.0 <= high
    assert 0.93 <= covered / 200 <= 1.0  # somewhat wide: the members of few clusters are drawn twice


def test_weights_of_members_count():
    values, weights = [np.array([0.0, 10.0])] * 3, [np.array([3.0, 1.0])] * 3
    mean, low, high = cluster_bootstrap(values, weights, Key(0))
    assert mean == 2.5
    assert low < 2.5 < high


def test_one_cluster_has_no_interval():
    assert cluster_bootstrap([np.array([1.0, 3.0])], [np.ones(2)], Key(0)) == (2.0, -math.inf, math.inf)


def test_deviations_of_pairs():
    draw = np.random.default_rng(1)
    base = draw.normal(0, 1, 200)
    calm, wild = base + draw.normal(0, 0.1, 200), 2 * base + draw.normal(0, 0.1, 200)
    assert smaller_deviation(calm, wild) < 1e-10
    assert smaller_deviation(wild, calm) > 0.99
    assert smaller_deviation([1.0, 2.0], [1.0, 3.0]) == 1.0  # too few
    assert smaller_deviation([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1.0
    rates = [smaller_deviation(draw.normal(0, 1, 8), draw.normal(0, 1, 8)) < 0.05 for _ in range(2000)]
    assert 0.035 < sum(rates) / 2000 < 0.065  # false alarms
