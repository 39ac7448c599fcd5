"""A report agrees with the records."""

import json
import math
import shlex
import shutil
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedme import report
from fedme.artifacts import outputs, saved_models
from fedme.core.atomic_files import RunError, sealed, unsealed, write_json
from fedme.report import cluster_view, cost_view, formats, gain_view, label_view, lineage_view
from fedme.report.run_data import families, read
from fedme.results import records, summary, verdicts
from fedme.results.statistics import Gain, accuracy_gain as statistics_of_gain
from fedme.results.verdicts import Verdict
from fedme_test_runs import do

KEY = ("personal", "round", "test", "last round")


@pytest.fixture(scope="module")
def story(runs):
    return report.story(families(runs))


def rows(folder, **wanted):
    return [row for row in records.read(folder) if wanted.items() <= row.items()]


def test_runs_that_differ_only_in_their_seed_are_one_family(story):
    assert [family["label"] for family in story["families"]] == ["digits-fedme", "digits-local", "hyp"]
    assert [(run["family"], run["seed"]) for run in story["runs"]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_curves_are_means_and_deviations_over_seeds_of_client_means(story, runs):
    line = story["curves"]["lines"][0]
    assert line["rounds"] == [0, 1, 2, 3]
    for t in line["rounds"]:
        means = [
            statistics.fmean(r["accuracy"] for r in rows(folder, round=t, model="personal", split="test", stage="round"))
            for folder in runs[:2]
        ]
        values = line["values"]["test"]["accuracy"]
        assert values["mean"][t] == pytest.approx(statistics.fmean(means), abs=1e-6)
        assert values["std"][t] == pytest.approx(statistics.stdev(means), abs=1e-6)
    sent = [{(r["round"], r["client"]): r["bytes_up"] + r["bytes_down"] for r in records.read(f)} for f in runs[:2]]
    assert line["megabytes"][-1] == pytest.approx(statistics.fmean(sum(traffic.values()) for traffic in sent) / 1e6, abs=1e-6)
    single = next(line for line in story["curves"]["lines"] if line["family"] == 2)
    assert set(single["values"]["test"]["accuracy"]["std"]) == {None}


def test_every_client_has_its_accuracy_and_its_gain_over_local(story, runs):
    run, local = story["runs"][0], story["runs"][2]
    assert run["local"] == 2  # the same seed, so the same samples
    assert story["runs"][1]["local"] == 3
    assert local["local"] is None
    assert run["comparable"] == [2, 4]
    last = {r["client"]: r["accuracy"] for r in rows(runs[0], round=3, model="personal", split="test", stage="round")}
    assert run["results"]["test round"] == [pytest.approx(last[client], abs=1e-5) for client in run["clients"]]


def test_the_exchange_is_what_the_method_recorded(story, runs):
    recorded = {(r["round"], r["client"]): r["notes"] for r in records.read(runs[0]) if r.get("notes")}
    run = story["runs"][0]
    assert len(recorded) == 20
    for (t, client), notes in recorded.items():
        place = run["clients"].index(client)
        assert run["clients"][run["exchange"]["lenders"][t][place]] == notes["lender"]
        assert run["exchange"]["adopted"][t][place] == notes["adopts"]
    assert story["runs"][2]["exchange"] is None


def test_architectures_follow_what_was_evaluated_and_begin_with_the_first(story, runs):
    lineage = story["runs"][0]["lineage"]
    for row in rows(runs[0], model="personal", split="test", stage="round"):
        place = story["runs"][0]["clients"].index(row["client"])
        assert lineage["names"][lineage["held"][row["round"] + 1][place]] == row["arch"]
    assert [lineage["names"][arch] for arch in lineage["held"][0]] == ["mlr", "dnn-8", "mlr", "dnn-8", "mlr"]


def test_architectures_between_evaluations_are_known_from_adoptions(runs, tmp_path):
    """With every other evaluation left out, the notes on adoptions lead to the same."""
    complete = lineage_view.architectures(read(runs[0]))
    copy = shutil.copytree(runs[0], tmp_path / "sparse")
    kept = [row for row in records.read(copy) if row["stage"] not in ("round", "finetuned") or row["round"] == 3]
    (copy / records.NAME).write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert lineage_view.architectures(read(copy)) == complete


def test_adopting_takes_over_the_line_of_the_lender(runs):
    run = read(runs[0])
    began = lineage_view.origins(run)
    for t in run.rounds:
        for client in run.clients:
            notes = run.notes[t][client]
            source = notes["lender"] if notes["adopts"] else client
            assert began[t + 1][client] == began[t][source]


rounds_of_clusters = st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=6)


