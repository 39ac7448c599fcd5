"""The plan of the runs that decide the claims."""

import json
import shlex
from dataclasses import replace

import pytest

from fedme.reproduction import catalogue, findings, power_plan, results_page
from fedme.reproduction.claim_verdicts import Comparison, Verdict, corrected, of_claim
from fedme.reproduction.findings import Findings
from fedme.reproduction.measured import Curve, Measured
from fedme.reproduction.planned_runs import experiment
from fedme.reproduction.power_plan import PlannedComparison, Row

NOTHING = {"full": Findings("full", {}), "small": Findings("small", {})}


def test_every_claim_is_planned_with_its_own_comparisons():
    known = power_plan.numbered()
    rows = power_plan.rows()
    assert {row.claim for row in rows} == set(known)
    for row in rows:
        claim = known[row.claim][1]
        assert {(seen.left, seen.right) for seen in row.comparisons} <= set(claim.pairs)
        assert row.seeds >= 5
        assert row.minutes > 0
    for text, (_, claim) in known.items():
        planned = {(seen.left, seen.right) for row in rows if row.claim == text for seen in row.comparisons}
        assert planned == {pair for pair in claim.pairs if "cifar100" not in pair[0]}


def test_steps_come_in_the_order_of_what_they_decide_and_fit_the_hours():
    steps = power_plan.order(NOTHING, 6, 2)
    assert sum(step.minutes for step in steps) <= 6 * 2 * 60
    known, level = power_plan.numbered(), 1 - 0.05 / len(power_plan.rows())
    rates = [row.chance(known[row.claim][1], level) / (row.minutes / 60) for row in power_plan.rows()]
    assert steps[0].per_hour == pytest.approx(max(rates))
    assert len({(step.number, step.row.scale) for step in steps}) == len(steps)
    runs = [(step.row.scale, *missing) for step in steps for missing in step.missing]
    assert len(runs) == len(set(runs))  # shared runs are made once
    assert power_plan.order(NOTHING, 0, 2) == []
    more = power_plan.order(NOTHING, 60, 2)
    assert len(more) > len(steps)


def test_finished_runs_are_not_planned_again():
    first = power_plan.order(NOTHING, 2, 2)[0]
    made = {run: {seed: Measured({}) for seed in range(first.row.seeds)} for run in first.row.runs}
    after = power_plan.order(NOTHING | {first.row.scale: Findings(first.row.scale, made)}, 2, 2)
    assert (first.number, first.row.scale) not in {(step.number, step.row.scale) for step in after}


def row(mean, std, seeds=5, count=1):
    return Row(
        "x",
        "small",
        seeds,
        1.0,
        tuple(PlannedComparison(f"femnist/a{i} own", "femnist/b own", mean, std, 3) for i in range(count)),
    )


def claim(kind, **more):
    return catalogue.Claim("x", "somewhere", ("made-up",), kind, pairs=(("femnist/a own", "femnist/b own"),), **more)


@pytest.mark.parametrize(
    ("kind", "mean", "std", "low", "high"),
    [
        ("greater", 5.0, 0.5, 0.99, 1.0),
        ("greater", -5.0, 0.5, 0.99, 1.0),  # decided too: it does not hold
        ("greater", 0.0, 1.0, 0.04, 0.06),  # only by mistake
        ("greater", 1.0, 5.0, 0.0, 0.15),
        ("close", 0.0, 0.1, 0.99, 1.0),
        ("close", 0.0, 5.0, 0.0, 0.1),
        ("no better", -3.0, 0.5, 0.99, 1.0),
        ("no better", 5.0, 0.5, 0.99, 1.0),
        ("between", 0.0, 1.0, 0.5, 0.5),
    ],
)
def test_the_chance_to_decide(kind, mean, std, low, high):
    chance = row(mean, std).chance(claim(kind, tolerance=0.0 if kind == "greater" else 1.0))
    assert low <= chance <= high


