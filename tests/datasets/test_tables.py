"""Tables as sites have them: gaps, unknown categories, other codings, other units, semicolons."""

import math

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, strategies as st

from fedme.core.key import Key
from fedme.datasets import DataError, DataOptions, federate, preprocessing
from fedme.datasets.data_files import read_file
from fedme.datasets.partitioners import Natural
from fedme.datasets.preprocessing import Preparation, standard_scaling
from fedme.datasets.python_objects import read_object
from fedme.datasets.raw_samples import parse_column, to_column
from fedme.datasets.user_data import ClientSamples, UserDataset, unseen_client_dataset

NAN = math.nan


def site(seed=0, count=40, label=("no", "yes"), **columns):
    draw = np.random.default_rng(seed)
    frame = {"age": draw.normal(55, 10, count), "chol": draw.normal(240, 30, count), "sex": draw.choice(["f", "m"], count)}
    return pandas.DataFrame({**frame, **columns, "ill": draw.choice(label, count)})


def with_gaps(frame, column, rows):
    frame = frame.copy()
    frame.loc[rows, column] = None
    return frame


def federation(options=UserDataset(), data=DataOptions(), renamed=(), **frames):
    clients = {
        name: ClientSamples(read_object(frame, "ill", f"client {name}"), rename=dict(renamed).get(name, {}))
        for name, frame in frames.items()
    }
    return federate(options.combine("given", clients), Natural(), data, Key(0))


def test_gaps_are_filled_with_the_median_of_the_sites_own_training_part():
    rows = [1, 5, 20]
    a, b = with_gaps(site(1), "chol", rows), site(2).assign(chol=lambda f: f.chol + 100)
    made = federation(UserDataset(missing="median", scale="none"), a=a, b=b)
    data = made.clients["a"]
    value = Preparation.read(data.preprocessing).columns[1].value
    train = a["chol"].iloc[data.train.rows.numpy()]
    assert value == pytest.approx(train.median(), rel=1e-6)
    chol = made.dataset.source.x[:40, 1]
    assert chol[rows].tolist() == pytest.approx([value] * 3)
    assert torch.isfinite(made.dataset.source.x).all()
    kept = [row for row in range(40) if row not in rows]
    assert torch.allclose(chol[kept], torch.tensor(a["chol"].iloc[kept].to_numpy(), dtype=torch.float32))
    assert Preparation.read(made.clients["b"].preprocessing).columns[1].value > value + 50


def test_mean_and_given_values():
    a = with_gaps(with_gaps(site(1), "chol", [1]), "age", [2])
    made = federation(UserDataset(missing={"chol": "mean", "*": "median"}, fill={"age": 50.0}, scale="none"), a=a, b=site(2))
    data = made.clients["a"]
    assert made.dataset.source.x[2, 0] == 50.0
    train = a["chol"].iloc[data.train.rows.numpy()]
    assert float(made.dataset.source.x[1, 1]) == pytest.approx(train.mean(), rel=1e-6)
    other = federation(UserDataset(missing={"chol": "mean", "*": "median"}, fill={"age": 50.0}, scale="none"), a=site(3), b=a)
    assert other.dataset.source.x[42, 0] == 50.0  # the same value at every client


def test_an_indicator_is_a_feature_that_is_not_scaled():
    a = with_gaps(site(1), "chol", [1, 5])
    made = federation(UserDataset(missing="indicator"), a=a, b=site(2))
    x = made.dataset.source.inputs(torch.arange(80))
    assert made.dataset.schema.shape == (5,)  # age, chol, two categories, and the gap of chol: age has none
    assert x[:, 4].nonzero().flatten().tolist() == [1, 5]
    assert set(x[:, 4].tolist()) == {0.0, 1.0}
    assert [c.missing for c in Preparation.read(made.dataset.schema.preprocessing).columns[:2]] == ["median", "indicator"]


def test_a_column_without_any_value_at_a_site_becomes_the_shared_mean():
    made = federation(UserDataset(missing="median"), a=site(1).assign(chol=None), b=site(2))
    x = made.dataset.source.inputs(torch.arange(40))
    assert torch.allclose(x[:, 1], torch.zeros(40), atol=1e-5)


def test_scaling_is_that_of_the_values_that_exist():
    made = federation(UserDataset(missing="median"), a=with_gaps(site(1), "chol", list(range(20))), b=site(2))
    rows = torch.cat([data.train.rows for data in made.clients.values()]).numpy()
    values = pandas.concat([with_gaps(site(1), "chol", list(range(20))), site(2)])["chol"].to_numpy(dtype=float)[rows]
    scale = Preparation.read(made.dataset.schema.preprocessing).scale
    assert scale.mean[1] == pytest.approx(np.nanmean(values), rel=1e-5)
    assert scale.std[1] == pytest.approx(np.nanstd(values), rel=1e-5)


