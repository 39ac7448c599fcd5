"""Settings of the papers' experiments that were once wrong, read again in the papers and in their authors' code."""

import pytest

from fedme.config.experiment import load, presets
from fedme.reproduction import catalogue, rate_search
from fedme.reproduction.findings import every_run
from fedme.reproduction.planned_runs import experiment

SCALES = ("full", "small")
FML_PRESETS = [name for name in presets() if name.startswith("fml-")]


def runs_of(*families):
    return [run for run in every_run() if run.partition("/")[0] in families]


def test_settings_are_on_the_page_of_every_paper():
    assert {remark.paper for remark in catalogue.settings()} == set(catalogue.PAPERS)


@pytest.mark.parametrize("name", FML_PRESETS)
def test_the_rate_of_fml_is_constant(name):
    training = load(name)[0].plain()["train"]
    assert training["lr"] == 0.01
    assert training["lr_schedule"] == "constant"


@pytest.mark.parametrize("scale", SCALES)
def test_no_run_of_a_paper_decays_its_rate(scale):
    for run in every_run():
        assert experiment(run, scale, 0)["train"]["lr_schedule"] == "constant", run


PFML_FAMILIES = ("pfml-mnist-mlr", "pfml-synthetic-mlr", "pfml-mnist-dnn", "pfml-synthetic-dnn", "pfml-cifar10")


def test_pfml_is_compared_with_fedavg_of_equal_weights():
    """Eq. 11 of PFML has equal weights, and beta = 1 is FedAvg there."""
    pairs = [pair for claim in catalogue.claims() if claim.paper == "pfml" for pair in claim.pairs]
    others = {side.partition(" ")[0] for pair in pairs for side in pair if "/fedavg" in side}
    assert others == {f"{family}/fedavg-uniform" for family in PFML_FAMILIES}
    for family in PFML_FAMILIES:
        assert experiment(f"{family}/fedavg-uniform", "full", 0)["method"]["weighting"] == "uniform"
        assert experiment(f"{family}/fedavg", "full", 0)["method"]["weighting"] == "samples"
    for table in ("pfml-table1", "pfml-table2"):
        rows = {row.name: row for row in catalogue.results()[table].rows}
        assert rows["FedAvg"].paper
        assert not rows["FedAvg (weighted by samples)"].paper


@pytest.mark.parametrize("scale", SCALES)
def test_the_logistic_regression_of_pfml_is_regularised_in_every_row(scale):
    for run in runs_of(*PFML_FAMILIES):
        config = experiment(run, scale, 0)
        own = config["method"]["name"] in ("pfml", "pfedme")
        l2 = config["method"]["l2"] if own else config["train"]["weight_decay"]
        if "mlr" in run.partition("/")[0]:
            assert l2 == 1e-3, run
        elif config["method"]["name"] != "pfedme":  # whose own mu is for every network
            assert l2 == 0, run
    for run in runs_of("pfml-synthetic-mixed"):
        assert experiment(run, scale, 0)["method"]["l2"] == [1e-3, 0.0]  # of the MLR, of the DNN


def test_cifar10_has_400_rounds_in_all_experiments_of_fml():
    for run in runs_of("fml-cifar10-cnn1", "fml-cifar10-cnn2", "fml-cifar10-models"):
        assert experiment(run, "full", 0)["rounds"] == 400, run


@pytest.mark.parametrize("scale", SCALES)
def test_writers_have_as_many_samples_as_the_smallest_of_the_paper(scale):
    for run in runs_of("femnist", "femnist-ja", "femnist-linear", "femnist-linear-600"):
        assert experiment(run, scale, 0)["partition"]["min_samples"] == 16, run


def test_the_rates_of_fedme_are_those_of_the_authors_code():
    """Their grid is 10^(-3 + i/2); HypCluster's on Shakespeare (i = 0) is not believable."""
    indices = {
        "local": (1, 2, 5),
        "centralized": (1, 2, 4),
        "fedavg": (2, 2, 4),
        "mapper": (2, 2, 3),
        "fml": (2, 2, 5),
        "pfedme": (2, 1, 4),
        "fedme": (2, 2, 3),
        "hypcluster": (3, 2, 4),
    }
    for method, grid in indices.items():
        for data, i in zip(("femnist", "cifar10", "shakespeare"), grid, strict=True):
            lr = experiment(f"{data}/{method}", "full", 0)["train"]["lr"]
            assert lr == pytest.approx(10 ** (-3 + i / 2), rel=1e-2), (data, method)


def test_figure_3_of_fedme_shows_what_clients_have_trained():
    """The authors validate the locally trained copies before aggregation, FedAvg's too."""
    figure = catalogue.results()["fedme-figure3"]
    panels = {panel.title: panel for panel in figure.panels}
    for data in ("FEMNIST", "CIFAR-10", "Shakespeare"):
        assert {series.measure.partition(" ")[0] for series in panels[data].series} == {"trained"}
        assert {series.measure for series in panels[f"{data}, after the round"].series} == {"own val"}
    (claim,) = [claim for claim in catalogue.claims() if claim.results == ("fedme-figure3",)]
    assert {side.partition(" ")[2] for pair in claim.pairs for side in pair} == {"trained own", "trained global"}
    for run in {series.run for panel in figure.panels for series in panel.series}:
        assert experiment(run, "full", 0)["evaluate_trained"], run