def test_more_seeds_and_fewer_comparisons_decide_more():
    assert row(1.0, 1.0, seeds=20).chance(claim("greater")) > row(1.0, 1.0).chance(claim("greater"))
    assert row(1.0, 1.0, count=3).chance(claim("greater")) < row(1.0, 1.0).chance(claim("greater"))
    assert row(1.0, 1.0).needed() == 10


def test_a_minority_of_the_comparisons_can_only_refute_a_claim():
    of_four = replace(claim("greater"), pairs=claim("greater").pairs * 4)
    assert row(5.0, 0.5).chance(of_four) < 0.01 < 0.99 < row(5.0, 0.5, count=3).chance(of_four)
    assert row(-5.0, 0.5).chance(of_four) > 0.99


def verdict(says, *p_values, need="all", seeds=5):
    decision = {"holds": "yes", "does not hold": "no"}.get(says, "open")
    made = tuple(Comparison("a", "b", "", seeds, decision, p) for p in p_values)
    return Verdict(claim("greater", need=need), says, made)


def test_verdicts_are_corrected_for_the_number_of_claims():
    weak, strong = verdict("holds", 0.001, 0.03), verdict("does not hold", 0.002, 0.9)
    assert weak.p == 0.03  # all must hold
    assert strong.p == 0.004  # one of two is enough not to
    assert verdict("does not hold", 0.002, None).p == 0.004  # a comparison that agrees with too few seeds takes nothing away
    assert verdict("holds", 0.002, None).p is None  # all must hold, and one has no test
    assert verdict("does not hold", 0.002, None, need="most").p is None
    few, waiting = verdict("holds", None, seeds=1), verdict("not decided at this scale", None, seeds=2)
    says = [v.says for v in corrected([weak, strong, few, waiting])]
    assert says == ["holds (p = 0.030)", "does not hold (p = 0.008)", "holds, so far: too few seeds for a test", waiting.says]
    says = [v.says for v in corrected([weak, weak, strong])]
    assert says[:2] == ["not decided at this scale (p = 0.06 for all claims)"] * 2


def test_claims_that_their_test_has_left_open_count_in_the_correction():
    """Correcting for the successful tests only would be too little: with 20 claims, one of them is there by chance."""
    strong, weak = verdict("holds", 0.002), verdict("holds", 0.03)
    left_open = verdict("not decided at this scale", None)
    assert [v.says for v in corrected([strong, weak])] == ["holds (p = 0.004)", "holds (p = 0.030)"]
    says = [v.says for v in corrected([strong, weak, *[left_open] * 18])]
    assert says[:2] == ["holds (p = 0.040)", "not decided at this scale (p = 0.57 for all claims)"]
    assert says[2:] == [left_open.says] * 18


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("greater", (60, 61, 62.5)),
        ("close", (60.1, 60.2, 60.1)),
        ("close", (65.1, 65.2, 65.1)),
        ("no better", (50, 51, 52)),
    ],
)
def test_p_values_go_with_the_interval(kind, left):
    """A verdict at 95 % has a p value of at most 5 %."""

    def made(values):
        return {i: Measured({}, {"personal round test": Curve((0,), (v / 100,), (v / 100,))}) for i, v in enumerate(values)}

    found = Findings("full", {"femnist/a": made(left), "femnist/b": made((60, 60, 60) if kind != "greater" else (59, 60, 61))})
    judged = of_claim(claim(kind, tolerance=0.0 if kind == "greater" else 0.5), found)
    assert judged.comparisons[0].decision != "open"
    assert 0 < judged.p <= 0.05


