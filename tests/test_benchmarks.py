"""The benchmark's own arithmetic: the division that all sides share, and the table that is published. No peers, no timing."""

import importlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedme.core.data import Arrays, Scaling, Schema
from fedme.core.key import Key
from fedme.core.model import Arch
from fedme.datasets import DataOptions, Dataset, federate
from fedme.datasets.partitioners import PARTITIONS, Pool

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The scripts of the benchmark import each other by name, as they do when one of them is started."""
    before, known = set(sys.modules), dict(PARTITIONS)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    PARTITIONS.clear()
    PARTITIONS.update(known)
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def images():
    """As many samples as MNIST, one feature each."""
    labels = torch.arange(70_000) % 10
    rows = torch.arange(70_000)
    schema = Schema((1,), tuple("0123456789"))
    return Dataset("counted", Arrays(rows[:, None].float(), labels), schema, rows[:60_000], rows[60_000:])


def test_sizes_have_the_totals_that_were_published():
    found = module("division").sizes(clients=20, least=374, most=4641, steps=5240, batch=10)
    assert sum(found) == 52_400
    assert sum(-(-size // 10) for size in found) == 5240
    assert (len(found), found[0], found[-1]) == (20, 380, 4640)
    assert found == sorted(found)
    assert len(set(found)) == 20
    assert all(size % 10 == 0 for size in found)


@pytest.mark.parametrize(
    ("clients", "least", "most", "steps", "batch"),
    [(3, 1, 30, 5, 10), (4, 20, 120, 28, 10), (7, 5, 5, 7, 5), (50, 1, 999, 900, 4)],
)
def test_any_possible_totals_are_met(clients, least, most, steps, batch):
    found = module("division").sizes(clients, least, most, steps, batch)
    assert len(found) == clients
    assert sum(found) == steps * batch
    assert all(least <= size <= most and size % batch == 0 for size in found)


@pytest.mark.parametrize("steps", [19 * 38 + 464 - 1, 38 + 19 * 464 + 1])
def test_impossible_totals_are_refused(steps):
    with pytest.raises(ValueError, match="cannot make"):
        module("division").sizes(20, 374, 4641, steps, 10)


@pytest.mark.parametrize("val", [0.0, 0.12])
def test_clients_train_on_exactly_these_sizes_with_and_without_validation(images, val):
    partition = module("division").Unequal(val=val)
    first, again = (federate(images, partition, DataOptions(val=val), Key(0)) for _ in range(2))
    trained = [len(data.train) for data in first.clients.values()]
    assert sorted(trained) == module("division").sizes(20, 374, 4641, 5240, 10)
    assert trained != sorted(trained)  # the order says nothing about the size
    assert sum(len(data.test) for data in first.clients.values()) == 10_000
    everything = torch.cat([data.train.rows for data in first.clients.values()])
    assert len(everything.unique()) == 52_400
    assert everything.max() < 60_000
    assert all(bool(len(data.val)) == bool(val) for data in first.clients.values())
    assert first.partition.digest() == again.partition.digest()


def test_too_few_samples_are_refused(images):
    pool = Pool(images.source.labels, images.train[:1000], images.test)
    with pytest.raises(ValueError, match="samples are wanted"):
        module("division").Unequal()(pool, Key(0))


def test_natural_clients_have_whole_batches():
    division = module("division")
    experiment = module("session").parse(module("rows").synthetic(quick=True))
    assert isinstance(experiment.partition, division.WholeBatches)
    federation = module("session").assembly.gather(experiment)
    assert len(federation.clients) == 5
    assert all(len(data.train) % 10 == 0 and len(data.test) for data in federation.clients.values())


def test_peers_read_what_we_train_on(tmp_path):
    rows, session, export, protocol = (module(name) for name in ("rows", "session", "export", "protocol"))
    with session.Session.of(rows.synthetic(quick=True)) as ours:
        export.save_data(ours.federation, tmp_path / "data.npz")
        export.save_weights(ours, tmp_path / "weights.npz")
        data = protocol.read(str(tmp_path / "data.npz"))
        for theirs, mine in zip(data.clients, ours.federation.clients.values(), strict=True):
            np.testing.assert_array_equal(theirs.x, mine.train.inputs().numpy())
            np.testing.assert_array_equal(theirs.y, mine.train.y.numpy())
        assert len(data.test.y) == sum(len(mine.test) for mine in ours.federation.clients.values())
        network = module("networks").build("dense", protocol.read_weights(str(tmp_path / "weights.npz")))
        x = torch.from_numpy(data.test.x)
        assert torch.allclose(network(x), ours.server.model(x), atol=1e-6)
        count = ours.counted()
        assert count.samples == sum(len(mine.y) for mine in data.clients)
        assert count.steps * 10 == count.samples


def test_the_network_of_pfllib_has_its_size():
    assert sum(p.numel() for p in module("networks").cnn().parameters()) == 582_026


def test_every_row_can_be_configured():
    """All configurations are read, quick or not; nothing is loaded."""
    rows, session = module("rows"), module("session")
    for quick in (False, True):
        for row in rows.table(quick):
            session.parse(row.config | {"rounds": row.total})
            for against in row.against:
                assert against.kind != "ours" or session.parse(against.config)


def test_the_table_has_every_bar():
    bars = {(row.name, against.peer): against.bar for row in module("rows").table() for against in row.against}
    assert len(bars) == 18
    assert bars["fedavg-mlr", "fedjax"] == 4.5
    assert bars["fedme-dnn", "our FedAvg"] == 2.2
    assert bars["whole-run", "its training alone"] == 1.15
    assert {bars[name, "its training alone"] for name in ("fit-20", "fit-200", "run-20")} == {1.3}


def said(seconds, steps=10, samples=100, accuracy=0.9, **more):
    return {"seconds_per_round": seconds, "steps": steps, "samples": samples, "accuracy": accuracy, **more}


def row_of(name):
    row = next(row for row in module("rows").table() if row.name == name)
    return row, row.against[0]


def test_a_ratio_is_judged_by_medians_of_equal_work():
    judge = module("report").judge
    row, against = row_of("fedavg-mlr")
    line = judge(row, against, said([0.1, 0.1, 9.0]), said([0.5, 0.5, 0.1], accuracy=0.91))
    assert (line["ratio"], line["met"], line["note"]) == (pytest.approx(5.0), True, "")
    assert {"work", "ours_s", "peer", "peer_s", "ratio", "bar", "met"} <= line.keys()
    assert not judge(row, against, said([0.2]), said([0.5]))["met"]
    unequal = judge(row, against, said([0.1]), said([0.5], steps=11))
    assert (unequal["met"], unequal["note"]) == (False, "steps differ: 10 and 11")
    assert "accuracies differ" in judge(row, against, said([0.1]), said([0.5], accuracy=0.88))["note"]


def test_where_less_is_better_the_ratio_is_ours_to_theirs():
    row, against = row_of("fedme-mlr")
    line = module("report").judge(row, against, said([0.3]), said([0.2], accuracy=0.5))
    assert (line["ratio"], line["met"]) == (pytest.approx(1.5), True)


def test_a_whole_run_is_judged_by_means():
    row, against = row_of("whole-run")
    line = module("report").judge(row, against, said([0.22], None, None), said([0.1, 0.1, 0.4]))
    assert (line["ratio"], line["met"]) == (pytest.approx(1.1), True)


def test_the_share_of_the_peak_is_arithmetic_over_time():
    row, against = row_of("femnist-cnn2")
    line = module("report").judge(
        row, against, said([2.0], flop=100e9), said([], None, None, 0.0, gflops={"1": 50.0, "2": 100.0})
    )
    assert (line["ratio"], line["met"]) == (pytest.approx(0.5), True)
    assert line["peer_s"] == pytest.approx(1.0)


def test_both_files_are_written_and_a_failed_peer_is_a_line(tmp_path):
    report = module("report")
    row, against = row_of("fedavg-mlr")
    lines = [
        report.judge(row, against, said([0.1]), said([0.5])),
        report.unanswered(row, row.against[1], said([0.1]), "no such | package"),
    ]
    results = {
        "machine": report.machine(),
        "versions": {"fedme": "1"},
        "gemm": {"1": 90.0, "2": 180.0},
        "quick": False,
        "started": report.now(),
        "minutes": 1.0,
        "rows": lines,
        "networks": [],
    }
    report.write(results, tmp_path / "deep")
    read = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert [line["met"] for line in read["rows"]] == [True, None]
    page = (tmp_path / "deep" / "results.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert re.search(r"fedjax .* 0\.100 .* 0\.500 .* 5\.00 .* >= 4\.5 .* yes ", table[2])
    assert re.search(r"flower .* 0\.100 .* - .* - .* not measured .* 90\.0 ", table[3])
    assert "no such / package" in table[3]
    assert "180 GF/s on 2 thread(s)" in page


def test_an_answer_is_found_among_other_output(capsys):
    protocol = module("protocol")
    print("a peer says hello")
    protocol.answer("peer", "work", [0.25], 1, 2, 0.5)
    print("and goodbye")
    assert protocol.heard(capsys.readouterr().out)["seconds_per_round"] == [0.25]
    assert protocol.heard("nothing") is None


class OneByOne:
    """The pool of the plain loop, in this process."""

    def imap_unordered(self, function, tasks):
        return map(function, tasks)


@pytest.mark.parametrize("method", ["fedavg", "fedme"])
def test_the_plain_loop_computes_what_we_compute(method):
    plain, network = module("turns_plain"), module("against_plain").named("mlp-small")
    with module("session").Session.of(network.config(method, rounds=3, quick=True)) as ours:
        plain.plain = plain.prepared(ours)
        first = plain.plain.models.clone()
        for _ in range(3):
            ours.play()
            plain.plain.round(OneByOne())
        assert not torch.allclose(plain.plain.models, first, atol=1e-3)
        for index, client in enumerate(ours.task.members):
            down = ours.method.deliver(ours.task, ours.server, client)
            model, row = (down.own, index) if method == "fedme" else (down.model, 0)
            weights = torch.cat([value.flatten() for value in model.params.values()])
            assert torch.allclose(plain.plain.models[row], weights, atol=1e-4)
        theirs, mine = plain.plain.tested(), ours.tested()
    assert theirs["accuracy"] == pytest.approx(mine["accuracy"], abs=0.02)
    assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3)


def test_running_statistics_of_the_plain_loop_are_read_and_written():
    plain, network = module("turns_plain"), module("user_networks").MLPBatchNorm()
    row = torch.zeros(sum(value.numel() for value in plain.numbers(network)))
    network.norm.running_mean += 3.0
    plain.save(network, row)
    again = plain.load(module("user_networks").MLPBatchNorm(), row)
    assert torch.equal(again.norm.running_mean, network.norm.running_mean)
    assert all(map(torch.equal, again.parameters(), network.parameters()))


def test_a_client_that_adopts_its_guest_gets_the_mean_of_the_lender():
    plain = module("turns_plain")
    loop = plain.Plain(["a", "b", "c"], [], [], [], [], [], None, (), torch.empty(0), torch.empty(0))
    shares = loop.shares([1, 2, 1], {0: True, 1: False, 2: False})
    b = torch.tensor([0.0, 1, 0, 1, 0, 1]) / 3  # its own copy and the copies that "a" and "c" trained
    assert torch.allclose(shares, torch.stack([b, b, torch.tensor([0.0, 0, 1, 0, 1, 0]) / 2]))


def test_every_network_can_be_configured_and_computes():
    rows, session, shapes = module("user_rows"), module("session"), {"cifar10": (3, 32, 32), "synthetic": (60,)}
    assert len({network.name for network in rows.NETWORKS}) == len(rows.NETWORKS) == 22
    for network in rows.NETWORKS:
        built = getattr(module("user_networks"), network.spec)(**dict(network.options))
        text = network.data == "shakespeare"
        x = torch.zeros((2, 80), dtype=torch.uint8) if text else torch.zeros((2, *shapes[network.data]))
        assert built(x).shape == (2, 90 if text else 10)
        for quick, method in itertools.product((False, True), rows.METHODS):
            config = network.config(method, 9, quick)
            if network.optimizer == "sgd":
                experiment = session.parse(config)
                train = experiment.train
                assert (train.epochs, train.batch, train.momentum) == (network.epochs, 20, 0.9)


def test_images_are_divided_into_whole_batches():
    data, partition = module("user_rows").division("cifar10", quick=False)
    sizes = module("division").sizes(20, partition["least"], partition["most"], partition["steps"], 20)
    assert sum(sizes) == 3800
    assert sum(sizes) / (1 - data["val"]) <= data["limit"] - 20  # what validation takes, rounded up for every client


def test_flower_gets_the_networks_and_their_training():
    rows = {row.name: row for row in module("user_rows").flower_rows()}
    assert list(rows) == ["networks-mlp-flower", "networks-lenet-flower", "networks-resnet8-flower"]
    epochs = {"networks-resnet8-flower": 1}  # the slowest
    for row in rows.values():
        assert row.config["train"] == {"batch": 20, "lr": 0.01, "epochs": epochs.get(row.name, 2), "momentum": 0.9}
        assert row.config["rounds"] == row.total
        weights = [value.detach().numpy() for value in getattr(module("user_networks"), row.model)().parameters()]
        built = module("networks").build(row.model, weights)
        assert all(np.array_equal(p.detach().numpy(), value) for p, value in zip(built.parameters(), weights, strict=True))


def test_peers_scale_samples_as_we_do(tmp_path):
    x = torch.randint(0, 256, (6, 3, 2, 2), dtype=torch.uint8)
    scaling = Scaling(1 / 255, torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1))
    dataset = Dataset(
        "scaled", Arrays(x, torch.arange(6) % 2, scaling), Schema((3, 2, 2), ("a", "b")), *torch.arange(6).split(4)
    )
    federation = federate(dataset, PARTITIONS["iid"](clients=2), DataOptions(val=0.0), Key(0))
    module("export").save_data(federation, tmp_path / "data.npz")
    data = module("protocol").read(str(tmp_path / "data.npz"))
    for theirs, mine in zip(data.clients, federation.clients.values(), strict=True):
        np.testing.assert_allclose(theirs.x, mine.train.inputs().numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "x", "forward", "training"),
    [
        ("SmallMLP", torch.zeros(1, 60), 2 * (1200 + 200), 2 * (2 * 1200 + 3 * 200)),  # no gradient of the inputs
        ("EncoderViT", torch.zeros(1, 3, 32, 32), None, None),
        ("CharLSTM", torch.zeros((1, 80), dtype=torch.uint8), 2 * (80 * 1024 * (8 + 3 * 256) + 256 * 90), None),
    ],
)
def test_arithmetic_is_counted(spec, x, forward, training):
    flop, networks = module("turns_ours").flop, module("user_networks")
    counted = flop(Arch(getattr(networks, spec)), x, backward=False)
    if spec == "EncoderViT":
        forward = flop(Arch(networks.ViT), x, backward=False)  # the same network, written in another way
    assert counted == forward
    assert training is None or flop(Arch(getattr(networks, spec)), x, backward=True) == training


def depthwise():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.Conv2d(16, 16, 3, padding=1, groups=16))


def test_gradients_of_grouped_convolutions_are_counted_once():
    counted = module("turns_ours").flop(Arch(depthwise), torch.zeros(2, 3, 8, 8), backward=True)
    assert counted == 2 * 2 * 64 * (2 * 48 + 3 * 16 * 9)


def test_paths_are_read_from_the_explanation():
    lines = ["evaluate: 8 operations compiled", "train: 20 operations reference in workers (not compiled: why (so))"]
    assert module("turns_ours").paths([*lines, "train: 3 operations compiled"]) == ["reference in workers", "compiled"]


def sides_of(steps=10, loss=2.0, accuracy=0.4, **more):
    return {"steps": steps, "samples": 100, "loss": loss, "accuracy": accuracy, "flop": 1e9, "paths": ["compiled"], **more}


def judged(name, ours, plain, **theirs):
    found, network = module("user_report"), module("against_plain").named(name)
    answers = {"ours": sides_of(explanation=[]), "plain": sides_of(**theirs)}
    return found.judged(network, "fedavg", {"ours": ours, "plain": plain}, answers, answers)


def test_a_network_is_judged_by_medians_in_turns():
    line = judged("lenet", [1.0, 1.0, 4.0], [3.0, 2.0, 3.0])
    assert (line["ratio"], line["spread"], line["met"], line["note"]) == (3.0, [0.75, 3.0], True, "")
    assert line["gflops"] == {"ours": 1.0, "plain": pytest.approx(1 / 3)}
    assert not judged("lenet", [1.0], [2.4])["met"]


@pytest.mark.parametrize(("name", "ratio", "met"), [("tied", 0.97, True), ("tied", 0.96, False), ("lenet", 2.49, False)])
def test_a_bar_of_one_is_met_at_097(name, ratio, met):
    assert judged(name, [1.0], [ratio])["met"] is met


@pytest.mark.parametrize(
    ("theirs", "note"), [({"steps": 11}, "steps"), ({"loss": 2.1}, "losses after"), ({"accuracy": 0.5}, "accuracies")]
)
def test_a_network_with_unequal_work_or_results_is_not_met(theirs, note):
    line = judged("tied", [1.0], [9.0], **theirs)
    assert line["note"].startswith(note)
    assert not line["met"]
    assert judged("mlp-dropout", [1.0], [9.0], **theirs)["met"] is (note == "losses after")  # masks differ


def test_forms_are_judged_by_the_slowest():
    found = module("user_report").judged_forms
    answers = {key: {"paths": ["compiled"]} for key in "abc"}
    assert found("fedavg", {"a": [1.0], "b": [1.05], "c": [1.1]}, answers)["met"]
    slow = found("fedavg", {"a": [1.0, 1.0, 3.0], "b": [1.0, 1.0, 1.0], "c": [2.0, 2.0, 1.0]}, answers)
    assert (slow["ratio"], slow["met"], slow["note"]) == (2.0, False, "a 1.000 s, b 1.000 s, c 2.000 s")
    assert slow["spread"] == [pytest.approx(1 / 3), 2.0]


def test_networks_are_a_section_of_the_page():
    report, found = module("report"), module("user_report")
    skipped = found.empty(module("against_plain").named("lenet-adamw"), "fedme", "skipped: no such key")
    forms = found.judged_forms("fedavg", {"a": [1.0], "b": [1.05]}, {key: {"paths": ["compiled"]} for key in "ab"})
    lines = [judged("strided", [0.5], [1.0]), skipped, forms]
    results = {"machine": report.machine(), "versions": {}, "gemm": {"1": 4.0}, "quick": False, "started": "", "minutes": 1.0}
    page = report.markdown(results | {"rows": [], "networks": lines})
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert re.search(r"strided .* compiled .* 0\.500 .* 1\.000 .* 2\.00 .* 50 / 25 .* >= 1\.3 .* 1\.5, 65 % .* yes ", table[2])
    assert re.search(r"lenet-adamw .* not measured .* skipped: no such key", table[3])
    assert re.search(r"mlp-forms .* 1\.05 .* <= 1\.1 .* yes ", table[4])
    assert found.text(skipped, 4.0).endswith("skipped: no such key")
    assert "ratio 2.00 | spread 2.00 to 2.00 | % of peak 50 / 25 | bar >= 1.3" in found.text(lines[0], 4.0)


def test_sides_take_turns_and_begin_in_turns():
    played = []

    class Player:
        def __init__(self, name):
            self.name = name

        def round(self):
            played.append(self.name)
            return len(played)

    seconds = module("turns").play({"a": Player("a"), "b": Player("b")}, warm=1, rounds=2)
    assert "".join(played) == "baabba"
    assert seconds == {"a": [3, 6], "b": [4, 5]}


@pytest.mark.slow
def test_a_network_is_measured_from_beginning_to_end():
    line = module("against_plain").measure("mlp-small", "fedme", rounds=2, warm=1, quick=True)
    assert line["note"] == ""
    assert line["met"] is not None
    assert line["paths"]
    assert len(line["rounds"]["plain"]) == 2


@pytest.mark.slow
def test_a_side_that_fails_says_why():
    turns, sides = module("turns"), module("sides")
    with turns.started("turns_ours.py", {"config": {"rounds": 0}}) as side, pytest.raises(sides.Failed, match="rounds"):
        side.ready()


@pytest.mark.slow
def test_newcomers_are_measured_with_every_method():
    found = module("newcomers").accuracies(seed=0, rounds=1)
    assert next(iter(found)).startswith("Local")
    assert len(found) == 7
    assert all(0 <= value <= 100 for value in found.values())


def test_every_new_method_has_a_bar_with_both_networks():
    rows, session = module("method_rows"), module("session")
    for quick in (False, True):
        table = rows.method_rows(quick)
        assert len({row.name for row in table}) == len(table) == 24
        for row in table:
            (against,) = row.against
            assert (against.kind, against.at_most, against.same_work) == ("ours", True, False)
            mine, beside = session.parse(row.config), session.parse(against.config)
            assert beside.method.name() == "fedavg"
            assert row.name == f"methods-{mine.method.name()}-{'cnn' if 'CNN' in row.work else 'dnn'}"
            assert (mine.partition, mine.settings.data) == (beside.partition, beside.settings.data)  # the same samples


def test_fluke_is_asked_for_what_it_has():
    rows = module("method_rows").fluke_rows()
    assert {row.name.removeprefix("fluke-") for row in rows} == {
        *("fedavg", "ditto", "scaffold", "fedper", "fedrep", "lg-fedavg", "fedbn", "apfl", "fedamp", "fedproto")
    }
    assert all(row.against[0].bar == 8.0 for row in rows)


def test_methods_are_sections_of_the_page():
    report, rows = module("report"), module("method_rows")
    table = [module("rows").table()[0], rows.method_rows()[0], rows.fluke_rows()[0]]
    lines = [report.empty(row, row.against[0], "why") for row in table]
    results = {"machine": report.machine(), "versions": {}, "gemm": {}, "quick": False, "started": "", "minutes": 1.0}
    page = report.markdown(results | {"rows": lines, "networks": []})
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## Methods, as a multiple of our FedAvg",
        "## Methods, against fluke",
    ]
    assert page.count("| FedAvg MLR") == page.count("| Ditto") == page.count("| FedAvg, DNN") == 1


@pytest.mark.slow
def test_a_method_is_measured_beside_fedavg(tmp_path):
    row = next(row for row in module("method_rows").method_rows(quick=True) if row.name == "methods-fedproto-dnn")
    if not os.environ.get("FEDME_DATA"):
        pytest.skip("needs MNIST in FEDME_DATA")
    (line,) = module("bench").measure(row, tmp_path, peers=False, quick=True)
    assert line["ratio"] > 0
    assert line["note"] == ""


def accuracies_of(value, seed=0):
    """Three clients, whose accuracies are a number, 5 and 10 points more; the seed adds a point."""
    return {
        stage: {
            part: dict(zip("abc", (value[stage] + seed + more for more in (0, 5, 10)), strict=True)) for part in ("val", "test")
        }
        for stage in value
    }


def test_validation_chooses_rate_and_stage():
    found = module("method_table")
    fedavg, local = (found.Entry(name, "net", ("mlr",)) for name in ("fedavg", "local"))
    grid = {lr: accuracies_of({"round": 40.0, "finetuned": 60.0 + (lr == 0.3)}) for lr in found.RATES}
    grid[0.1]["finetuned"]["test"] = dict.fromkeys("abc", 100.0)  # test data chooses nothing
    assert found.chosen(fedavg, grid) == found.Choice(fedavg, 0.3, "finetuned")
    grid[0.03]["round"]["val"]["a"] = 200.0
    assert found.chosen(fedavg, grid) == found.Choice(fedavg, 0.03, "round")
    lines = [
        found.line(
            found.Choice(entry, 0.1, stage), [accuracies_of({"round": 50.0, "finetuned": 60.0}, seed) for seed in found.SEEDS]
        )
        for entry, stage in ((local, "round"), (fedavg, "finetuned"))
    ]
    assert lines[0].test.tolist() == [[50, 51, 52], [55, 56, 57], [60, 61, 62]]
    assert lines[0].means == lines[1].means == {"round": 56.0, "finetuned": 66.0}
    test, (mean, low, high) = found.difference(lines[1], lines[0])
    assert (mean, low, high) == pytest.approx((10, 10, 10))
    assert test.differences == pytest.approx((10, 10, 10))


@pytest.mark.slow
def test_methods_are_compared_on_tables_that_can_be_continued(tmp_path, monkeypatch, capsys):
    found, digits = module("method_table"), {"name": "digits", "limit": 400, "val": 0.2, "unlabeled": 40, "public": 40}
    common = {"data": digits, "partition": {"name": "dirichlet", "clients": 3, "alpha_label": 1.0, "seed": 0}}
    entries = tuple(found.Entry(name, "dnn-8", ({"name": "dnn-8"},)) for name in ("local", "fedavg", "fedproto"))
    monkeypatch.setattr(found, "WORKS", {"mnist": lambda folder, quick: found.Work("mnist", common, entries, 2)})
    monkeypatch.setattr(sys, "argv", ["method_table.py", "mnist", "--output", str(tmp_path)])
    monkeypatch.setattr(found, "RATES", (0.1,))
    pages = []
    for _ in range(2):
        found.main()
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert len([line for line in pages[0].splitlines() if line.startswith("| ")]) == 6  # head, rule, three methods, majority
    assert len(json.loads((tmp_path / "mnist.json").read_text())) == 3