def test_a_rare_category_is_not_a_large_number():
    """Divided by its standard deviation, one row in a thousand would be 32, and a step of training with it goes astray."""
    rare = site(1, 1000).assign(sex=["x"] + ["f", "m"] * 499 + ["f"])
    made = federation(UserDataset(missing="indicator"), a=with_gaps(rare, "chol", [5]), b=site(2, 100))
    x = made.dataset.source.inputs(torch.arange(1100))
    assert set(x[:, 2:].unique().tolist()) == {0.0, 1.0}  # three categories, and the gap
    assert x[:, :2].abs().max() < 6
    scale = Preparation.read(made.dataset.schema.preprocessing).scale
    assert (scale.mean[2:], scale.std[2:]) == ((0.0,) * 4, (1.0,) * 4)


def test_gaps_among_categories_are_a_category_and_unknown_ones_are_other():
    a = with_gaps(site(1), "sex", [3])
    made = federation(UserDataset(missing="median"), a=a, b=site(2))
    preparation = Preparation.read(made.clients["a"].preprocessing)
    assert preparation.columns[2].categories == ("f", "m", "")
    new = read_object(site(3, 3).assign(sex=["f", "x", None]), "ill", "new", labelled=False)
    assert preparation.to_tensors(new)[:, 2:].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert preparation.unknown_categories(new) == {"sex": ["x"]}
    assert not preparation.unusable(new)


def test_gaps_are_errors_by_default_with_the_remedy():
    with pytest.raises(
        DataError, match=r"client a: sample 3 .* in 'chol' is empty \(2 of 40 samples.*data.missing = \"median\""
    ):
        federation(a=with_gaps(site(1), "chol", [3, 7]), b=site(2))
    with pytest.raises(DataError, match="data.missing: unknown column 'choll'; did you mean 'chol'"):
        federation(UserDataset(missing={"choll": "mean"}), a=site(1))
    with pytest.raises(DataError, match="data.fill: 'age' has a value, but data.missing says that its gaps are errors"):
        federation(UserDataset(fill={"age": 1.0}), a=site(1))


def test_numbers_may_stand_for_gaps():
    zero = site(1)
    zero.loc[[2, 9], "chol"] = 0
    made = federation(UserDataset(missing="median", na_values={"chol": (0.0,)}), a=zero, b=site(2))
    again = federation(UserDataset(missing="median"), a=with_gaps(zero, "chol", [2, 9]), b=site(2))
    assert torch.equal(made.dataset.source.x, again.dataset.source.x)
    preparation = Preparation.read(made.clients["a"].preprocessing)
    assert preparation.to_tensors(read_object(zero[:3], "ill", "new", labelled=False))[2, 1].isnan()


def test_rows_that_cannot_be_used_are_named():
    made = federation(UserDataset(missing={"chol": "median"}), a=with_gaps(site(1), "chol", [3]), b=site(2))
    preparation = Preparation.read(made.clients["a"].preprocessing)
    bad = site(4, 5).astype({"age": object})
    bad.loc[1, "age"], bad.loc[2, "age"], bad.loc[3, "chol"] = "old", None, None
    raw = read_object(bad, "ill", "new", labelled=False)
    assert preparation.unusable(raw) == {1: "in 'age' must be a number, got 'old'", 2: "in 'age' is empty"}


def test_an_unseen_client_fills_with_its_own_values():
    made = federation(UserDataset(missing="median"), a=with_gaps(site(1), "chol", [3]), b=site(2))
    schema = made.dataset.schema
    new = with_gaps(site(5).assign(chol=lambda f: f.chol + 100), "chol", [0])
    samples = ClientSamples(read_object(new, "ill", "client n"))
    dataset = unseen_client_dataset(schema, Preparation.read(made.clients["a"].preprocessing), "n", samples)
    data = federate(dataset, Natural(), DataOptions(), Key(0)).clients["n"]
    value = Preparation.read(data.preprocessing).columns[1].value
    assert value == pytest.approx(new["chol"].iloc[data.train.rows.numpy()].median(), rel=1e-6)


@pytest.mark.parametrize("mark", ["?", "NA", "", "n/a", "NaN", "null", "#N/A", "-", ".", "None"])
def test_marks_of_missing_values_among_numbers(mark):
    column = parse_column(["1.5", mark, "3"])
    assert column.dtype == np.float64
    assert np.isnan(column[1])
    assert parse_column(["yes", "none", "-"]).tolist() == ["yes", "none", "-"]  # they may be categories
    assert parse_column(["yes", "?", "NA"]).tolist() == ["yes", "", ""]