@given(rounds_of_clusters)
def test_renumbering_keeps_the_groups(rounds):
    for before, after in zip(rounds, cluster_view.renumbered(rounds), strict=True):
        assert before.keys() == after.keys()
        assert all((before[a] == before[b]) == (after[a] == after[b]) for a in before for b in before)


def test_renumbering_undoes_a_swap():
    first = {"a": 0, "b": 0, "c": 1}
    swapped = {"a": 1, "b": 1, "c": 0}
    assert cluster_view.renumbered([first, swapped]) == [first, first]


def test_clusters_of_models_that_the_server_keeps_are_not_renumbered(story):
    assert story["runs"][0]["clusters"]["renumbered"]
    hyp = story["runs"][4]["clusters"]
    assert hyp is None or not hyp["renumbered"]


def test_labels_add_up(story, runs):
    labels = json.loads((runs[0] / "labels.json").read_text())
    counted = story["runs"][0]["labels"]
    assert [sum(row) for row in counted["counts"]] == [sum(parts) for parts in counted["parts"]]
    assert sum(map(sum, counted["counts"])) == sum(sum(c["labels"].values()) for c in labels["clients"].values())


def test_words_name_the_worst_client_and_say_what_is_compared(story):
    text = {paragraph["about"]: " ".join(paragraph["lines"]) for paragraph in story["summary"]["paragraphs"]}
    assert "best first: " in text["In short"]
    assert "digits-fedme: Compared with Local, seed 0: " in text["In short"]
    run = story["runs"][0]
    worst = min(range(5), key=lambda i: run["results"]["test round"][i])
    assert f"The worst clients are {run['clients'][worst]} (" in text["More about digits-fedme"]
    assert "5 clients clearly better" in text["More about digits-fedme"]
    assert "20 models were lent" in text["More about digits-fedme"]
    assert "Nothing was sent." in text["More about digits-local"]
    assert "±" in text["More about digits-fedme"]


def test_a_run_without_local_says_so(runs):
    paragraphs = report.story(families(runs[:1]))["summary"]["paragraphs"]
    assert "the gain over training alone is unknown" in " ".join(paragraphs[0]["lines"])


def test_the_page_is_one_file_without_a_network_and_the_same_every_time(runs, tmp_path):
    report.write(runs, tmp_path / "a.html")
    report.write(runs, tmp_path / "deep" / "b.html")
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "deep" / "b.html").read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in text


@pytest.mark.slow
def test_thirty_clients_and_rounds_fit_into_300_kilobytes(run_preset, tmp_path):
    words = ["rounds=30", "partition.clients=30", "data.limit=600", "train.epochs=1", "finetune.epochs=0"]
    folders = [run_preset(tmp_path / "fedme", "digits-fedme", *words), run_preset(tmp_path / "local", "digits-local", *words)]
    report.write(folders, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 300_000


def test_a_run_from_before_labels_were_recorded(runs, tmp_path):
    old = shutil.copytree(runs[0], tmp_path / "old")
    (old / "labels.json").unlink()
    run = report.story(families([old, runs[2]]))["runs"][0]
    assert run["labels"] is None
    assert run["local"] == 1  # by the configuration
    assert run["clients"] == ["0", "1", "2", "3", "4"]


def test_an_unfinished_run(runs, tmp_path):
    half = shutil.copytree(runs[0], tmp_path / "half")
    (half / "summary.json").unlink()
    lines = (half / records.NAME).read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["round"] < 2]
    (half / records.NAME).write_text("".join(kept) + '{"round": 2, "cli')
    story = report.story(families([half]))
    assert "Unfinished: seed 0 has completed 2 of 4 rounds." in story["notes"]
    assert story["families"][0]["next"][0]["command"] == f"fedme resume {shlex.quote(str(half))}"
    (half / records.NAME).write_text("")
    with pytest.raises(RunError, match="nothing to report"):
        families([half])


