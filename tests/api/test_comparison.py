"""Several methods over several seeds on the same clients."""

import statistics

import pytest
import torch

import fedme
from fedme.artifacts import local_models
from fedme.config.experiment import ConfigError
from fedme.core.key import Key
from fedme.results import verdicts
from fedme.results.statistics import holm, paired
from fedme.running import run

SHORT = {"rounds": 2, "train": {"epochs": 1}}
LEARNERS = [fedme.Local(**SHORT), fedme.FedAvg(**SHORT), fedme.FedMe(**SHORT)]


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] > 0).long()


def clients():
    return [fedme.Client(name, train=samples(40, i), model="dnn-8") for i, name in enumerate("abc")]


@pytest.fixture(scope="module")
def comparison():
    return fedme.compare(LEARNERS, clients(), seeds=3, quiet=True)


def test_the_numbers_are_those_of_the_runs(comparison):
    assert list(comparison) == ["local", "fedavg", "fedme"]
    lines = {line.name: line for line in comparison.lines()}
    means = {}
    for name, results in comparison.items():
        assert [result.seed for result in results] == [0, 1, 2]
        means[name] = {seed: result.accuracy.mean for seed, result in enumerate(results)}
        assert lines[name].means == means[name]
    tests = {name: paired(means[name], means["local"]) for name in ("fedavg", "fedme")}
    assert [lines[name].p for name in tests] == pytest.approx(holm([test.p for test in tests.values()]), nan_ok=True)
    assert lines["fedavg"].test == tests["fedavg"]
    judged = verdicts.over_seeds([result.verdicts(quiet=True) for result in comparison["fedavg"]])
    assert lines["fedavg"].overall == verdicts.overall(judged)
    frame = comparison.to_frame()
    assert frame.loc["fedavg", "accuracy"] == pytest.approx(statistics.fmean(means["fedavg"].values()))
    assert frame.loc["fedavg", "std"] == pytest.approx(statistics.stdev(means["fedavg"].values()))
    assert frame.loc["fedavg", "gained"] + frame.loc["fedavg", "lost"] + frame.loc["fedavg", "cannot_tell"] == 3


def test_the_summary(comparison):
    text = str(comparison.summary())
    mean, std = (100 * f([line.accuracy.mean for line in comparison["fedme"]]) for f in (statistics.fmean, statistics.stdev))
    assert f"{mean:.2f} ± {std:.2f}" in text
    assert all(word in text for word in ("gained", "lost", "cannot tell", "vs local", "paired t test over seeds against local"))
    assert "corrected for 2 methods" in text
    assert "<table>" in comparison._repr_html_()
    assert repr(comparison) == text


def test_one_test_is_not_corrected():
    text = str(fedme.compare([fedme.Local(rounds=1), fedme.FedAvg(rounds=1)], clients(), seeds=2, quiet=True).summary())
    assert "p: paired t test over seeds against local." in text


def test_clients_train_alone_once_for_all_methods(monkeypatch, tmp_path):
    trained, real = [], local_models.train_client

    def counted(data, *rest):
        trained.append(data.id)
        return real(data, *rest)

    monkeypatch.setattr(local_models, "train_client", counted)
    once = fedme.compare(LEARNERS, clients(), seeds=2, output=tmp_path, quiet=True)
    assert sorted(trained) == sorted("abc" * 2)  # once per seed, although two methods are compared with it
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        *("fedavg-s0", "fedavg-s1", "fedme-s0", "fedme-s1", "local-s0", "local-s1")
    ]
    monkeypatch.setattr(run, "_run_experiment", lambda *rest: pytest.fail("trained again"))
    again = fedme.compare(LEARNERS, clients(), seeds=2, output=tmp_path, quiet=True)
    assert str(again) == str(once)


def test_one_seed_and_other_names(tmp_path):
    learners = {"small steps": fedme.FedAvg(rounds=1, train={"lr": 0.01}), "large steps": fedme.FedAvg(rounds=1)}
    one = fedme.compare(learners, clients(), seeds=[7], quiet=True)
    assert one["small steps"][0].seed == 7
    assert one.reference == "small steps"
    assert "One seed has no test" in str(one)
    two = fedme.compare([fedme.FedAvg(rounds=1), fedme.FedAvg(rounds=1, weighting="uniform")], clients(), seeds=1, quiet=True)
    assert list(two) == ["fedavg", "fedavg-2"]
    one.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_plot(comparison):
    pyplot = pytest.importorskip(
        "matplotlib.pyplot", reason="needs matplotlib (pip install -c constraints.txt -e '.[dev-full]')"
    )
    axes = comparison.plot()
    assert [line.get_label() for line in axes.lines] == ["local", "fedavg", "fedme"]
    drawn = axes.lines[1].get_ydata()[-1]
    assert drawn == pytest.approx(100 * comparison.to_frame().loc["fedavg", "accuracy"])
    pyplot.close("all")


def test_regression_gains_are_smaller_errors():
    sites = [fedme.Client(name, train=(x := samples(40, i)[0], x.sum(1)), model="mlr") for i, name in enumerate("ab")]
    both = fedme.compare([fedme.Local(**SHORT), fedme.FedAvg(**SHORT)], sites, seeds=2, quiet=True)
    local, fedavg = ([result.scores().mean for result in both[name]] for name in ("local", "fedavg"))
    difference = both.lines()[1].test.mean
    assert difference == pytest.approx(statistics.fmean(local) - statistics.fmean(fedavg))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedme.compare([], clients()), "give a list of methods"),
        (lambda: fedme.compare([fedme.FedMe], clients()), "give a list of methods"),
        (lambda: fedme.compare(LEARNERS, clients(), seeds=0), "seeds: give a number >= 1"),
        (lambda: fedme.compare(LEARNERS, clients(), seeds=[1, 1]), "different seeds"),
        (lambda: fedme.compare({"a/b": LEARNERS[0]}, clients()), "'a/b' is the name of a directory too"),
    ],
)
def test_what_cannot_be_compared(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_note_is_printed_once_for_all_runs(capsys):
    sites = [fedme.Client(name, train=samples(24, i), model="mlr") for i, name in enumerate("abc")]
    fedme.compare([fedme.Local(rounds=1), fedme.FedAvg(rounds=1)], sites, seeds=2)
    said = capsys.readouterr().err
    assert said.count("note: 3 of 3 clients have fewer than 10 test samples") == 1
    assert "fedavg, seed 1 (4 of 4)" in said
    assert "loading" not in said  # the samples are in memory


def test_a_note_on_one_client(capsys):
    sites = [fedme.Client(name, train=samples(count, 0), model="mlr") for name, count in (("a", 24), ("b", 60))]
    fedme.Local(rounds=1).fit(sites)
    assert "1 of 2 clients has fewer than 10 test samples; in means over clients it counts like" in capsys.readouterr().err
