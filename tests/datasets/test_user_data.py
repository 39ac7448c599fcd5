"""User data: the same samples in any container give the same data set, and errors name the client and the remedy."""

import csv
import io

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given as examples, strategies as st
from torch.utils.data import Dataset as TorchDataset, TensorDataset

import datasets as hugging_face
from fedme.core.key import Key
from fedme.datasets import user_data
from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import read_file
from fedme.datasets.federated_dataset import DataOptions, federate
from fedme.datasets.partitioners import Natural
from fedme.datasets.preprocessing import Preparation
from fedme.datasets.python_objects import read_object
from fedme.datasets.raw_samples import class_names, parse_column
from fedme.datasets.user_data import ClientSamples, UserDataset, fingerprint, unseen_client_dataset

FRAME = pandas.DataFrame(
    {
        "age": [30.5, 41, 52, 63, 74, 25],
        "smokes": ["yes", "no", "no", "yes", "no", "yes"],
        "ill": ["a", "b", "a", "b", "a", "b"],
    }
)
X = torch.tensor([[1.0, 2.0], [3.0, 4.5], [5.0, 6.0], [7.0, 8.0]])
Y = torch.tensor([2, 0, 2, 7])


def piece(train, label=None, name="a", **others):
    parts = {"train": train, **others}
    return ClientSamples(**{part: read_object(value, label, f"client {name}, {part}") for part, value in parts.items()})


def combine(options=None, unlabeled=None, **trains):
    return (options or UserDataset()).combine(
        "given", {name: piece(value, "ill", name) for name, value in trains.items()}, unlabeled
    )


def test_a_table_becomes_numbers_and_categories_in_one_order_for_everybody():
    dataset = combine(a=FRAME, b=FRAME.iloc[:3][["smokes", "ill", "age"]])
    assert dataset.schema.classes == ("a", "b")
    assert dataset.source.x.tolist()[0] == [30.5, 0.0, 1.0]  # age, no, yes
    assert torch.equal(dataset.source.x[6:], dataset.source.x[:3])
    assert dataset.source.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]