def test_marks_in_frames():
    assert np.isnan(to_column(["63.0", "?", "41"])[1])
    assert np.isnan(to_column(np.array([63, "?", 41.5], dtype=object))[1])
    assert to_column(["63", "41"]).dtype == object  # text without a mark stays text: it may be a code
    assert to_column(["a", "?", None]).tolist() == ["a", "", ""]


@given(st.lists(st.one_of(st.integers(-99, 99).map(str), st.floats(-9, 9).map(str), st.sampled_from(["?", "NA", "x", ""]))))
def test_a_column_is_numeric_exactly_if_all_other_entries_are_numbers(texts):
    column = parse_column(texts)
    assert len(column) == len(texts)
    assert (column.dtype == object) == ("x" in texts)


def test_semicolons_and_decimal_commas(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('age;chol;"a;b,c";ill\n50;5,2;x;yes\n60;;y;no\n')
    raw = read_file(path, "ill", "a")
    assert raw.inputs.columns["chol"].tolist()[0] == 5.2
    assert np.isnan(raw.inputs.columns["chol"][1])
    assert list(raw.inputs.columns) == ["age", "chol", "a;b,c"]
    path.write_text("age\till\n50\tyes\n")
    assert read_file(path, "ill", "a").inputs.columns["age"].tolist() == [50]


def test_a_file_without_names_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("63.0,1.0,?,0\n67.0,1.0,4.0,2\n")
    with pytest.raises(DataError, match="first line must name the columns, got numbers"):
        read_file(path, None, "a", labelled=False)
    path.write_text("0,1,2\n67.0,1.0,4.0\n")  # names that are numbers
    assert list(read_file(path, None, "a", labelled=False).inputs.columns) == ["0", "1", "2"]


def test_two_codings_of_a_label_are_refused_and_can_be_renamed():
    with pytest.raises(
        DataError, match=r"a \{no, yes\} and b \{No, Yes\} write a label in two ways: one coding\?.*clients.b.rename"
    ):
        federation(a=site(1), b=site(2, label=("No", "Yes")))
    with pytest.raises(DataError, match=r"b \{0, 1\} and a \{no, yes\} share no label: one coding\?.*data.classes"):
        federation(a=site(1), b=site(2, label=(0, 1)))
    with pytest.raises(DataError, match=r"clients.b.rename.*likewise for d; if they are"):
        federation(a=site(1), b=site(2, label=("No", "Yes")), c=site(3), d=site(4, label=("NO", "yes")))
    with pytest.raises(DataError, match=r"clients.b.rename.*likewise for c; if they are"):
        federation(a=site(1), b=site(2, label=(0, 1)), c=site(3, label=(0, 1)))
    both = federation(UserDataset(classes=("0", "1", "no", "yes")), a=site(1), b=site(2, label=(0, 1)))
    assert len(both.dataset.schema.classes) == 4  # they may be different classes after all
    apart = DataOptions(groups={"b": ((0,), (1,))})  # b has a label space of its own
    assert federation(data=apart, a=site(1), b=site(2, label=(0, 1))).classes == {"a": 4, "b": 2}
    made = federation(renamed={"b": {"0": "no", "1": "yes"}}.items(), a=site(1), b=site(2, label=(0, 1)))
    assert made.dataset.schema.classes == ("no", "yes")
    assert Preparation.read(made.clients["b"].preprocessing).rename == {"0": "no", "1": "yes"}
    everywhere = federation(UserDataset(rename={"No": "no", "Yes": "yes"}), a=site(1), b=site(2, label=("No", "Yes")))
    assert everywhere.dataset.schema.classes == ("no", "yes")


def test_clients_without_a_common_label_get_a_note_if_labels_are_text():
    made = federation(a=site(1), b=site(2), c=site(3, label=("absent", "present")))
    (note,) = made.notes
    assert note.startswith("c {absent, present} and a {no, yes} share no label: one coding?")
    assert not federation(a=site(1, label=(0, 1)), b=site(2, label=(2, 3))).notes  # skewed labels of one coding


def test_clients_that_count_classes_from_two_numbers_get_a_note():
    sites = {"a": site(1, label=(0, 1)), "b": site(2, label=(1, 2)), "c": site(3, label=(1, 2)), "d": site(4, label=(0, 1))}
    (note,) = federation(**sites).notes
    assert note == (
        "a {0, 1} and b {1, 2} may count the same classes from two numbers. If so, set clients.b.rename = "
        '{ "1" = "0", ... } (in Python: fedme.Client(..., rename={...})), likewise for c'
    )
    coded = {"b": {"1": "0", "2": "1"}, "c": {"1": "0", "2": "1"}}.items()
    made = federation(renamed=coded, **sites)
    assert (made.dataset.schema.classes, made.notes) == (("0", "1"), ())
    assert not federation(UserDataset(classes=("0", "1", "2")), **sites).notes  # they may be three classes after all
    assert not federation(**sites, e=site(5, label=(0, 2))).notes  # somebody has 0 and 2
    assert not federation(a=sites["a"], d=sites["d"]).notes


def test_many_integers_may_be_quantities():
    frame = site(1, 60)
    with pytest.raises(DataError, match=r"'ill' has 60 different integers from 200 to 259.*data.task = 'regression'"):
        federation(a=frame.assign(ill=np.arange(200, 260)))
    assert federation(UserDataset(task="regression"), a=frame.assign(ill=np.arange(200, 260))).dataset.schema.unit
    classes = federation(a=site(1, 300).assign(ill=np.arange(300) % 30)).dataset.schema.classes
    assert len(classes) == 30  # 0 to 29 with ten samples each are numbers of classes


def test_a_column_in_another_unit_is_named():
    frames = {name: site(seed, 60) for seed, name in enumerate("abcd")}
    assert not federation(**frames).notes
    frames["c"] = frames["c"].assign(chol=frames["c"].chol / 38.67)  # mg/dl to mmol/l
    (note,) = federation(**frames).notes
    assert note.startswith("client c: 'chol' is mostly between 5.")
    two = {"a": frames["a"], "c": frames["c"]}
    assert len(federation(**two).notes) == 1


def test_groups_are_no_inputs_and_nobody_is_in_two_parts():
    frames = {name: site(seed, 60, patient=np.arange(60) // 4) for seed, name in enumerate("ab")}
    made = federation(UserDataset(group="patient"), **frames)
    assert made.dataset.schema.shape == (4,)
    for name, data in made.clients.items():
        offset = 0 if name == "a" else 60
        patients = [set(((part.rows - offset) // 4).tolist()) for part in (data.train, data.val, data.test)]
        assert not patients[0] & patients[1]
        assert not (patients[0] | patients[1]) & patients[2]
    with pytest.raises(
        DataError, match="data.group = 'person', but there is no such column; there are age, chol, sex, patient"
    ):
        federation(UserDataset(group="person"), **frames)


def test_booleans_are_labels_and_integers_may_be_quantities():
    draw = np.random.default_rng(0)
    x, y = draw.integers(-5, 6, (30, 3)), draw.random(30) > 0.5
    clients = {"a": ClientSamples(read_object((x, y), None, "client a"))}
    made = UserDataset().combine("given", clients)
    assert made.schema.classes == ("0", "1")
    assert made.standardise  # negative integers are no symbols
    symbols = {"a": ClientSamples(read_object((x + 5, y), None, "client a"))}
    assert UserDataset().combine("given", symbols).schema.vocabulary == 11
    assert UserDataset(scale="standard").combine("given", symbols).schema.vocabulary is None
    assert UserDataset(scale="standard").combine("given", symbols).standardise


def test_targets_of_an_unseen_client_are_scaled_once():
    frames = {name: site(seed).assign(ill=lambda f: 3 * f.age + 100) for seed, name in enumerate("ab")}
    made = federation(**frames)
    preparation = Preparation.read(made.dataset.schema.preprocessing)
    new = site(7).assign(ill=lambda f: 3 * f.age + 100)
    dataset = unseen_client_dataset(made.dataset.schema, preparation, "n", ClientSamples(read_object(new, "ill", "client n")))
    data = federate(dataset, Natural(), DataOptions(), Key(0)).clients["n"]
    expected = torch.tensor(new["ill"].to_numpy())[data.test.rows]
    assert torch.allclose(preparation.unscale_targets(data.test.y)[:, 0], expected, rtol=1e-5)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([1, 8, 64, 1 << 19]), st.integers(1, 3))
def test_scaling_in_parts_is_that_of_all_samples(samples, seed, gaps, chunk, chunks):
    draw = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn((samples, 4), generator=draw) + 100
    x[:, 1] = 0.1  # constant: only shifted, however many parts there are
    if gaps:
        x[torch.rand((samples, 4), generator=draw) < 0.4] = math.nan
    rows = torch.randperm(samples, generator=draw)[: max(1, samples - 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "CHUNK", chunk)
        patch.setattr(preprocessing, "CHUNKS", chunks)
        scaling = standard_scaling(x, rows)
    for feature in range(4):
        values = x[rows, feature].double()
        present = values[~values.isnan()]
        std = present.std(correction=0) if len(present) else torch.tensor(0.0)
        assert torch.allclose(scaling.mean[feature].double(), present.mean() if len(present) else torch.tensor(0.0).double())
        assert scaling.std[feature].item() == 1.0 if std == 0 else torch.allclose(scaling.std[feature].double(), std, rtol=1e-5)
