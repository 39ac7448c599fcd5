"""Verdicts of cells and claims, on numbers made up for the purpose."""

import pytest

from fedme.reproduction import comparison_tables, power_plan
from fedme.reproduction.catalogue import Claim, Column, Result, Row
from fedme.reproduction.claim_verdicts import corrected, of_cell, of_claim
from fedme.reproduction.findings import Findings, client_differences, error, points, value
from fedme.reproduction.measured import Curve, Measured
from fedme.results.statistics import equivalent

RESULT = Result(
    "made-up",
    "a table",
    "nowhere",
    columns=(Column("one", "femnist"),),
    rows=(
        Row("a", "{column}/a", "own", (50.0,), (2.0,)),
        Row("b", "{column}/b", "own", (60.0,), (2.0,)),
        Row("c", "{column}/c", "own", (70.0,), (2.0,)),
        Row("ours", "{column}/d", "own"),
    ),
)


def run(*accuracies, validation=(), samples=0):
    """A run with this client-mean accuracy in % over rounds; pooled is one point less."""
    rounds = tuple(range(0, 10 * len(accuracies), 10))
    means = tuple(a / 100 for a in accuracies)
    curves = {"personal round test": Curve(rounds, means, tuple(mean - 0.01 for mean in means), samples, samples)}
    if validation:
        curves["personal round val"] = Curve(rounds, tuple(v / 100 for v in validation), tuple(v / 100 for v in validation))
    return Measured({}, curves)


def findings(**runs):
    return Findings("full", {f"femnist/{name}": dict(enumerate(seeds)) for name, seeds in runs.items()})


def verdict(cell, **runs):
    return of_cell(RESULT.cells[cell], RESULT, findings(**runs))


def test_cells():
    assert verdict(0, a=[run(51.9)]) == "within the paper's std"
    assert verdict(0, a=[run(40)], b=[run(45)], c=[run(46)]) == "same order"
    assert verdict(0, a=[run(40)], b=[run(39)]) == "differs"
    assert verdict(2, a=[run(40)], c=[run(39)]) == "differs"
    assert verdict(0, a=[run(40)]) == "nothing to compare with"
    assert verdict(0, b=[run(40)]) == ""
    assert verdict(3, d=[run(40)]) == ""


def test_cells_of_a_row_may_be_put_in_order():
    columns = (Column("one", "femnist/a"), Column("two", "femnist/b"))
    rows = (Row("x", "{column}", "own", (50.0, 60.0)), Row("y", "{column}", "PM", (40.0, 30.0)))
    across = Result("made-up", "a table", "nowhere", columns=columns, rows=rows, order="rows")
    found = findings(a=[run(45)], b=[run(55)])
    assert [of_cell(cell, across, found) for cell in across.cells] == ["same order", "same order", "differs", "differs"]