def test_errors(runs, tmp_path):
    with pytest.raises(RunError, match="at least one run"):
        families([])
    with pytest.raises(RunError, match="not a run directory"):
        families([tmp_path])
    twin = shutil.copytree(runs[0], tmp_path / "twin")
    with pytest.raises(RunError, match="same experiment with the same seed"):
        families([runs[0], twin])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        report.write(runs[:1], tmp_path / "file" / "report.html")
    (twin / "labels.json").write_text("{")
    with pytest.raises(RunError, match="labels.json: cannot be read"):
        families([twin])


def test_malicious_clients_are_in_no_mean(tmp_path):
    folder = do(tmp_path / "attacked", "method=fedavg", "attack.clients=['2']", "attack.kind=non-finite")
    story = report.story(families([folder]))
    means = [r for r in summary.read(folder)["results"] if (r["split"], r["selection"]) == ("test", "last round")]
    personal = next(r for r in means if r["model"] == "personal" and r["stage"] == "round")
    run = read(folder)
    assert "2" in run.clients
    assert set(run.last(("personal", "round", "test"))) == set(run.clients) - {"2"}
    mean = statistics.fmean(score["accuracy"] for score in run.last(("personal", "round", "test")).values())
    assert mean == pytest.approx(personal["accuracy"]["client_mean"])
    assert "Malicious by configuration ([attack]), excluded from all means: client 2." in json.dumps(story)


def verdict(client, gain, low, high, p, **changes):
    about = {"model": "model", "arch": "mlr", "local_arch": "dnn-8", "samples": 40, "value": 0.8, "local": 0.8 - gain}
    return replace(
        Verdict(client, "classification", **about, constant=0.5, gains={"accuracy": Gain(40, gain, low, high, p, 90)}),
        **changes,
    )


JUDGED = [
    verdict("0", 0.2, 0.1, 0.3, 1e-5),
    verdict("1", -0.2, -0.3, -0.1, 1e-5),
    verdict("2", 0.01, -0.03, 0.04, 0.6),
    verdict("3", 0.0, -math.inf, math.inf, math.nan),
]