@pytest.mark.needs("datasets")
def test_the_same_samples_in_any_container_are_the_same_data_set(tmp_path):
    table = pandas.DataFrame({"u": X[:, 0].numpy(), "v": X[:, 1].numpy(), "y": Y.numpy()})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", x=X.numpy(), y=Y.numpy())

    class Pairs(TorchDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return X[i], int(Y[i])

    ways = {
        "tensors": (X, Y),
        "arrays": (X.numpy().astype("float64"), Y.numpy().tolist()),
        "texts as labels": (X, [str(int(y)) for y in Y]),
        "frame and series": (table[["u", "v"]], table["y"]),
        "frame": table,
        "csv": tmp_path / "t.csv",
        "tsv": str(tmp_path / "t.tsv"),
        "parquet": tmp_path / "t.parquet",
        "npz": tmp_path / "t.npz",
        "TensorDataset": TensorDataset(X, Y),
        "user-defined data set": Pairs(),
        "Hugging Face": hugging_face.Dataset.from_pandas(table),
        "list of pairs": [(X[i], int(Y[i])) for i in range(4)],
    }
    combined = {
        way: UserDataset().combine("given", {"a": piece(value, "y" if way not in ("npz",) else None)})
        for way, value in ways.items()
    }
    for way, dataset in combined.items():
        assert torch.equal(dataset.source.x, X), way
        assert dataset.source.labels.tolist() == [1, 0, 1, 2], way
        assert dataset.schema.classes == ("0", "2", "7"), way
        assert Preparation.read(dataset.schema.preprocessing).whole_labels, way
    prints = {way: fingerprint(dataset) for way, dataset in combined.items()}
    assert prints["tensors"] == prints["arrays"] == prints["npz"] == prints["list of pairs"]
    assert prints["frame"] == prints["csv"] == prints["parquet"] == prints["Hugging Face"]


def test_a_fingerprint_tells_samples_and_owners_apart():
    one = UserDataset().combine("given", {"a": piece((X, Y))})
    assert fingerprint(one) == fingerprint(UserDataset().combine("given", {"a": piece((X.clone(), Y))}))
    others = [{"a": piece((X + 1e-6, Y))}, {"b": piece((X, Y))}, {"a": piece((X, Y.flip(0)))}]
    others.append({"a": piece((X[:2], Y[:2]), test=(X[2:], Y[2:]))})
    assert len({fingerprint(dataset) for dataset in [one, *(UserDataset().combine("given", other) for other in others)]}) == 5


def test_a_fingerprint_of_many_samples_has_all_of_them(monkeypatch):
    monkeypatch.setattr(user_data, "HASHED", 3)
    one = fingerprint(UserDataset().combine("given", {"a": piece((X, Y))}))
    for row in range(len(X)):
        other = X.clone()
        other[row, -1] += 1e-6
        assert fingerprint(UserDataset().combine("given", {"a": piece((other, Y))})) != one


def test_images_in_folders(tmp_path):
    from PIL import Image

    for i, (name, colour) in enumerate((("cat", 10), ("dog", 200), ("dog", 250))):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("L", (4, 3), colour).save(tmp_path / name / f"{i}.png")
    dataset = UserDataset().combine("given", {"a": piece(tmp_path)})
    assert dataset.source.x.shape == (3, 1, 3, 4)
    assert dataset.schema.classes == ("cat", "dog")
    assert dataset.source.inputs(torch.tensor([1])).max().item() == pytest.approx(200 / 255)
    Image.new("L", (5, 3)).save(tmp_path / "cat" / "9.png")
    with pytest.raises(DataError, match="9.png is 5 x 3 greyscale, but .*0.png is 4 x 3 greyscale"):
        piece(tmp_path)
    Image.new("L", (5, 3)).save(tmp_path / "loose.png")
    with pytest.raises(DataError, match="loose.png is not in a subfolder"):
        piece(tmp_path)
    assert len(read_object(tmp_path / "dog", None, "x", labelled=False)) == 2


@pytest.mark.needs("datasets")
def test_hugging_face_images_and_class_names():
    from PIL import Image

    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(3)], "label": [1, 0, 1]}
    dataset = UserDataset().combine("given", {"a": piece(hugging_face.Dataset.from_dict(rows, features))})
    assert dataset.source.x.shape == (3, 3, 4, 4)
    assert dataset.schema.classes == ("cat", "dog")
    assert dataset.source.labels.tolist() == [1, 0, 1]


def test_dictionaries_of_tensors_and_symbols():
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 9]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
    ways = [(inputs, [0, 1]), inputs | {"label": torch.tensor([0, 1])}]
    ways.append([({name: x[i] for name, x in inputs.items()}, i) for i in range(2)])
    for way in ways:
        dataset = UserDataset().combine("given", {"a": piece(way)})
        assert dataset.source.inputs(torch.tensor([1]))["input_ids"].tolist() == [[3, 9]]
        assert dataset.schema.vocabulary == 10
        assert not dataset.standardise