def claim(kind="greater", pairs=(("femnist/a own", "femnist/b own"),), **more):
    return Claim("it is so", "somewhere", ("made-up",), kind, pairs=pairs, **more)


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ([60], [55], "holds"),
        ([60], [59], "not decided at this scale"),
        ([50], [55], "does not hold"),
        ([60, 60], [55, 61], "not decided at this scale"),
        ([60, 61, 62], [59.5, 60.4, 61.5], "holds"),
        ([60, 61, 62], [60.5, 61.6, 62.5], "does not hold"),
        ([60, 61, 62], [55, 70, 50], "not decided at this scale"),
        ([], [50], "not run"),
    ],
)
def test_greater(left, right, says):
    found = of_claim(claim(), findings(a=[run(v) for v in left], b=[run(v) for v in right]))
    assert found.says == says


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ([60, 61, 62], [60.1, 60.9, 62.1], "equivalent within 1 point"),
        ([60, 61, 62], [59.6, 60.4, 61.5], "holds"),  # better by less than the margin is better
        ([60, 61, 62], [60.1, 60.9, 63.5], "not decided at this scale"),  # the interval leaves the margin
        ([60, 61], [60, 61], "not decided at this scale"),  # two seeds have no interval
    ],
)
def test_what_should_be_better_may_be_equivalent(left, right, says, monkeypatch):
    """By the margin that the plan has for the claim; without a plan there is no such verdict."""
    runs = {"a": [run(v) for v in left], "b": [run(v) for v in right]}
    assert of_claim(claim(), findings(**runs)).says == says.replace("equivalent within 1 point", "not decided at this scale")
    monkeypatch.setattr(power_plan, "rows", lambda: (power_plan.Row("it is so", "full", 3, 1.0),))
    found = of_claim(claim(), findings(**runs))
    assert found.says == says
    if says.startswith("equivalent"):
        (comparison,) = found.comparisons
        assert comparison.decision == "equal"
        assert comparison.p == pytest.approx(2 * equivalent(comparison.effect.differences, 1.0))
        assert corrected([found])[0].says == f"{says} (p = {found.p:.3f})"
        assert corrected([found] * 40)[0].says.startswith("not decided at this scale (p = ")
        assert "equivalent" in comparison_tables.claim_lines(found)
    pairs = (("femnist/a own", "femnist/b own"), ("femnist/a own", "femnist/c own"))
    both = of_claim(claim(pairs=pairs), findings(**runs, c=[run(v - 9) for v in left]))
    assert not both.says.startswith("equivalent"), "in one setting equal, in the other better: neither"


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ([60], [60.4], "holds"),
        ([60], [61.5], "not decided at this scale"),
        ([60], [70], "does not hold"),
        ([60, 60, 60], [60.1, 60.2, 60.1], "holds"),
        ([60, 60, 60], [65.1, 65.2, 65.1], "does not hold"),
        ([60, 60, 60], [60.1, 70, 50], "not decided at this scale"),
    ],
)
def test_close(left, right, says):
    found = of_claim(claim("close", tolerance=0.5), findings(a=[run(v) for v in left], b=[run(v) for v in right]))
    assert found.says == says


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ([60.4], [60], "holds"),
        ([50], [60], "holds"),
        ([61.5], [60], "not decided at this scale"),
        ([63], [60], "does not hold"),
        ([50, 51, 52], [60, 60, 60], "holds"),
        ([60.1, 60.2, 60.1], [60, 60, 60], "holds"),
        ([65.1, 65.2, 65.1], [60, 60, 60], "does not hold"),
        ([60, 70, 50], [60, 60, 60], "not decided at this scale"),
    ],
)
def test_no_better(left, right, says):
    found = of_claim(claim("no better", tolerance=0.5), findings(a=[run(v) for v in left], b=[run(v) for v in right]))
    assert found.says == says


def test_sooner():
    quick, slow = run(70, 71, 72, 73, 74), run(50, 60, 65, 69, 70)
    assert of_claim(claim("sooner"), findings(a=[quick], b=[slow])).says == "holds"
    found = of_claim(claim("sooner"), findings(a=[slow], b=[quick]))
    assert found.says == "does not hold"
    assert found.comparisons[0].numbers == "never against 11 rounds to 70.30; never against 41 rounds to 74.00"
    assert found.comparisons[0].seeds == 1
    steep, steady = run(40, 45, 50, 75, 75), run(40, 67, 68, 69, 70)  # steep is sooner at 70, later at 95 % of it
    assert of_claim(claim("sooner"), findings(a=[steep], b=[steady])).says == "not decided at this scale"
    assert of_claim(claim("sooner"), findings(a=[slow], b=[slow])).says == "not decided at this scale"
    assert of_claim(claim("no later"), findings(a=[slow], b=[slow])).says == "holds"
    assert of_claim(claim("no later"), findings(a=[quick], b=[slow])).says == "holds"
    assert of_claim(claim("no later"), findings(a=[slow], b=[quick])).says == "does not hold"


