"""From files with gaps, other codings and identifiers to predictions, on the command line."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest


def write(name, seed, labels, gaps, header="patient,age,chol,sex,ill"):
    draw = np.random.default_rng(seed)
    lines = [header]
    for number in range(40):
        chol = "?" if number in gaps else f"{draw.normal(240, 30):.1f}"
        lines.append(f"{name}{number},{draw.normal(55, 9):.1f},{chol},{draw.choice(['f', 'm'])},{draw.choice(labels)}")
    Path(f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path, monkeypatch, fedme):
    monkeypatch.chdir(tmp_path)
    write("a", 1, ["no", "yes"], {3, 4})
    write("b", 2, ["0", "1"], {7})
    Path("sites.toml").write_text(
        'rounds = 2\n[data]\nlabel = "ill"\nignore = ["patient"]\n[data.missing]\nchol = "median"\n'
        '[clients.a]\ndata = "a.csv"\n[clients.b]\ndata = "b.csv"\nrename = { 0 = "no", 1 = "yes" }\n'
    )
    code, _, err = fedme("run", "sites.toml", "output=run", "--quiet")
    assert code == 0, err
    return "run"


def test_a_table_goes_from_files_to_predictions(run, fedme):
    code, out, _ = fedme("data", "show", "sites.toml")
    assert code == 0
    assert "chol" in out
    assert "2 missing" in out
    columns = json.loads(fedme("data", "show", "sites.toml", "--json")[1])["columns"]
    assert [(column["name"], column["kind"]) for column in columns] == [
        ("age", "number"),
        ("chol", "number"),
        ("sex", "text"),
        ("ill", "text, label"),
    ]
    assert columns[1]["clients"]["a"]["gaps"] == 2
    assert "a" in fedme("data", "show", "sites.toml", "--column", "chol")[1]
    assert "did you mean 'chol'" in fedme("data", "show", "sites.toml", "--column", "chl")[2]

    Path("new.csv").write_text("patient;age;chol;sex\nx1;50,5;?;m\nx2;?;240;f\nx3;61;250;x\n")
    code, out, err = fedme("predict", run, "new.csv", "--client", "a")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == ["patient", "prediction", "p(no)", "p(yes)", "problem"]
    assert [row["patient"] for row in rows] == ["x1", "x2", "x3"]
    assert [row["prediction"] in ("no", "yes") for row in rows] == [True, False, True]
    assert rows[1]["problem"] == "in 'age' is empty"
    assert "1 of 3 rows cannot be used" in err
    assert "'sex' has categories that the model does not know: x" in err
    objects = json.loads(fedme("predict", run, "new.csv", "--client", "a", "--json")[1])
    assert objects[1] == {"patient": "x2", "prediction": None, "problem": "in 'age' is empty"}
    assert objects[0]["patient"] == "x1"


def test_a_site_evaluates_with_its_own_coding(run, fedme):
    code, out, err = fedme("evaluate", run, "b.csv", "--client", "b", "--json")
    assert code == 0, err
    assert json.loads(out)["samples"] == 40
    assert "has the unknown class" in fedme("evaluate", run, "b.csv", "--client", "a")[2]


def test_two_codings_are_said_before_training(run, fedme):
    text = Path("sites.toml").read_text()
    Path("sites.toml").write_text(text.replace('rename = { 0 = "no", 1 = "yes" }\n', ""))
    assert "share no label: one coding?" in fedme("data", "show", "sites.toml")[2]


def test_columns_are_shown_although_their_gaps_are_not_settled(run, fedme):
    """What the tables contain is what helps to decide on gaps and codings."""
    text = Path("sites.toml").read_text()
    Path("sites.toml").write_text(text.replace('[data.missing]\nchol = "median"\n', ""))
    code, out, err = fedme("data", "show", "sites.toml")
    assert code != 0
    assert "2 missing" in out
    assert "set data.missing" in err
    code, out, err = fedme("data", "show", "sites.toml", "--column", "chol")
    assert code != 0
    assert "range (median)" in out
    Path("sites.toml").write_text(text.replace('rename = { 0 = "no", 1 = "yes" }\n', ""))
    _, out, err = fedme("data", "show", "sites.toml")
    assert "2 missing" in out
    assert "share no label" in err


def test_a_site_that_writes_true_and_false(run, fedme):
    lines = Path("b.csv").read_text().splitlines()
    words = {"0": "FALSE", "1": "TRUE"}
    Path("b.csv").write_text("\n".join([lines[0], *(line[:-1] + words[line[-1]] for line in lines[1:])]) + "\n")
    text = Path("sites.toml").read_text()
    Path("sites.toml").write_text(text.replace("{ 0 =", "{ FALSE =").replace("1 =", "TRUE ="))
    code, _, err = fedme("run", "sites.toml", "output=words", "--quiet")
    assert code == 0, err
    assert json.loads(fedme("evaluate", "words", "b.csv", "--client", "b", "--json")[1])["samples"] == 40
    Path("sites.toml").write_text(text.replace("{ 0 =", "{ nein =").replace("1 =", "ja ="))
    err = fedme("run", "sites.toml", "output=none", "--quiet")[2]
    assert "rename has nein, ja, but the labels are" in " ".join(err.split())


def test_training_samples_are_named_when_they_are_evaluated(run, fedme):
    err = fedme("evaluate", run, "b.csv", "--client", "b")[2]
    assert "has the samples that client b was trained on" in " ".join(err.split())
    Path("later.csv").write_text(Path("b.csv").read_text())
    assert "trained on" not in fedme("evaluate", run, "later.csv", "--client", "b")[2]


def test_subgroups_and_details_are_two_tables(run, fedme):
    code, _, err = fedme("evaluate", run, "b.csv", "--client", "b", "--by", "sex", "--details")
    assert code != 0
    assert "--details and --by are two tables" in err


def test_subgroups_of_the_test_part(run, fedme):
    """By a column that is no input, on the samples that the model was not trained on."""
    for name in "ab":  # the ward is a number with gaps; persons have two rows
        lines = Path(f"{name}.csv").read_text().splitlines()
        extra = [f"{line},{(10, 2, 3.5, '?')[i % 4]},{i // 2}" for i, line in enumerate(lines[1:])]
        Path(f"{name}.csv").write_text("\n".join([f"{lines[0]},ward,person", *extra]) + "\n")
    text = Path("sites.toml").read_text().replace('["patient"]', '["patient", "ward"]\ngroup = "person"')
    Path("sites.toml").write_text(text)
    assert fedme("run", "sites.toml", "output=wards", "--quiet")[0] == 0
    for client in "ab":  # the second one has its own names of labels
        whole = json.loads(fedme("evaluate", "wards", "--client", client, "--json", "--own")[1])
        code, out, err = fedme("evaluate", "wards", "--client", client, "--by", "ward", "--json", "--own")
        assert code == 0, err
        assert "too good" not in err
        groups = json.loads(out)
        assert list(groups) == [name for name in ("2", "3.5", "10", "(missing)") if name in groups]
        assert len(groups) > 2
        assert sum(group["samples"] for group in groups.values()) == whole["samples"]
        assert sum(group["accuracy"] * group["samples"] for group in groups.values()) == pytest.approx(
            whole["accuracy"] * whole["samples"]
        )


def test_subgroups_of_a_test_file(run, fedme):
    Path("later.csv").write_text("\n".join(Path("b.csv").read_text().splitlines()[:11]) + "\n")
    text = Path("sites.toml").read_text().replace('data = "b.csv"', 'data = "b.csv"\ntest = "later.csv"')
    Path("sites.toml").write_text(text)
    assert fedme("run", "sites.toml", "output=given", "--quiet")[0] == 0
    own, given = (
        json.loads(fedme("evaluate", "given", *words, "--client", "b", "--by", "sex", "--json")[1])
        for words in ([], ["later.csv"])
    )
    assert own == given
    assert sum(group["samples"] for group in own.values()) == 10


def test_samples_without_a_label_are_counted_and_shown_by_client(run, fedme):
    """Whoever has to remove them wants to know how many there are, and where."""
    for mark in ("", "?", "NA"):
        lines = Path("a.csv").read_text().splitlines()
        for row in (3, 7, 9):
            lines[row] = f"{lines[row].rpartition(',')[0]},{mark}"
        Path("a.csv").write_text("\n".join(lines) + "\n")
        code, out, err = fedme("data", "show", "sites.toml")
        assert code != 0
        said = " ".join(err.split())
        assert "sample 2 (counted from 0) has no label (3 of 40 samples have none); label it, remove it" in said
        (row,) = [line.split() for line in out.splitlines() if "label" in line]
        assert row[:3] == ["ill", "text,", "label"]
        assert "3 missing" in " ".join(row)


def test_numbers_to_predict_that_are_missing_are_counted(run, fedme):
    for name in "ab":
        lines = Path(f"{name}.csv").read_text().splitlines()
        rows = [f"{line},{i}.5" if name == "b" or i % 10 else f"{line}," for i, line in enumerate(lines[1:])]
        Path(f"{name}.csv").write_text("\n".join([f"{lines[0]},days", *rows]) + "\n")
    text = Path("sites.toml").read_text().replace('"ill"', '"days"').replace('rename = { 0 = "no", 1 = "yes" }', "")
    Path("sites.toml").write_text(text.replace('["patient"]', '["patient", "ill"]'))
    _, out, err = fedme("data", "show", "sites.toml")
    assert "label 'days' of sample 0 (counted from 0) is missing, NaN or infinite (4 of 40 samples" in " ".join(err.split())
    assert "1.5 to 39.5 (20.5), 4 missing" in " ".join(out.split())
    assert "days" in fedme("data", "show", "sites.toml", "--column", "days")[1]
