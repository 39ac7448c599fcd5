"""The papers' numbers are transcribed right, and every cell has an experiment that can be read at every scale."""

import pytest

from fedme.config.experiment import presets
from fedme.reproduction import catalogue
from fedme.reproduction.findings import ACCURACIES, every_run
from fedme.reproduction.planned_runs import experiment

RESULTS = catalogue.results()
NAMES = [
    *(f"fedme-table{i}" for i in range(2, 8)),
    *("fedme-figure3", "fedme-figure4", "fedme-rounds", "fedme-half"),
    *(f"fedme-ja-table{i}" for i in range(1, 5)),
    *("fedme-ja-figure2", "fedme-ja-figure3"),
    *(f"pfml-table{i}" for i in range(1, 7)),
    *(f"pfml-figure{i}" for i in range(2, 5)),
    "fml-table1",
    *(f"fml-figure{i}" for i in range(3, 7)),
]
SAMPLES = [f"{part} {number}" for part in ("train", "test") for number in ("clients", "total", "mean", "std", "max", "min")]


def test_all_results_are_there():
    assert list(RESULTS) == NAMES
    assert len(NAMES) == 30


# Read again in the papers' text, independently of the data files.
TARGETS = {
    ("pfml-table1", "FedAvg", "MNIST MLR"): (91.87, 0.02),
    ("pfml-table1", "pFedMe-PM", "Synthetic MLR"): (82.81, 0.03),
    ("pfml-table1", "PFML-PM", "Synthetic DNN"): (94.58, 0.06),
    ("pfml-table1", "PFML-GM", "MNIST DNN"): (96.70, 0.04),
    ("pfml-table2", "pFedMe-GM", "5 active clients"): (39.73, 0.02),
    ("pfml-table2", "PFML-PM", "10 active clients"): (78.24, 0.07),
    ("pfml-table3", "GM", "MLR (GM) + DNN (PM), lambda 30"): (80.59, None),
    ("pfml-table3", "PM", "MLR, lambda 20"): (90.71, None),
    ("pfml-table4", "K = 5", "MLR GM, 10 active"): (92.48, None),
    ("pfml-table4", "K = 1", "DNN PM, 5 active"): (99.08, None),
    ("pfml-table5", "lambda = 40", "MLR PM, 5 active"): (90.94, None),
    ("pfml-table5", "lambda = 20", "DNN GM, 10 active"): (85.00, None),
    ("pfml-table6", "beta = 3", "DNN GM, 5 active"): (85.36, None),
    ("pfml-table6", "beta = 4", "MLR PM, 10 active"): (90.76, None),
    ("fml-table1", "IID FedProx", "CIFAR-100 CNN1"): (32.41, None),
    ("fml-table1", "non-IID(2) FML", "CIFAR-10 CNN1"): (78.64, None),
    ("fml-table1", "non-IID(3) FedProx", "MNIST MLP"): (80.03, None),
    ("fml-table1", "non-IID(3) FML", "MNIST LeNet5"): (96.70, None),
    ("fedme-table2", "max", "Shakespeare"): (33044, None),
    ("fedme-table2", "mean", "FEMNIST"): (197.53, None),
    ("fedme-table3", "model 4", "CIFAR-10"): (1.2, 0.4),
    ("fedme-table4", "MAPPER", "CIFAR-10"): (61.29, 4.19),
    ("fedme-table4", "FedMe", "Shakespeare"): (44.71, 1.12),
    ("fedme-table4", "FedAvg", "FEMNIST"): (77.25, 3.99),
    ("fedme-table5", "model 4", "Shakespeare"): (42.55, 5.12),
    ("fedme-table6", "DML + MC", "CIFAR-10"): (86.73, 2.54),
    ("fedme-table6", "MT + DML", "FEMNIST"): (78.76, 2.26),
    ("fedme-table7", "pFedMe", "IID"): (33.14, 31.71),
    ("fedme-table7", "FedMe w/ fine-tuning", "alpha 0.5"): (90.96, 0.84),
    ("fedme-table7", "FedAvg w/o fine-tuning", "alpha 0.1"): (80.86, 1.95),
    ("fedme-ja-table1", "std", "Shakespeare training"): (5446.75, None),
    ("fedme-ja-table1", "min", "FEMNIST test"): (14, None),
    ("fedme-ja-table2", "MAPPER", "FEMNIST"): (82.07, None),
    ("fedme-ja-table2", "Centralized (fine-tune)", "Shakespeare"): (55.29, None),
    ("fedme-ja-table3", "1 layer", "Shakespeare"): (86, None),
    ("fedme-ja-table4", "FedMD", "Shakespeare"): (36.00, None),
    ("fedme-ja-figure2", "K = 2", "FEMNIST"): (87.08, None),
}