def test_verdicts_per_client(runs, tmp_path):
    alone = report.story(families([runs[0]]))["families"][0]["gain"]
    assert "`fedme verdict" in alone["missing"]
    assert "trained alone" in report.story(families(runs))["families"][1]["gain"]["missing"]
    folder = shutil.copytree(runs[0], tmp_path / "run")
    verdicts.write(folder, JUDGED)
    story = report.story(families([folder]))
    (judged,) = story["families"][0]["gain"]["compared"]
    clients = {int(client["client"]): client for client in judged["clients"]}
    assert [clients[i]["side"] for i in range(4)] == ["gained", "lost", "not clear", "not clear"]
    assert [clients[i]["label"] for i in range(4)] == ["join", "do not join", "cannot tell, within 5 points", "cannot tell"]
    assert (clients[1]["gain"], clients[1]["low"], clients[1]["high"]) == (-0.2, -0.3, -0.1)
    assert (clients[3]["low"], clients[3]["high"]) == (None, None)  # an interval without ends
    assert 4 not in clients
    assert judged["words"] == verdicts.overall(JUDGED).words()
    assert "1 of 4 clients clearly better, 1 clearly worse, 2 cannot be told apart" in judged["words"]
    assert judged["alarms"] == verdicts.alarms(JUDGED)
    assert judged["words"] in story["summary"]["paragraphs"][0]["lines"]
    assert story["families"][0]["tiles"][1]["parts"] == [["gained", 1], ["lost", 1], ["not clear", 2]]
    first = story["families"][0]["next"][0]
    assert (first["link"], first["client"]) == ("gain", "1")
    assert "1 client lost by joining: client 1 (-20.0 points)" in first["text"]
    verdicts.write(folder, [replace(v, folds=5) for v in JUDGED[:1]], verdicts.FOLDS)
    (over,) = report.story(families([folder]))["families"][0]["gain"]["compared"]  # over folds is the stronger verdict
    assert (over["over"], len(over["clients"])) == ("5 folds", 1)
    many = gain_view.Comparison("verdict", "", [replace(JUDGED[1], client=str(i)) for i in range(30)])
    assert len(many.alarms()) == 6
    assert many.alarms()[-1].startswith("ALARM: joining hurts 25 more clients")
    unsure = verdict("9", -0.1, -0.19, -0.01, 0.03)
    assert unsure.decision == "do not join"
    comparison = gain_view.Comparison("verdict", "", [*JUDGED, unsure])
    assert comparison.overall.worse == ("1",)
    assert len(comparison.alarms()) == 1  # as many as the page counts as lost


