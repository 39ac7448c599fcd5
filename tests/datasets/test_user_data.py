"""People's own samples: whatever they come in, the same samples give the same data set, and what is wrong is said by name."""

import csv
import io

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

import datasets as hugging_face
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import read
from fedme.datasets.federated_dataset import DataOptions, federate
from fedme.datasets.partitioners import Natural
from fedme.datasets.preprocessing import Preparation
from fedme.datasets.python_objects import raw
from fedme.datasets.raw_samples import class_names, parsed
from fedme.datasets.user_data import Own, Piece, fingerprint, newcomer

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
    return Piece(**{part: raw(value, label, f"client {name}, {part}") for part, value in parts.items()})


def combine(own=None, unlabeled=None, **trains):
    return (own or Own()).combine("given", {name: piece(value, "ill", name) for name, value in trains.items()}, unlabeled)


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
        "a data set of one's own": Pairs(),
        "Hugging Face": hugging_face.Dataset.from_pandas(table),
        "list of pairs": [(X[i], int(Y[i])) for i in range(4)],
    }
    found = {
        way: Own().combine("given", {"a": piece(value, "y" if way not in ("npz",) else None)}) for way, value in ways.items()
    }
    for way, dataset in found.items():
        assert torch.equal(dataset.source.x, X), way
        assert dataset.source.labels.tolist() == [1, 0, 1, 2], way
        assert dataset.schema.classes == ("0", "2", "7"), way
        assert Preparation.read(dataset.schema.preprocessing).whole_labels, way
    prints = {way: fingerprint(dataset) for way, dataset in found.items()}
    assert prints["tensors"] == prints["arrays"] == prints["npz"] == prints["list of pairs"]
    assert prints["frame"] == prints["csv"] == prints["parquet"] == prints["Hugging Face"]


def test_a_fingerprint_tells_samples_and_owners_apart():
    one = Own().combine("given", {"a": piece((X, Y))})
    assert fingerprint(one) == fingerprint(Own().combine("given", {"a": piece((X.clone(), Y))}))
    others = [{"a": piece((X + 1e-6, Y))}, {"b": piece((X, Y))}, {"a": piece((X, Y.flip(0)))}]
    others.append({"a": piece((X[:2], Y[:2]), test=(X[2:], Y[2:]))})
    assert len({fingerprint(each) for each in [one, *(Own().combine("given", other) for other in others)]}) == 5


def test_images_in_folders(tmp_path):
    from PIL import Image

    for i, (name, colour) in enumerate((("cat", 10), ("dog", 200), ("dog", 250))):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("L", (4, 3), colour).save(tmp_path / name / f"{i}.png")
    dataset = Own().combine("given", {"a": piece(tmp_path)})
    assert dataset.source.x.shape == (3, 1, 3, 4)
    assert dataset.schema.classes == ("cat", "dog")
    assert dataset.source.inputs(torch.tensor([1])).max().item() == pytest.approx(200 / 255)
    Image.new("L", (5, 3)).save(tmp_path / "cat" / "9.png")
    with pytest.raises(DataError, match="9.png is 5 x 3 in grey, but .*0.png is 4 x 3 in grey"):
        piece(tmp_path)
    Image.new("L", (5, 3)).save(tmp_path / "loose.png")
    with pytest.raises(DataError, match="loose.png lies in no subfolder"):
        piece(tmp_path)
    assert len(raw(tmp_path / "dog", None, "x", labelled=False)) == 2


@pytest.mark.needs("datasets")
def test_hugging_face_images_and_class_names():
    from PIL import Image

    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(3)], "label": [1, 0, 1]}
    dataset = Own().combine("given", {"a": piece(hugging_face.Dataset.from_dict(rows, features))})
    assert dataset.source.x.shape == (3, 3, 4, 4)
    assert dataset.schema.classes == ("cat", "dog")
    assert dataset.source.labels.tolist() == [1, 0, 1]