def test_the_command_prints_the_plan(fedme, tmp_path):
    code, out, _ = fedme("reproduce", "--plan", "3", "--jobs", "2", "--runs", tmp_path, "--json")
    rows = json.loads(out)
    assert code == 0
    assert rows
    assert float(rows[-1]["hours"]) <= 3
    command = f"fedme reproduce --claim {rows[0]['claim']} --scale {rows[0]['scale']}"
    assert rows[0]["command"] == command
    out = fedme("reproduce", "--plan", "3", "--jobs", "2", "--runs", tmp_path, "--page", tmp_path / "page.md", "--json")[1]
    assert json.loads(out)[0]["command"] == f"{command} --page {shlex.quote(str(tmp_path / 'page.md'))}"


def test_the_runs_of_a_claim_are_listed_and_unknown_claims_refused(fedme, tmp_path):
    code, out, _ = fedme("reproduce", "--claim", "9", "--list", "--runs", tmp_path, "--json")
    assert code == 0
    listed = json.loads(out)
    assert len(listed) == 2 * power_plan.of_claim(9, "small").seeds
    code, _, err = fedme("reproduce", "--claim", "99", "--runs", tmp_path)
    assert code == 2
    assert "nothing is planned for it at scale small" in err.replace("\n", " ")


def test_archived_runs_of_a_claim_are_not_made_again(fedme, tmp_path):
    archived = [(run, 0) for run in power_plan.of_claim(9, "small").runs]
    made = {run: {seed: Measured(experiment(run, "small", seed))} for run, seed in archived}
    page = tmp_path / "page.md"
    page.with_suffix("").mkdir()
    findings.write_archive(Findings("small", made), page.with_suffix("") / "small.jsonl")
    words = ("reproduce", "--claim", "9", "--runs", tmp_path, "--json")
    everything = json.loads(fedme(*words, "--list")[1])
    code, out, _ = fedme(*words, "--list", "--page", page)
    assert code == 0
    left = json.loads(out)
    assert len(left) == len(everything) - len(archived)
    assert not any("seed 0" in row["run"] for row in left)
    code, out, _ = fedme(*words, "--no-runs", "--page", page, "--quiet")
    assert code == 0
    assert json.loads(out)["claim"].startswith("Clustering alone")
    assert "| 9 | Clustering alone" in page.read_text()


def test_what_is_left_of_the_plan_is_on_the_page(tmp_path):
    page = tmp_path / "page.md"
    results_page.write(page, tmp_path / "nothing")
    table = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [int(cells[0].strip("| ")) for cells in table] == [number for number, _ in power_plan.numbered().values()]
    for cells in table:
        planned = [row for row in power_plan.rows() if row.claim == cells[1]]
        hours = sum(row.minutes for row in planned) / 60
        assert cells[3] == f"needs {hours:.1f} hours"
        assert cells[8].startswith(f"{sum(len(row.runs) * row.seeds for row in planned)}, about ")
    assert "41 claims: 0 hold, 0 do not hold, 0 are not decided, 41 wait for their first runs." in page.read_text()


def test_every_claim_of_the_page_has_its_words():
    for claim in (claim for _, claim in power_plan.numbered().values()):
        clauses = (claim.plain.holds, claim.plain.fails, claim.plain.open)
        assert len(set(clauses)) == 3
        assert not any(clause.endswith((".", " ")) for clause in clauses), claim.text
        assert claim.plain.open.startswith(("whether ", "how ", "which ", "the order ")), claim.text


@pytest.mark.parametrize(
    ("left", "right", "sentence"),
    [
        ((70, 71, 72), (60, 61, 62.5), "Clustering alone helps by more than a point, against the paper (9, small)."),
        ((60, 61, 62), (70, 71, 72.5), "Clustering alone does not help, as the paper says (9, small)."),
        ((60, 71, 52), (60, 61, 62), "Not decided by the runs so far: whether clustering alone helps (9, small)."),
        ((50,), (70,), "So far, with too few seeds for a test: clustering alone does not help, as the paper says (9, small)."),
        ((), (), "No runs yet for claims 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."),
    ],
)
def test_the_sentences_about_a_paper_follow_from_the_verdicts(tmp_path, left, right, sentence):
    def made(run, values):
        curves = [{"personal finetuned test": Curve((59,), (v / 100,), (v / 100,), 1000, 1000)} for v in values]
        return {seed: Measured(experiment(run, "small", seed), curve) for seed, curve in enumerate(curves)}

    runs = {"femnist/fedme-mc": made("femnist/fedme-mc", left), "femnist/fedme-none": made("femnist/fedme-none", right)}
    page = tmp_path / "page.md"
    page.with_suffix("").mkdir()
    findings.write_archive(Findings("small", runs), page.with_suffix("") / "small.jsonl")
    results_page.write(page, tmp_path / "nothing")
    words = page.read_text().partition("### FedMe: Federated Learning")[2].partition("###")[0]
    assert sentence in words
    assert words.count("lustering") == (1 if left else 0)