def test_models_worse_than_the_most_frequent_label_are_the_first_step(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    labels = unsealed(json.loads((folder / "labels.json").read_text()))
    for of_client in labels["clients"].values():
        of_client["labels"] = dict.fromkeys(of_client["labels"], 0) | {next(iter(of_client["labels"])): 10}
    write_json(folder / "labels.json", sealed(labels))
    first, *_ = report.story(families([folder]))["families"][0]["next"]
    assert first["text"].startswith("The models are worse than always predicting the most frequent label.")
    assert "most frequent label" not in json.dumps(report.story(families(runs[:1]))["families"][0]["next"])


def test_gains_over_a_run_of_local_are_those_of_the_answers_to_every_sample(runs, monkeypatch):
    """The gain of the records, and the interval of the paired test on the outputs that both runs kept."""
    two = report.story(families(runs))["families"][0]["gain"]["compared"][0]
    assert (two["against"], two["over"]) == ("Local, seed 0", "")  # the spread of two seeds says nothing
    monkeypatch.setattr(gain_view, "SEEDS", 2)
    compared = report.story(families(runs))["families"][0]["gain"]["compared"]
    assert [one["key"] for one in compared] == ["round", "finetuned"]
    single = report.story(families([runs[0], runs[2]]))["families"][0]["gain"]["compared"][0]
    ours, alone = (
        {r["client"]: r for r in rows(folder, round=3, model="personal", split="test", stage="round")}
        for folder in (runs[0], runs[2])
    )
    for client in single["clients"]:
        name = client["client"]
        assert client["gain"] == pytest.approx(ours[name]["accuracy"] - alone[name]["accuracy"])
        right = []
        for folder in (runs[0], runs[2]):
            kept = outputs.read(saved_models.folder_of(folder, name))
            right.append((kept["test/model"].argmax(1) == kept["test/targets"]).numpy())
        expected = statistics_of_gain(*right)
        assert (client["low"], client["high"]) == pytest.approx((expected.low, expected.high), rel=1e-3)
    seeds = {c["client"]: c["gain"] for c in compared[0]["clients"]}
    other = {
        c["client"]: c["gain"]
        for c in report.story(families([runs[1], runs[3]]))["families"][0]["gain"]["compared"][0]["clients"]
    }
    for client in single["clients"]:  # over both seeds it is the mean
        assert seeds[client["client"]] == pytest.approx((client["gain"] + other[client["client"]]) / 2)
    assert compared[0]["over"] == "2 seeds"


def test_without_the_answers_a_gain_has_no_interval(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "run")
    for path in copy.glob("clients/*/outputs.safetensors"):
        path.unlink()
    gain = report.story(families([copy, runs[2]]))["families"][0]
    compared = gain["gain"]["compared"][0]
    assert {client["side"] for client in compared["clients"]} == {"not clear"}
    assert all(client["low"] is None and client["gain"] is not None for client in compared["clients"])
    assert "cannot be told" in compared["words"]
    assert "parts" not in gain["tiles"][1]


def test_the_tiles_say_quality_gain_worst_client_and_cost(story, runs):
    quality, gain, worst, cost = story["families"][0]["tiles"]
    results = [summary.read(folder) for folder in runs[:2]]
    means = [
        next(r for r in result["results"] if (r["model"], r["stage"], r["split"], r["selection"]) == KEY)["accuracy"][
            "client_mean"
        ]
        for result in results
    ]
    assert quality["value"] == f"{100 * statistics.fmean(means):.1f} ± {100 * statistics.stdev(means):.1f} %"
    assert any("most frequent label" in line for line in quality["details"])
    assert gain["value"].endswith(" points")
    assert sum(count for _, count in gain["parts"]) == 5
    run = story["runs"][0]
    assert worst["client"] == run["clients"][min(range(5), key=lambda i: run["results"]["test round"][i])]
    sent = statistics.fmean(result["bytes_up"] + result["bytes_down"] for result in results)
    assert cost["value"] == f"{sent / 1e3:.0f} kB" if sent < 1e6 else cost["value"].endswith("MB")
    assert any(" at the clients, " in line for line in cost["details"])
    assert any("parameters per model" in line for line in cost["details"])


def test_parameters_are_those_of_the_saved_models(runs):
    run = read(runs[0])
    known = cost_view.parameters(run)
    assert sum(clients for _, clients in known.values()) == 5
    for arch, (parameters, _) in known.items():
        assert parameters == {"mlr": 64 * 10 + 10, "dnn-8": 64 * 8 + 8 + 8 * 10 + 10}[arch]


def test_the_report_opens_on_the_run_that_has_an_exchange(runs):
    assert report.story(families([runs[2], runs[4], runs[0]]))["first"] == 2
    assert report.story(families([runs[2], runs[4]]))["first"] == 1  # it sends something
    assert report.story(families([runs[2]]))["first"] == 0


def test_the_title_names_methods_clients_and_data(story, runs):
    assert story["title"] == "FedMe, Local and HypCluster, 5 clients on digits"


def test_notes_that_bear_on_the_results_stand_at_the_top(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "noted")
    environment = unsealed(json.loads((copy / "environment.json").read_text()))
    write_json(copy / "environment.json", sealed(environment | {"notes": ["all models are in one cluster"]}))
    noted = report.story(families([copy]))
    assert noted["notes"][-1] == "all models are in one cluster"
    both = report.story(families([copy, runs[2]]))
    assert both["notes"][-1] == "digits-fedme: all models are in one cluster"


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=12))
def test_the_order_by_similarity_has_every_client_once(counts):
    assert sorted(label_view.similar(np.array(counts, dtype=float))) == list(range(len(counts)))


def test_similar_clients_stand_side_by_side():
    order = label_view.similar(np.array([[9, 0, 0], [0, 9, 1], [8, 1, 0], [0, 8, 2], [0, 0, 9]], dtype=float))
    assert abs(order.index(0) - order.index(2)) == 1
    assert abs(order.index(1) - order.index(3)) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (999_999, "1.00 MB"), (2_966_100_000, "2.97 GB"), (12_345_678, "12.3 MB")],
)
def test_sizes_have_a_unit_that_fits(value, text):
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.50 s"), (119, "119 s"), (120, "2.00 min"), (90000, "25.0 h"), (1e6, "11.6 days")]
)
def test_times_have_a_unit_that_fits(value, text):
    assert formats.duration(value) == text
