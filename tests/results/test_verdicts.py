"""Whether joining helps a client: join, do not join, cannot tell."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.results import verdicts, views
from fedme.results.statistics import Gain
from fedme.results.verdicts import Verdict, gains, over_folds, over_seeds, overall


def verdict(gain, client="a", task="classification", **others):
    about = {"model": "model", "arch": "mlr", "local_arch": "dnn-8", "samples": 50, "value": 0.9, "local": 0.8, "constant": 0.5}
    key = "rmse" if task == "regression" else "accuracy"
    return Verdict(client, task, **about, gains={key: gain} | others, trained=150)


BETTER = Gain(50, 0.1, 0.02, 0.18, 0.01, 90)
WORSE = Gain(50, -0.1, -0.18, -0.02, 0.01, 90)
UNKNOWN = Gain(50, 0.02, -0.05, 0.09, 0.6, 900)


@pytest.mark.parametrize(
    ("name", "text"),
    [("model", "personal"), ("best", "best round"), ("finetuned", "fine-tuned"), ("global", "global"), ("x", "x")],
)
def test_the_table_says_which_model_it_is(name, text, capsys):
    views.verdict_table("", [replace(verdict(BETTER), model=name)], "csv", Console())
    assert f",mlr ({text})," in capsys.readouterr().out


def test_words():
    assert verdict(BETTER).decision == "join"
    assert verdict(BETTER).words() == "joining helps: accuracy +10.0 points (95 % interval +2.0 to +18.0)"
    assert verdict(WORSE).decision == "do not join"
    assert verdict(WORSE).words().startswith("joining hurts: accuracy -10.0 points")
    open_verdict = verdict(UNKNOWN)
    assert open_verdict.decision == "cannot tell"
    assert open_verdict.words().endswith("about 900 test samples would show a difference of this size, there are 50")
    equal = verdict(Gain(50, 0.0, -0.1, 0.1, 1.0, None)).words()
    assert equal.endswith("practically equal on 50 test samples, which are too few to exclude a difference of 5 points")
    assert "by AUROC it is the other way round" in verdict(BETTER, auroc=Gain(50, -0.2, -0.3, -0.1, 0.001, 20)).words()


def test_the_summary_is_corrected_for_the_number_of_clients():
    one = overall([verdict(BETTER)])
    assert (one.better, one.worse, one.open) == (("a",), (), ())
    many = overall([verdict(BETTER, f"c{i}") for i in range(10)] + [verdict(UNKNOWN, f"u{i}") for i in range(20)])
    assert (len(many.better), len(many.worse), len(many.open)) == (0, 0, 30)
    sure = Gain(50, 0.3, 0.2, 0.4, 1e-6, 10)
    text = overall([*(verdict(sure, f"c{i}") for i in range(7)), *(verdict(UNKNOWN, f"u{i}") for i in range(23))]).words()
    assert "7 of 30 clients clearly better, 0 clearly worse, 23 cannot be told apart (corrected for 30 tests)" in text


def test_an_alarm_where_joining_hurts():
    lines = verdicts.alarms([verdict(BETTER), verdict(WORSE, "b")])
    assert len(lines) == 1
    assert lines[0].startswith("ALARM: client b: joining hurts: accuracy -10.0 points")
    assert "Its model trained alone (dnn-8) is better." in lines[0]
    assert "can be chance" not in lines[0]
    among_many = verdicts.alarms([verdict(WORSE, "b"), *(verdict(UNKNOWN, f"u{i}") for i in range(30))])
    assert among_many[0].endswith("Among 31 clients, one such result can be chance.")
    hundreds = verdicts.alarms([verdict(WORSE, "b"), *(verdict(UNKNOWN, f"u{i}") for i in range(399))])
    assert hundreds[0].endswith("Among 400 clients, about 10 such results can be chance.")
    surest = replace(WORSE, p=1e-9)
    ordered = verdicts.alarms([verdict(WORSE, "b"), verdict(surest, "c"), *(verdict(UNKNOWN, f"u{i}") for i in range(9))])
    assert [line.split()[2] for line in ordered] == ["c:", "b:"]


def test_gains_of_classes():
    draw = Key(0).torch()
    y = torch.randint(0, 3, (400,), generator=draw)
    good = torch.nn.functional.one_hot(y, 3) + 0.5 * torch.randn(400, 3, generator=draw)
    bad = torch.nn.functional.one_hot(y, 3) + 2.0 * torch.randn(400, 3, generator=draw)
    measured = gains("classification", good, bad, y)
    assert list(measured) == ["accuracy", "auroc"]
    assert all(gain.direction == 1 for gain in measured.values())
    assert measured["accuracy"].gain == pytest.approx(((good.argmax(1) == y).double() - (bad.argmax(1) == y).double()).mean())
    assert gains("classification", bad, good, y)["accuracy"].direction == -1
    assert "auroc" not in gains("classification", good[:5], bad[:5], torch.zeros(5, dtype=torch.int64))


def test_gains_of_numbers_are_in_the_unit_of_the_targets():
    draw = Key(1).torch()
    y = torch.randn(300, 1, generator=draw)
    near, far = y + 0.1 * torch.randn(300, 1, generator=draw), y + torch.randn(300, 1, generator=draw)
    plain, scaled = gains("regression", near, far, y)["rmse"], gains("regression", near, far, y, (40.0,))["rmse"]
    assert plain.direction == scaled.direction == 1
    assert scaled.gain == pytest.approx(40 * plain.gain)
    assert scaled.p == pytest.approx(plain.p)
    labels = y > 0
    assert gains("multi-label", y, -y, labels)["accuracy"].direction == 1


def test_a_model_that_diverged_is_worse():
    y = torch.zeros(20, 1)
    broken = torch.full((20, 1), math.inf)
    assert gains("regression", y, broken, y)["rmse"].direction == 1
    assert gains("regression", broken, y, y)["rmse"].direction == -1
    assert gains("regression", broken, broken, y)["rmse"].direction == 0
    assert "joining hurts" in verdict(gains("regression", broken, y, y)["rmse"], task="regression").words()


def test_several_seeds():
    runs = [[verdict(Gain(50, gain, gain - 0.15, gain + 0.15, 0.2, 10))] for gain in (0.10, 0.12, 0.11, 0.09)]
    (combined,) = over_seeds(runs)
    assert combined.seeds == 4
    assert combined.main.gain == pytest.approx(0.105)
    assert combined.decision == "join"
    assert "over 4 seeds" in combined.words()
    (varied,) = over_seeds([[verdict(Gain(50, gain, -1, 1, 0.9, 10))] for gain in (0.3, -0.2, 0.1, -0.1)])
    assert varied.decision == "cannot tell"
    assert over_seeds(runs[:1]) == runs[0]
    same = [[replace(run[0], tested="abc")] for run in runs]  # the same test samples in all runs: wide intervals stay wide
    assert over_seeds(same)[0].decision == "cannot tell"


def test_equal_gains_of_a_few_samples_say_little():
    """One more right sample of five in each of three seeds has no variance over seeds, but fifteen samples are few."""
    gain = verdicts.accuracy_gain(np.array([True] * 5), np.array([False] + [True] * 4))
    (combined,) = over_seeds([[verdict(gain)] for _ in range(3)])
    assert combined.main.gain == pytest.approx(0.2)
    assert combined.main.low < 0 < combined.main.high
    assert combined.main.p > 0.05
    (same,) = over_seeds([[verdict(verdicts.accuracy_gain(np.ones(5, bool), np.ones(5, bool)))] for _ in range(3)])
    assert not same.equivalent  # although all gains are exactly 0
    assert combined.words().endswith("test samples would show a difference of this size, there are 50")


def test_folds():
    tested = [Gain(10, gain, gain - 0.3, gain + 0.3, 0.2, 10) for gain in (0.2, 0.4, 0.3, 0.3, 0.3)]
    folds = [[replace(verdict(gain), samples=10, trained=32, tested=str(i))] for i, gain in enumerate(tested)]
    (combined,) = over_folds(folds)
    assert (combined.samples, combined.folds, combined.seeds) == (50, 5, 1)
    assert combined.main.gain == pytest.approx(0.3)
    assert combined.decision == "join"
    assert "over 5 folds" in combined.words()
    std, t = np.std([g.gain for g in tested], ddof=1), 2.776445
    reach = max(t * std * math.sqrt(1 / 5 + 10 / 32), 0.3 / math.sqrt(5))
    assert combined.main.low == pytest.approx(0.3 - reach, rel=1e-5)
    few = [*folds, [replace(verdict(tested[0], "small"), samples=1)]]  # a client that is tested in one fold only
    assert {v.client: v.folds for v in over_folds(few)} == {"a": 5, "small": 1}
    assert over_folds(few)[1].decision == "cannot tell"


def test_verdicts_of_folds_without_any_difference():
    """Every sample is tested once, in five folds: at most 6 % of the sites get a verdict."""
    draw = np.random.default_rng(8)
    for samples in (20, 50, 200):
        told = 0
        for _ in range(1500):
            hard, easy = draw.normal(size=samples), draw.uniform(-1.5, 0.5)
            ours, theirs = (hard + draw.normal(size=samples) > easy for _ in range(2))
            parts = np.array_split(np.arange(samples), 5)
            folds = [
                [replace(verdict(verdicts.accuracy_gain(ours[part], theirs[part])), samples=len(part), trained=3 * len(part))]
                for part in parts
            ]
            told += over_folds(folds)[0].decision != "cannot tell"
        assert told / 1500 <= 0.06


def test_equivalence():
    """An open verdict with an interval inside the margin says that there is no larger difference."""
    narrow = Gain(900, 0.01, -0.02, 0.04, 0.5, 9000)
    assert verdict(narrow).equivalent
    assert verdict(narrow).decision == "cannot tell"
    assert verdict(narrow).label == "cannot tell, within 5 points"
    assert verdict(narrow).words().endswith("no difference larger than 5 points: the two are equivalent within that")
    assert not verdict(UNKNOWN).equivalent
    assert verdict(UNKNOWN).label == "cannot tell"
    strict = replace(verdict(narrow), margin=0.03)
    assert not strict.equivalent
    assert verdict(Gain(900, 0.02, 0.01, 0.03, 0.01, 90)).label == "join"
    summary = overall([verdict(narrow, "a"), verdict(UNKNOWN, "b"), verdict(narrow, "c")])
    assert summary.equivalent == ("a", "c")
    assert "2 of these 3 are equivalent: no difference larger than 5 points." in summary.words()
    assert "All of these are equivalent: no" in overall([verdict(narrow, "a"), verdict(narrow, "c")]).words()
    assert "This one is equivalent: no" in overall([verdict(narrow)]).words()
    assert "equivalent" not in overall([verdict(UNKNOWN)]).words()
    rmse = replace(verdict(narrow, task="regression"), local=2.0)  # the margin is a share of the RMSE alone
    assert rmse.equivalent
    assert not replace(rmse, local=0.5).equivalent
    assert "no difference larger than 5 % of the RMSE alone" in rmse.words()
    assert verdicts.plain(verdict(narrow))["equivalent"] is True


def test_written_and_read(tmp_path):
    diverged = gains("regression", torch.full((9, 1), math.nan), torch.zeros(9, 1), torch.ones(9, 1))["rmse"]
    judged = [verdict(BETTER, auroc=UNKNOWN), verdict(diverged, "b", "regression")]
    verdicts.write(tmp_path, judged)
    again = verdicts.read(tmp_path)
    assert again[0] == judged[0]
    assert again[1].decision == "do not join"
    assert verdicts.read(tmp_path / "nothing") is None
    (tmp_path / verdicts.NAME).write_text("{}")
    with pytest.raises(RunError, match="fedme verdict"):
        verdicts.read(tmp_path)


def test_federations_without_any_difference():
    """2,000 federations of 10 sites: the verdicts of at most 6 % of the sites, and corrected of at most 6 % of federations."""
    draw = np.random.default_rng(7)
    told, federations = 0, 0
    for _ in range(2000):
        judged = []
        for site in range(10):
            samples = (20, 50, 200)[site % 3]
            hard, easy = draw.normal(size=samples), draw.uniform(-1.5, 0.5)
            ours, theirs = (hard + draw.normal(size=samples) > easy for _ in range(2))
            judged.append(verdict(verdicts.accuracy_gain(ours, theirs), str(site)))
        told += sum(each.decision != "cannot tell" for each in judged)
        p_values = [each.main.p for each in judged]
        federations += min(verdicts.holm(p_values)) < verdicts.LEVEL
    assert 0.02 <= told / 20000 <= 0.06
    assert federations / 2000 <= 0.06