def test_the_interval_of_the_rounds_decides_what_is_sooner():
    """Five seeds can decide: the sign test alone would have needed more, since all of five agree by chance once in 16."""
    quick = [run(70, 71, 72, 73, 74), run(69, 70.5, 72, 73, 74), run(60, 70, 71, 72, 73), run(70, 70, 70, 70, 70)]
    slow = [run(50, 60, 65, 66, 70)] * 4
    found = of_claim(claim("sooner"), findings(a=[*quick, quick[0]], b=[*slow, slow[0]]))
    assert found.says == "holds"
    assert 0 < found.p < 0.01
    (comparison,) = found.comparisons
    assert (comparison.unit, comparison.seeds, comparison.effect.mean) == ("rounds", 5, 36.0)
    against = of_claim(claim("sooner"), findings(a=slow, b=quick))
    assert against.says == "does not hold"
    assert against.comparisons[0].effect.mean < 0
    mixed = of_claim(claim("sooner"), findings(a=[quick[0], slow[0], quick[0]], b=[slow[0], quick[0], slow[0]]))
    assert (mixed.says, mixed.p) == ("not decided at this scale", None)


def test_the_deciding_comparison():
    pairs = tuple((f"femnist/{name} own", "femnist/z own") for name in "abc")
    base, noise = [60, 61, 62, 60], [0.0, 0.4, -0.4, 0.2]

    def judged(**gains):
        runs = {name: [run(v + g + n * g / 5) for v, n in zip(base, noise, strict=True)] for name, g in gains.items()}
        return of_claim(claim("greater", pairs), findings(z=[run(v) for v in base], **runs))

    holds = judged(a=5, b=1, c=3)
    assert holds.says == "holds"
    assert holds.deciding.p == max(c.p for c in holds.comparisons)
    fails = judged(a=5, b=-9, c=-3)
    assert fails.says == "does not hold"
    assert fails.deciding.effect.mean < 0
    assert judged().deciding is None
    assert judged(a=5).deciding.left == "femnist/a own"


def test_between_and_steady():
    pairs = (("femnist/a own", "femnist/b own"), ("femnist/a own", "femnist/c own"))
    assert of_claim(claim("between", pairs), findings(a=[run(60)], b=[run(50)], c=[run(70)])).says == "holds"
    assert of_claim(claim("between", pairs), findings(a=[run(80)], b=[run(50)], c=[run(70)])).says == "does not hold"
    assert (
        of_claim(claim("between", pairs), findings(a=[run(71)], b=[run(50)], c=[run(70)])).says == "not decided at this scale"
    )
    assert of_claim(claim("between", pairs), findings(a=[run(60)], b=[run(50)])).says == "not run"
    worse, middle, better = ([run(v + noise) for noise in (0, 1, 3)] for v in (50, 60, 72))
    noisy = [run(v) for v in (61, 60, 62)]
    of_two = of_claim(claim("between", pairs), findings(a=noisy, b=worse, c=better)).p
    with_middle = (*pairs, ("femnist/a own", "femnist/d own"))
    of_three = of_claim(claim("between", with_middle), findings(a=noisy, b=worse, c=better, d=middle)).p
    assert of_three == pytest.approx(1.5 * of_two)  # the extremes were chosen among three
    assert 0 < of_three < 0.1
    # Only seeds that all have are compared: without the second seed of a and b, a is the best.
    found = of_claim(claim("between", pairs), findings(a=[run(80), run(60)], b=[run(70), run(90)], c=[run(50)]))
    assert (found.says, found.comparisons[0].seeds) == ("does not hold", 1)
    assert found.comparisons[0].numbers == "80.00, the others 50.00 to 70.00"
    still, wild = [run(60 + v) for v in (0, 0.1, 0, 0.1, 0)], [run(v) for v in (50, 60, 70, 50, 70)]
    assert of_claim(claim("steady", pairs), findings(a=still, b=wild, c=wild)).says == "holds"
    assert of_claim(claim("steady", pairs), findings(a=still, b=still, c=wild)).says == "holds"  # second least
    similar = [run(v) for v in (52, 61, 70, 48, 69)]
    assert of_claim(claim("steady", pairs), findings(a=wild, b=similar, c=similar)).says == "not decided at this scale"
    assert of_claim(claim("steady", pairs), findings(a=wild, b=still, c=still)).says == "does not hold"
    few = of_claim(claim("steady", pairs), findings(a=still[:4], b=wild, c=wild))
    assert (few.says, few.comparisons[0].numbers) == ("not decided at this scale", "0.06, the others 9.57, 9.57")
    assert of_claim(claim("steady", pairs), findings(a=still[:1], b=wild, c=wild)).says == "not decided at this scale"