def test_dictionaries_of_tensors_and_symbols():
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 9]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
    ways = [(inputs, [0, 1]), inputs | {"label": torch.tensor([0, 1])}]
    ways.append([({name: x[i] for name, x in inputs.items()}, i) for i in range(2)])
    for way in ways:
        dataset = Own().combine("given", {"a": piece(way)})
        assert dataset.source.inputs(torch.tensor([1]))["input_ids"].tolist() == [[3, 9]]
        assert dataset.schema.vocabulary == 10
        assert not dataset.standardise


def test_inputs_are_scaled_by_the_training_rows_of_all_clients_alone():
    generator = Key(3).torch()
    xs = [torch.randn(40, 2, generator=generator) * 5 + 9 for _ in range(2)]
    y = torch.arange(40) % 2
    dataset = Own().combine("given", {f"{i}": piece((x, y)) for i, x in enumerate(xs)}, raw(xs[0][:7], None, "u", False))
    federation = federate(dataset, Natural(), DataOptions(), Key(0))
    rows = torch.cat([parts.train for parts in federation.partition.clients.values()])
    seen = torch.cat([data.train.inputs() for data in federation.clients.values()])
    assert len(rows) == 48
    assert torch.allclose(seen.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(seen.std(0, correction=0), torch.ones(2), atol=1e-6)
    same = Preparation.read(federation.dataset.schema.preprocessing)(raw(xs[0][:7], None, "u", False))
    assert torch.equal(same, federation.unlabeled.inputs())
    plain = federate(Own(scale="none").combine("given", {"0": piece((xs[0], y))}), Natural(), DataOptions(), Key(0))
    assert torch.equal(plain.clients["0"].train.inputs(), xs[0][plain.partition.clients["0"].train])


def test_parts_that_are_given_are_kept_and_others_are_cut():
    x, y = torch.rand(20, 2, generator=Key(0).torch()), torch.arange(20) % 2
    pieces = {"a": piece((x, y), test=(x[:4], y[:4])), "b": piece((x, y), name="b", val=(x[:3], y[:3]))}
    federation = federate(Own().combine("given", pieces), Natural(), DataOptions(), Key(0))
    sizes = {c: [len(d.train), len(d.val), len(d.test)] for c, d in federation.clients.items()}
    assert sizes == {"a": [16, 4, 4], "b": [15, 3, 5]}
    grouped = federate(Own().combine("given", pieces), Natural(), DataOptions(groups={"a": ((1,),)}), Key(0))
    assert set(grouped.clients["a"].test.y.tolist()) == {0}
    assert len(grouped.clients["a"].test) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: piece((X, Y[:3])), "client a, train: 4 samples, but 3 labels"),
        (lambda: piece((X[:0], Y[:0])), "client a, train: there are no samples"),
        (lambda: piece((torch.where(X == 4.5, torch.nan, X), Y)), r"client a, train: sample 1 \(from 0\) is not a number"),
        (lambda: combine(Own(task="classification"), a=(X, [0.5, 1, 2, 3])), "is 0.5, which is no class.*data.task = 'regr"),
        (lambda: combine(Own(task="classification"), a=(X, torch.rand(4, 2))), "client a, train: 2 labels a sample; class"),
        (lambda: combine(a=(X, Y.float())), "client a, train: the labels are whole numbers given as floats .*data.task ="),
        (lambda: combine(a=(X, torch.rand(4, 2)), b=(X, torch.rand(4, 3))), r"b, train: labels have the shape .*alike"),
        (lambda: combine(Own(task="multi-label"), a=(X, torch.arange(8).view(4, 2))), r"'0' of sample 1 .from 0. is 2; .*0 or"),
        (lambda: combine(a=(X, [0.5, 1.0, float("nan"), 2.0])), r"a, train: 'y' of sample 2 \(from 0\) is missing"),
        (lambda: combine(Own(task="regression"), a=(X, list("abcd"))), "a, train: the labels hold text"),
        (lambda: combine(Own(classes=("u",)), a=(X, torch.rand(4, 2))), "classes: 1 names, but client a, train has 2 labels"),
        (lambda: piece((X, ["a", "", "b", "c"])), r"sample 1 \(from 0\) has no label"),
        (lambda: piece((X[:, 0], Y)), "the first axis counts samples"),
        (lambda: piece(7), "int is not understood; give .*inputs, labels"),
        (lambda: piece(FRAME), "which column is the label.*age, smokes, ill"),
        (lambda: piece(FRAME, "il"), "no column 'il'; did you mean 'ill'"),
        (lambda: piece("no.csv", "y"), r"client a, train \(no.csv\): there is no such file"),
        (lambda: piece("no.xls", "y"), r"cannot be read; there are .csv"),
        (lambda: combine(a=FRAME, b=FRAME.drop(columns="age")), "client b, train: there is no column 'age'"),
        (lambda: combine(a=FRAME, b=FRAME.assign(id=1)), "client b, train: has a column 'id'.*data.ignore"),
        (lambda: combine(a=FRAME, b=FRAME.assign(age="old")), "b, train: column .age. holds text, but numbers in client a"),
        (lambda: combine(a=FRAME, b=(X, Y)), "client b, train: is no table"),
        (lambda: combine(a=(X, Y), b=(X[:, :1], Y)), r"client b, train: samples are of shape \(1,\)"),
        (lambda: combine(a=(X[:1], Y[:1])), "client a has 1 sample; give it at least 2"),
        (lambda: combine(Own(classes=("0", "2")), a=(X, Y)), r"client a, train: sample 3 \(from 0\) has the class '7'"),
        (lambda: combine(Own(categorical=("sex",)), a=FRAME), "data.categorical names 'sex'"),
        (lambda: combine(), "there are no clients"),
        (lambda: combine(a=FRAME.assign(age=[1, 2, 3, None, 5, 6])), r"client a, train: sample 3 \(from 0\) in 'age'"),
        (lambda: combine(unlabeled=raw(X[:, :1], None, "unlabeled", False), a=(X, Y)), r"unlabeled: samples have the shape"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_client_and_the_fix(build, message):
    def whole():
        made = build()
        if isinstance(made, Piece):
            Own().combine("given", {"a": made})

    with pytest.raises(DataError, match=message):
        whole()


def test_a_newcomer_is_prepared_as_the_others_were():
    dataset = combine(a=FRAME)
    preparation = Preparation.read(dataset.schema.preprocessing)
    again = newcomer(dataset.schema, preparation, "n", piece(FRAME.iloc[[2, 1]], "ill"))
    assert torch.equal(again.source.x, dataset.source.x[[2, 1]])
    with pytest.raises(DataError, match="'maybe' is none of no, yes"):
        newcomer(dataset.schema, preparation, "n", piece(FRAME.assign(smokes="maybe"), "ill"))
    with pytest.raises(DataError, match="has the class 'c'"):
        newcomer(dataset.schema, preparation, "n", piece(FRAME.assign(ill="c"), "ill"))


def test_an_npz_with_pickles_is_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([1]))
    with pytest.raises(DataError, match="pickled objects, which can run any program"):
        read(tmp_path / "bad.npz", None, "client a")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="not a readable npz file"):
        read(tmp_path / "text.npz", None, "client a")


@examples(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_survive_a_text_file(values):
    assert parsed([repr(value) for value in values]).tolist() == values


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
        found = read(path, "y", "client a")
    except DataError:
        return
    assert len(found) >= 1


@examples(st.lists(st.lists(st.text(alphabet='ab,"\n\r\t ', max_size=4), min_size=2, max_size=2), min_size=1, max_size=5))
def test_a_csv_file_says_what_its_writer_wrote(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "some.csv"
    text = io.StringIO()
    csv.writer(text).writerows([["y", "x"], *([f"c{a}", f"v{b}"] for a, b in rows)])
    path.write_text(text.getvalue(), newline="")
    found = read(path, "y", "client a")
    assert found.inputs.columns["x"].tolist() == [f"v{b}".strip() for _, b in rows]