def test_inputs_are_scaled_by_the_training_rows_of_all_clients_alone():
    generator = Key(3).torch()
    xs = [torch.randn(40, 2, generator=generator) * 5 + 9 for _ in range(2)]
    y = torch.arange(40) % 2
    dataset = UserDataset().combine(
        "given", {f"{i}": piece((x, y)) for i, x in enumerate(xs)}, read_object(xs[0][:7], None, "u", False)
    )
    federation = federate(dataset, Natural(), DataOptions(), Key(0))
    rows = torch.cat([parts.train for parts in federation.partition.clients.values()])
    seen = torch.cat([data.train.inputs() for data in federation.clients.values()])
    assert len(rows) == 48
    assert torch.allclose(seen.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(seen.std(0, correction=0), torch.ones(2), atol=1e-6)
    same = Preparation.read(federation.dataset.schema.preprocessing)(read_object(xs[0][:7], None, "u", False))
    assert torch.equal(same, federation.unlabeled.inputs())
    plain = federate(UserDataset(scale="none").combine("given", {"0": piece((xs[0], y))}), Natural(), DataOptions(), Key(0))
    assert torch.equal(plain.clients["0"].train.inputs(), xs[0][plain.partition.clients["0"].train])


def test_parts_that_are_given_are_kept_and_others_are_cut():
    x, y = torch.rand(20, 2, generator=Key(0).torch()), torch.arange(20) % 2
    pieces = {"a": piece((x, y), test=(x[:4], y[:4])), "b": piece((x, y), name="b", val=(x[:3], y[:3]))}
    federation = federate(UserDataset().combine("given", pieces), Natural(), DataOptions(), Key(0))
    sizes = {c: [len(d.train), len(d.val), len(d.test)] for c, d in federation.clients.items()}
    assert sizes == {"a": [16, 4, 4], "b": [15, 3, 5]}
    grouped = federate(UserDataset().combine("given", pieces), Natural(), DataOptions(groups={"a": ((1,),)}), Key(0))
    assert set(grouped.clients["a"].test.y.tolist()) == {0}
    assert len(grouped.clients["a"].test) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: piece((X, Y[:3])), "client a, train: 4 samples, but 3 labels"),
        (lambda: piece((X[:0], Y[:0])), "client a, train: there are no samples"),
        (
            lambda: combine(a=(torch.where(X == 4.5, torch.nan, X), Y)),
            r"client a, train: sample 1 \(counted from 0\) is NaN.*data.missing",
        ),
        (
            lambda: combine(UserDataset(task="classification"), a=(X, [0.5, 1, 2, 3])),
            "has the label 0.5, which is not a class.*data.task = 'regr",
        ),
        (
            lambda: combine(UserDataset(task="classification"), a=(X, torch.rand(4, 2))),
            "client a, train: classification needs one label per sample, got 2",
        ),
        (lambda: combine(a=(X, Y.float())), "client a, train: the labels are integers stored as floats .*data.task ="),
        (
            lambda: combine(a=(X, torch.rand(4, 2)), b=(X, torch.rand(4, 3))),
            r"b, train: labels have shape .*all clients need the same",
        ),
        (
            lambda: combine(UserDataset(task="multi-label"), a=(X, torch.arange(8).view(4, 2))),
            r"'0' of sample 1 .counted from 0. must be 0 or 1.*got 2",
        ),
        (
            lambda: combine(a=(X, [0.5, 1.0, float("nan"), 2.0])),
            r"a, train: label 'y' of sample 2 \(counted from 0\) is missing",
        ),
        (lambda: combine(UserDataset(task="regression"), a=(X, list("abcd"))), "a, train: labels must be numbers, got text"),
        (
            lambda: combine(UserDataset(classes=("u",)), a=(X, torch.rand(4, 2))),
            "data.classes: 2 names are required, one per label of client a, train, got 1",
        ),
        (lambda: piece((X, ["a", "", "b", "c"])), r"sample 1 \(counted from 0\) has no label"),
        (lambda: piece((X[:, 0], Y)), "at least 2 dimensions, samples first"),
        (lambda: piece(7), "unsupported type int; use .*inputs, labels"),
        (lambda: piece(FRAME), "set label to the name of the label column; the columns are age, smokes, ill"),
        (lambda: piece(FRAME, "il"), "no column 'il'; did you mean 'ill'"),
        (lambda: piece("no.csv", "y"), r"client a, train \(no.csv\): no such file"),
        (lambda: piece("no.xls", "y"), r"unsupported file type; use .csv"),
        (
            lambda: combine(a=FRAME, b=FRAME.drop(columns="age")),
            "client b, train: the column 'age' of client a, train is missing",
        ),
        (
            lambda: combine(a=FRAME, b=FRAME.assign(id=1)),
            "client b, train: the column 'id' is missing in client a, train.*data.ignore",
        ),
        (lambda: combine(a=FRAME, b=FRAME.assign(age="old")), "b, train: column .age. contains text, but numbers in client a"),
        (lambda: combine(a=FRAME, b=(X, Y)), "client b, train: not a table"),
        (lambda: combine(a=(X, Y), b=(X[:, :1], Y)), r"client b, train: samples have shape \(1,\)"),
        (lambda: combine(a=(X[:1], Y[:1])), "client a, train: at least 2 samples are required, got 1"),
        (
            lambda: combine(UserDataset(classes=("0", "2")), a=(X, Y)),
            r"client a, train: sample 3 \(counted from 0\) has the unknown class '7'",
        ),
        (lambda: combine(UserDataset(categorical=("sex",)), a=FRAME), "data.categorical: unknown column 'sex'"),
        (lambda: combine(), "there are no clients"),
        (lambda: combine(a=FRAME.assign(age=[1, 2, 3, None, 5, 6])), r"client a, train: sample 3 \(counted from 0\) in 'age'"),
        (
            lambda: combine(unlabeled=read_object(X[:, :1], None, "unlabeled", False), a=(X, Y)),
            r"unlabeled: samples must have shape",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_client_and_the_fix(build, message):
    def run():
        made = build()
        if isinstance(made, ClientSamples):
            UserDataset().combine("given", {"a": made})

    with pytest.raises(DataError, match=message):
        run()


def test_an_unseen_client_uses_the_same_preprocessing():
    dataset = combine(a=FRAME)
    preparation = Preparation.read(dataset.schema.preprocessing)
    again = unseen_client_dataset(dataset.schema, preparation, "n", piece(FRAME.iloc[[2, 1]], "ill"))
    assert torch.equal(again.source.x, dataset.source.x[[2, 1]])
    other = unseen_client_dataset(dataset.schema, preparation, "n", piece(FRAME.assign(smokes="maybe"), "ill"))
    assert not other.source.x[:, 1:].any()  # a category that is not known is "other": none of the known ones is set
    with pytest.raises(DataError, match="has the unknown class 'c'"):
        unseen_client_dataset(dataset.schema, preparation, "n", piece(FRAME.assign(ill="c"), "ill"))


def test_an_npz_with_pickles_is_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([1]))
    with pytest.raises(DataError, match="pickled objects, which can execute arbitrary code"):
        read_file(tmp_path / "bad.npz", None, "client a")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="not a readable npz file"):
        read_file(tmp_path / "text.npz", None, "client a")