@pytest.mark.parametrize(
    ("kind", "left", "right", "samples", "says"),
    [
        # 10 points of 60 % and 50 % are 2.04 standard errors apart with 200 test samples each, 1.96 with 184.
        ("greater", 60, 50, 200, "holds"),
        ("greater", 60, 50, 184, "not decided at this scale"),
        ("greater", 50, 60, 200, "does not hold"),
        ("greater", 50, 60, 184, "not decided at this scale"),
        ("no better", 50, 60, 250, "holds"),  # 0.5 - 8.8
        ("no better", 50, 60, 150, "not decided at this scale"),  # 0.5 - 11.4
        ("no better", 60, 50, 250, "does not hold"),
        ("no better", 60, 50, 150, "not decided at this scale"),
        ("close", 60, 60.4, 100, "holds"),
        ("close", 60, 50, 150, "not decided at this scale"),
    ],
)
def test_few_seeds_must_differ_by_more_than_chance(kind, left, right, samples, says):
    few = findings(a=[run(left, samples=samples)], b=[run(right, samples=samples)])
    found = of_claim(claim(kind, tolerance=0.5), few)
    assert found.says == says
    assert ", two standard errors " in found.comparisons[0].numbers


def test_the_error_of_an_accuracy():
    assert error(run(60, samples=600), "own") == pytest.approx(2.0)
    assert error(run(60, samples=600), "PM") == pytest.approx((59 * 41 / 600) ** 0.5)
    assert error(run(60), "own") == error(run(60, samples=600), "tuned") == error(run(60, samples=600), "seconds server") == 0
    assert error(run(100, samples=600), "own") == 0
    alone = {f"client {i}": Curve((0,), (0.5,), (), n, n) for i, n in enumerate((100, 25))}
    assert error(Measured({}, alone), "client 1") == pytest.approx(10)
    # A mean of two has the variance of both over four: 25 / 4 + 100 / 4.
    assert error(Measured({}, alone), "clients 0,1") == pytest.approx((31.25) ** 0.5)


def test_settled_is_the_mean_of_the_last_evaluations():
    swinging = run(*range(40, 50), 60, 70, 60, 70, 60)
    assert value(swinging, "own") == 60
    assert value(swinging, "own settled") == value(swinging, "own", "settled") == pytest.approx(64)
    assert value(run(*range(40, 49)), "own settled") is None  # too few to have settled
    wide = Result("x", "x", "x", columns=RESULT.columns, rows=RESULT.rows[:1], settled=True)
    sheet = comparison_tables.sheet(wide, findings(a=[swinging]))
    assert (sheet.header[-1], sheet.rows[0][-1]) == ("mean of the last 5 evaluations %", "64.00")


def test_the_best_round_of_a_client_is_a_line():
    alone = Measured({}, {"client 0": Curve((0, 1, 2), (0.4, 0.6, 0.5), (), 10, 10)})
    assert list(points(alone, "best client 0")) == [(0, 60.0), (1, 60.0), (2, 60.0)]
    assert value(alone, "best client 0") == 60
    assert list(points(alone, "best client 1")) == []