@pytest.mark.parametrize("scale", SCALES)
def test_architectures_are_chosen_with_the_rate_of_local_training(scale):
    for data in ("femnist", "cifar10", "shakespeare"):
        chosen, alone = (experiment(f"{data}/{run}", scale, 0) for run in ("fedme", "local"))
        assert chosen["models"]["selection_lr"] == alone["train"]["lr"], data


@pytest.mark.parametrize("scale", SCALES)
def test_all_methods_of_the_first_version_get_the_architectures_that_local_training_chooses(scale):
    chosen = 0
    for run in runs_of("femnist-ja", "shakespeare-ja"):
        config, alone = (experiment(name, scale, 0) for name in (run, f"{run.partition('/')[0]}/local"))
        if config["models"]["assign"] == "best-local":
            chosen += 1
            assert (config["models"].get("selection_lr") or config["train"]["lr"]) == alone["train"]["lr"], run
    assert chosen == 10


MADE = [search for search in rate_search.searches() if search.accuracy]


@pytest.mark.parametrize("search", MADE, ids=lambda search: search.run)
def test_rates_are_those_that_one_rule_has_chosen(search):
    assert search.used == search.chosen
    assert search.inside or search.run == "femnist/centralized"  # no claim is about it


@pytest.mark.parametrize("search", [s for s in MADE if s.run.startswith("shakespeare-ja")], ids=lambda search: search.run)
def test_the_first_version_has_the_rates_of_the_searches_at_full_scale_too(search):
    """The paper does not give those that its grid led to."""
    assert experiment(search.run, "full", 0)["train"]["lr"] == search.chosen


@pytest.mark.parametrize("search", rate_search.searches(), ids=lambda search: search.run)
def test_rates_are_judged_by_the_model_of_the_table(search):
    tuned = {cell.measure for result in catalogue.results().values() for cell in result.cells if cell.run == search.run}
    assert search.model == ("finetuned" if "tuned" in tuned else "personal")
    assert search.used in search.rates


def test_every_method_of_fedmes_papers_has_a_search_of_its_rate():
    """The columns FEMNIST linear have the authors' rates."""
    wanted = {
        (run.partition("/")[0], experiment(run, "small", 0)["method"]["name"])
        for run in runs_of("femnist", "cifar10", "shakespeare", "femnist-ja", "shakespeare-ja")
        if not run.endswith("/data")
    }
    searched = [
        (search.run.partition("/")[0], experiment(search.run, "small", 0)["method"]["name"])
        for search in rate_search.searches()
    ]
    assert sorted(searched) == sorted(wanted)  # every one once
    assert {search.run for search in MADE} >= {
        "femnist/fedavg",
        "femnist/fedme-model-2",
        "femnist/hypcluster",
        "cifar10/fedavg",
    }


def test_a_method_has_one_rate_in_all_its_runs_of_a_family():
    rates = {}
    for run in runs_of("femnist", "cifar10", "shakespeare", "femnist-ja", "shakespeare-ja"):
        config = experiment(run, "small", 0)
        if not run.endswith("/data"):
            rates.setdefault((run.partition("/")[0], config["method"]["name"]), set()).add(config["train"]["lr"])
    assert all(len(rate) == 1 for rate in rates.values()), rates


@pytest.mark.parametrize(("scale", "often"), [("full", 60), ("small", 40)])
def test_clients_of_the_first_version_take_part_often_enough_to_learn(scale, often):
    for run in runs_of("femnist-ja", "shakespeare-ja"):
        config = experiment(run, scale, 0)
        clients, cohort = config["partition"]["clients"], config["train"]["cohort"]
        together = config["method"]["name"] == "centralized"  # all samples in every round
        assert together or cohort == clients or config["rounds"] * cohort / clients >= often, run
        assert together or config["train"]["lr"] >= 0.1, run


def test_femnist_has_the_networks_of_the_authors_code_with_their_rates_too():
    for name in ("fedme-table3", "fedme-table4", "fedme-table5", "fedme-table6"):
        cells = catalogue.results()[name].cells
        relu, linear = ({c.row: c for c in cells if c.column == column} for column in ("FEMNIST", "FEMNIST linear"))
        assert relu.keys() <= linear.keys()
        for row, cell in relu.items():
            assert (cell.paper, cell.std) == (linear[row].paper, linear[row].std)
            assert linear[row].run == cell.run.replace("femnist/", "femnist-linear/")
    for scale in SCALES:
        for run in runs_of("femnist", "femnist-linear"):
            networks = str(experiment(run, scale, 0)["models"])
            assert ("-linear" in networks) == run.startswith("femnist-linear/"), run
    for run in runs_of("femnist-linear"):
        full, small = (experiment(run, scale, 0)["train"]["lr"] for scale in ("full", "small"))
        assert full == small, run


def test_six_hundred_rounds_end_with_the_clusters_of_three_hundred():
    long, short = (experiment(f"femnist-linear{rest}/fedme-model-2", "full", 0) for rest in ("-600", ""))
    assert (long["rounds"], short["rounds"]) == (600, 300)
    assert {int(t) / 2: k for t, k in long["method"]["clusters"].items()} == {
        int(t): k for t, k in short["method"]["clusters"].items()
    }


def test_the_first_versions_figure_shows_the_clients_of_the_round():
    figure = catalogue.results()["fedme-ja-figure3"]
    for series in (series for panel in figure.panels for series in panel.series):
        assert series.measure == "trained own"  # only clients of the round have trained
        assert experiment(series.run, "full", 0)["evaluate_trained"]