@examples(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_survive_a_text_file(values):
    assert parse_column([repr(value) for value in values]).tolist() == values


@examples(st.lists(st.text(min_size=1).filter(lambda text: text.strip()), min_size=1))
def test_labels_are_text_and_equal_numbers_are_one_class(labels):
    names = class_names(np.array(labels, dtype=object), "here")
    assert len(names) == len(labels)
    assert all(isinstance(name, str) and name for name in names)
    assert class_names(names, "here").tolist() == names.tolist()


@examples(st.binary(max_size=200))
def test_a_csv_file_of_anything_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("csv") / "some.csv"
    path.write_bytes(content)
    try:
        samples = read_file(path, "y", "client a")
    except DataError:
        return
    assert len(samples) >= 1


@examples(st.lists(st.lists(st.text(alphabet='ab,"\n\r\t ', max_size=4), min_size=2, max_size=2), min_size=1, max_size=5))
def test_a_csv_file_says_what_its_writer_wrote(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "some.csv"
    text = io.StringIO()
    csv.writer(text).writerows([["y", "x"], *([f"c{a}", f"v{b}"] for a, b in rows)])
    path.write_text(text.getvalue(), newline="")
    samples = read_file(path, "y", "client a")
    assert samples.inputs.columns["x"].tolist() == [f"v{b}".strip() for _, b in rows]