@pytest.mark.parametrize("place", TARGETS, ids=" ".join)
def test_targets_are_the_papers_numbers(place):
    name, row, column = place
    (cell,) = [cell for cell in RESULTS[name].cells if (cell.row, cell.column) == (row, column)]
    assert (cell.paper, cell.std) == TARGETS[place]


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_every_place_of_a_table_is_filled(result):
    for row in result.rows:
        for part in (row.paper, row.std, *(each for each in (row.run, row.measure) if not isinstance(each, str))):
            assert len(part) in (0, len(result.columns)), row.name
    assert bool(result.rows) != bool(result.panels)
    assert not any("/" in cell.column for cell in result.cells)  # --only ROW/COLUMN
    assert len({(cell.row, cell.column) for cell in result.cells}) == len(result.cells)
    for measure in {cell.measure for cell in result.cells}:
        kind, _, rest = measure.partition(" ")
        assert measure in [*ACCURACIES, *SAMPLES] or (
            kind in ("chosen", "seconds", "loss", "client", "clients", "trained", "best") and rest
        )


@pytest.mark.parametrize("scale", ["full", "small", "smoke"])
def test_every_run_is_an_experiment(scale):
    for run in every_run():
        config = experiment(run, scale, seed=3)
        assert config["seed"] == 3
    assert len(every_run()) > 200


@pytest.mark.parametrize("scale", ["full", "small"])
def test_alone_means_every_client_in_every_round(scale):
    for run in every_run():
        config = experiment(run, scale, seed=0)
        if config["method"]["name"] == "local":
            clients = config["data"].get("users") or config["partition"].get("clients") or len(config["data"]["sets"])
            assert config["train"].get("cohort", clients) >= clients, run


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_small_scale_fits_an_hour_with_two_processors(result):
    assert catalogue.minutes(result.runs, "small") / 2 <= 60


def test_presets_stand_behind_the_families():
    assert {family.preset for family in catalogue.families().values()} <= presets().keys()


def test_what_a_scale_shrinks_is_said():
    for family in catalogue.families().values():
        assert family.small.says
        assert family.smoke.says
        assert not family.full.set


def test_full_scale_is_the_papers_setting():
    mlr = experiment("pfml-synthetic-mlr/pfml", "full", 0)
    assert (mlr["rounds"], mlr["method"]["lam"], mlr["method"]["beta"], mlr["method"]["inner_steps"]) == (600, 20.0, 2.0, 3)
    assert (mlr["train"]["steps"], mlr["train"]["batch"], mlr["train"]["lr"], mlr["train"]["cohort"]) == (10, 200, 0.01, 10)
    fedme = experiment("femnist/fedme", "full", 0)
    assert fedme["rounds"] == 300
    assert fedme["method"]["clusters"] == {"0": 1, "150": 2, "225": 3, "275": 4}
    assert fedme["models"]["pool"] == ["cnn-1", "cnn-2", "cnn-3", "cnn-4"]
    fml = experiment("fml-mnist-mlp/noniid1-fedavg", "full", 0)
    assert (fml["rounds"], fml["partition"]["shards_per_client"], fml["train"]["epochs"]) == (200, 6, 5)


def test_small_scale_replaces_architectures_and_schedules():
    small = experiment("femnist/fedme", "small", 0)
    assert small["models"]["pool"][3] == "cnn-4(width=0.25)"
    assert small["method"]["clusters"] == {"0": 1, "30": 2, "45": 3, "55": 4}
    assert experiment("fml-cifar10-models/fml", "small", 0)["models"]["assign"]["4"] == "fml-cnn2(channels=32)"


def test_claims_name_results_and_measures():
    for claim in catalogue.claims():
        assert set(claim.results) <= RESULTS.keys()
        assert claim.pairs, claim.text
        for side in {side for pair in claim.pairs for side in pair}:
            run, _, measure = side.partition(" ")
            catalogue.words_of(run)
            kind = measure.partition(" ")[0]
            assert measure.removesuffix(" settled") in ACCURACIES or kind in ("client", "clients", "seconds", "trained"), side


def test_costs_are_words():
    assert catalogue.cost(0.5) == "a minute"
    assert catalogue.cost(10**6) == "months"
    one, other = "pfml-mnist-mlr/pfml", "pfml-mnist-mlr/local"
    assert catalogue.minutes([one, other], "small") == 2 * catalogue.minutes([one], "small") > 0
    assert catalogue.minutes(RESULTS["fedme-table2"].runs, "full") == 0  # only looks at data