def test_what_clients_have_trained_is_a_measure_of_its_own():
    both = {"own trained val": Curve((4,), (0.7,), (0.6,)), "personal round val": Curve((4,), (0.5,), (0.4,))}
    assert value(Measured({}, both), "trained own") == pytest.approx(70)
    assert value(Measured({}, both), "own val") == pytest.approx(50)
    assert value(Measured({}, both), "trained guest") is None


def test_slower():
    pairs = (("femnist/a seconds server", "femnist/b seconds server"),)

    def timed(seconds):
        return Measured({}, seconds={"server": seconds})

    assert of_claim(claim("slower", pairs), findings(a=[timed(2.0)], b=[timed(1.0)])).says == "holds"
    assert of_claim(claim("slower", pairs), findings(a=[timed(1.0)], b=[timed(1.1)])).says == "not decided at this scale"
    assert of_claim(claim("slower", pairs), findings(a=[timed(1.0)], b=[timed(2.0)])).says == "does not hold"


def test_a_claim_of_several_comparisons():
    pairs = (("femnist/a own", "femnist/b own"), ("femnist/a own", "femnist/c own"), ("femnist/a own", "femnist/d own"))
    some = {"a": [run(60)], "b": [run(50)], "c": [run(50)]}
    assert of_claim(claim(pairs=pairs), findings(**some)).says == "holds (2 of 3 comparisons run)"
    assert of_claim(claim(pairs=pairs, need="most"), findings(**some)).says == "holds (2 of 3 comparisons run)"
    one = {"a": [run(60)], "b": [run(50)]}  # too few, although it holds
    assert of_claim(claim(pairs=pairs), findings(**one)).says == "not decided at this scale (1 of 3 comparisons run)"
    some_open = {**some, "c": [run(60)]}
    assert of_claim(claim(pairs=pairs), findings(**some_open)).says == "not decided at this scale (2 of 3 comparisons run)"
    against = {**some, "c": [run(70)]}
    assert of_claim(claim(pairs=pairs), findings(**against)).says == "does not hold (2 of 3 comparisons run)"
    assert of_claim(claim(pairs=pairs), findings(**some, d=[run(70)])).says == "does not hold"
    assert of_claim(claim(pairs=pairs, need="most"), findings(**some, d=[run(70)])).says == "holds"
    assert of_claim(claim(pairs=pairs), findings(**some, d=[run(60)])).says == "not decided at this scale"


def test_which_round():
    one = run(50, 70, 60, validation=(50, 55, 80))
    assert value(one, "own") == 60
    assert value(one, "own", "test") == 70
    assert value(one, "own", "validation") == 60
    assert value(one, "own", other=True) == pytest.approx(59)
    assert value(one, "PM") == pytest.approx(59)
    assert value(run(50, 70), "own", "validation") is None
    assert value(one, "tuned") is None
    assert value(one, "GM") is None


def test_the_sheet_shows_paper_ours_and_difference():
    sheet = comparison_tables.sheet(RESULT, findings(a=[run(50), run(52)], d=[run(10)]))
    assert sheet.header == ("", "column", "paper %", "ours %", "difference", "verdict", "seeds", "pooled %")
    assert sheet.rows[0] == (
        *("a", "one", "50.00 ± 2.00", "51.00 ± 1.41", "+1.00", "within the paper's std", "2", "50.00 ± 1.41"),
    )
    assert sheet.rows[1] == ("b", "one", "60.00 ± 2.00", "", "", "", "", "")
    assert sheet.rows[3] == ("ours", "one", "", "10.00", "", "", "1", "9.00")
    assert [row[0] for row in sheet.finished] == ["a", "ours"]
    assert comparison_tables.commands(sheet) == [
        "fedme reproduce made-up --scale full --seeds 2 --only a/one",
        "fedme reproduce made-up --scale full --seeds 1 --only ours/one",
    ]
    whole = comparison_tables.sheet(RESULT, findings(**{name: [run(50)] for name in "abcd"}))
    assert comparison_tables.commands(whole) == ["fedme reproduce made-up --scale full --seeds 1"]
    assert "51.00 ± 1.41" in sheet.text("csv")
    assert "$\\pm$" in sheet.text("latex")