def test_the_authors_networks_are_planned_at_full_width_with_300_and_600_rounds():
    planned = next(runs for runs in power_plan.backgrounds() if runs.result == "fedme-rounds")
    made = [experiment(run, planned.scale, 0) for run in planned.runs]
    found = {(c["method"]["name"], c["rounds"], *c["models"]["pool"], c["partition"]["min_samples"]) for c in made}
    assert found == {(name, rounds, "cnn-2-linear", 16) for name in ("fedavg", "fedme") for rounds in (300, 600)}
    assert (planned.scale, planned.seeds) == ("full", 3)
    steps = power_plan.order(NOTHING, 10_000, 1)
    (at,) = [i for i, step in enumerate(steps) if step.row == planned]
    assert steps[at].command == "fedme reproduce fedme-rounds --scale full --seeds 3"
    assert all(step.chance > 0 for step in steps[:at])
    assert not any(step.chance > 0 for step in steps[at:])
    runs = {run: {seed: Measured({}) for seed in range(3)} for run in planned.runs}
    assert planned not in [step.row for step in power_plan.order(NOTHING | {"full": Findings("full", runs)}, 10_000, 1)]


def test_all_methods_are_planned_with_half_the_channels():
    planned = next(runs for runs in power_plan.backgrounds() if runs.result == "fedme-half")
    made = [experiment(run, planned.scale, 0) for run in planned.runs]
    assert len(made) == 8
    assert {model for c in made for model in c["models"]["pool"]} == {f"cnn-{i}-linear(width=0.5)" for i in (1, 2, 3, 4)}
    assert {c["method"]["name"]: c["rounds"] for c in made}["fedme"] == 300
    assert (planned.scale, planned.seeds) == ("full", 3)


def test_the_page_says_who_is_ahead_after_how_many_rounds(tmp_path):
    def made(run, *lines):
        curves = [Curve((9, 19, 299), tuple(v / 100 for v in line), tuple(v / 100 for v in line)) for line in lines]
        return {s: Measured(experiment(run, "full", s), {"personal round test": curve}) for s, curve in enumerate(curves)}

    fedavg, fedme = "femnist-linear/fedavg", "femnist-linear/fedme-model-2"
    runs = {
        fedavg: made(fedavg, (10, 50, 80), (12, 50, 81), (14, 50, 82)),
        fedme: made(fedme, (9, 55, 78), (11, 55, 80), (13, 56, 79), (0, 0, 0)),
    }
    page = tmp_path / "page.md"
    page.with_suffix("").mkdir()
    findings.write_archive(Findings("full", runs), page.with_suffix("") / "full.jsonl")
    results_page.write(page, tmp_path / "nothing")
    assert (
        "* CNN-2 linear, 300 rounds (3 seeds): FedMe is ahead of FedAvg at 1 of 3 evaluations, first after 20 and last after "
        "20 rounds, most after 20 (+5.3 points). After 300 rounds: -2.0 points, 95 % interval -4.5 to +0.5.\n"
        "* To be run: 6 of 12 planned runs, `fedme reproduce fedme-rounds --scale full --seeds 3`.\n"
    ) in page.read_text()