def test_what_fine_tuning_did_is_beside_it():
    tuned = run(60)
    tuned.curves["personal finetuned test"] = Curve((0,), (0.65,), (0.64,))
    rows = (Row("a", "{column}/a", "tuned"), Row("b", "{column}/b", "own"))
    beside = Result("x", "x", "x", columns=RESULT.columns, rows=rows)
    found = findings(a=[tuned], b=[run(50)])
    sheet = comparison_tables.sheet(beside, found)
    assert (sheet.header[3], sheet.header[-1]) == ("ours %", "before fine-tuning %")
    assert [(row[3], row[-1]) for row in sheet.rows] == [("65.00", "60.00"), ("50.00", "")]
    both = Result("x", "x", "x", columns=RESULT.columns, rows=(*rows, Row("a before", "{column}/a", "own")))
    assert "before fine-tuning %" not in comparison_tables.sheet(both, found).header


def test_a_best_round_on_test_data_has_a_column_of_its_own():
    greedy = Result("x", "x", "x", columns=RESULT.columns, rows=RESULT.rows[:1], best_on_test=True)
    sheet = comparison_tables.sheet(greedy, findings(a=[run(70, 50)]))
    assert sheet.header[-1] == "best round on test data % (the paper's rule)"
    assert (sheet.rows[0][3], sheet.rows[0][-1]) == ("50.00", "70.00")


def with_clients(accuracy, *right, samples=10):
    """A run whose clients have so many right answers."""
    curves = run(accuracy).curves
    return Measured({}, curves, clients={"personal round test": {str(i): (r, samples) for i, r in enumerate(right)}})


def test_clients_inside_the_seeds():
    pairs = (("femnist/a own", "femnist/b own"),)
    a, b = [with_clients(70 + v, 9, 7, 5) for v in (0, 1, 2)], [with_clients(60 + v, 8, 6, 7) for v in (0, 1, 2)]
    (found,) = of_claim(claim("greater", pairs), findings(a=a, b=b)).comparisons
    assert found.clients.startswith("67 % of the clients better, 33 % worse; resampled seeds and clients -")
    (few,) = of_claim(claim("greater", pairs), findings(a=a[:2], b=b)).comparisons
    assert few.clients == ""
    (unknown,) = of_claim(claim("greater", pairs), findings(a=[run(70)] * 3, b=b)).comparisons
    assert unknown.clients == ""
    text = comparison_tables.claim_lines(of_claim(claim("greater", pairs), findings(a=a, b=b)))
    assert "holds. Clients: 67 % of the clients better" in text


def test_other_clients_are_not_compared():
    pairs = (("femnist/a own", "femnist/b own"),)
    a, b = [with_clients(70, 9, 7)] * 3, [with_clients(60, 8, 6, samples=20)] * 3
    assert of_claim(claim("greater", pairs), findings(a=a, b=b)).comparisons[0].clients == ""


def test_differences_of_clients_are_weighted_as_the_measure_is():
    a, b = (
        Measured({}, run(50).curves, clients={"personal round test": c})
        for c in ({"x": (9, 10), "y": (50, 100)}, {"x": (8, 10), "y": (60, 100)})
    )
    found = findings(a=[a], b=[b])
    (mean, equal), (pooled, by_samples) = (
        client_differences(found, f"femnist/a {m}", f"femnist/b {m}")[0] for m in ("own", "PM")
    )
    assert list(mean) == list(pooled) == pytest.approx([10, -10])
    assert list(equal) == [1, 1]
    assert list(by_samples) == [10, 100]
