import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedme.datasets import DataError
from fedme.datasets.femnist import Femnist
from fedme.datasets.shakespeare import CHARACTERS, VOCABULARY, Shakespeare, encode

TEXT = "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that lour'd upon"


def image(level: float) -> list[float]:
    return [round(level / 255, 6)] * 784


@pytest.fixture
def femnist(tmp_path, leaf):
    for part, count in (("train", 3), ("test", 1)):
        folder = tmp_path / "femnist" / part
        folder.mkdir(parents=True)
        for writer in ("ada", "bob"):
            entry = {writer: {"x": [image(10 * i) for i in range(count)], "y": [61 - i for i in range(count)]}}
            (folder / f"{writer}_niid_{part}.json").write_text(leaf(entry))
    return tmp_path


def test_femnist_has_a_client_for_every_writer(femnist):
    dataset = Femnist().load(femnist)
    assert list(dataset.owners) == ["ada", "bob"]
    assert [rows.tolist() for rows in dataset.owners["bob"]] == [[3, 4, 5], [7]]
    assert (dataset.train.tolist(), dataset.test.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7])
    assert dataset.source.labels.tolist() == [61, 60, 59, 61, 60, 59, 61, 61]
    assert dataset.schema.classes[0] + dataset.schema.classes[10] + dataset.schema.classes[61] == "0Az"
    assert dataset.source.x.dtype == torch.uint8
    torch.testing.assert_close(dataset.source.inputs(torch.tensor([2])), torch.full((1, 1, 28, 28), 20 / 255))


@pytest.mark.parametrize("folder", ["femnist", "femnist/all_data", "femnist/data/all_data"])
def test_femnist_may_be_undivided_and_have_any_shade(tmp_path, leaf, folder):
    (tmp_path / folder).mkdir(parents=True)
    users = {"ada": {"x": [[0.1234567] * 784], "y": [3]}, "bob": {"x": [image(255)], "y": [4]}, "none": {"x": [], "y": []}}
    (tmp_path / folder / "all.json").write_text(leaf(users))
    dataset = Femnist().load(tmp_path)
    assert len(dataset.test) == 0
    assert [len(rows) for rows, _ in dataset.owners.values()] == [1, 1, 0]
    x = dataset.source.inputs(torch.tensor([0, 1]))
    torch.testing.assert_close(x, torch.tensor([0.1234567, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 28, 28))


def test_entries_of_dropped_users_are_passed_over(tmp_path):
    (tmp_path / "femnist").mkdir()
    content = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [image(0)], "y": [1]}, "b": {"x": [], "y": []}}}
    (tmp_path / "femnist" / "all.json").write_text(json.dumps(content))
    assert list(Femnist().load(tmp_path).owners) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "'users' is missing"),
        ('{"users": [], "num_samples": 3, "user_data": {}}', "'num_samples' is missing or not a list"),
        ('{"users": ["a"], "num_samples": [], "user_data": {}}', "1 users, but 0 entries"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "user 'a': no entry in user_data"),
        (
            '{"users": ["a"], "num_samples": [true], "user_data": {"a": {}}}',
            "user 'a': num_samples must be an integer >= 0, got True",
        ),
        ('{"users": [5], "num_samples": [1], "user_data": {}}', "user 5: the name of a user must be a non-empty string"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"y": [1]}}}', "user 'a': the list 'x' is missing"),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [1]}}}',
            "'x' must have num_samples = 2 entries, got 1",
        ),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [1]}}}', "not a list of 784 pixels"),
        ('{"users": [], "num_samples": [], "user_data": {}}', "contain no samples"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "femnist" / "all.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Femnist().load(tmp_path)
    assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([2.0] * 784, 1, "between 0 and 1"),
        ([float("nan")] * 784, 1, "between 0 and 1"),
        (["1"] * 784, 1, "not a number"),
        ([None] * 784, 1, "not a number"),
        ([10**400] * 784, 1, "not a number"),
        ([[0.5]] + [0.5] * 783, 1, "not a number"),
        (image(0), 62, "got 62"),
        (image(0), -1, "got -1"),
        (image(0), 1.0, "got 1.0"),
        (image(0), "1", "got '1'"),
    ],
)
def test_wrong_samples_are_refused_with_user_and_file(tmp_path, leaf, x, y, message):
    path = tmp_path / "femnist" / "all.json"
    path.parent.mkdir()
    path.write_text(leaf({"ada": {"x": [x], "y": [y]}}))
    with pytest.raises(DataError, match=message) as caught:
        Femnist().load(tmp_path)
    assert f"{path}, user 'ada'" in str(caught.value)


def test_a_user_is_in_one_file_of_a_part(femnist):
    folder = femnist / "femnist" / "train"
    (folder / "again.json").write_text((folder / "bob_niid_train.json").read_text())
    with pytest.raises(DataError, match="in one file only"):
        Femnist().load(femnist)


@pytest.mark.parametrize(
    ("dataset_class", "name", "how"), [(Femnist, "femnist", "--sf 0.05"), (Shakespeare, "shakespeare", "--sf 0.2")]
)
def test_missing_files_say_how_they_are_made(tmp_path, dataset_class, name, how):
    with pytest.raises(DataError, match=f"preprocess.sh -s niid {how}") as caught:
        dataset_class().load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "FEDME_DATA" in str(caught.value)


def test_half_a_division_is_refused(femnist):
    for path in (femnist / "femnist" / "test").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="both are needed"):
        Femnist().load(femnist)


def test_the_vocabulary_has_90_different_symbols():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 90
    assert len(CHARACTERS) == 86
    assert encode("d\r").tolist() == [1, 86]
    assert encode("}\x7fé😀\ud800").tolist() == [89] * 5
    assert encode("").tolist() == []


def write_roles(root: Path, content: str) -> Path:
    (root / "shakespeare").mkdir(exist_ok=True)
    (root / "shakespeare" / "roles.json").write_text(content)
    return root


def test_windows_cut_lazily_are_the_windows_cut_beforehand(tmp_path, leaf):
    roles = {"GLOUCESTER": TEXT, "SHORT": TEXT[:80], "CLARENCE": TEXT[7:]}
    lazy = Shakespeare().load(write_roles(tmp_path, leaf({role: {"raw": text} for role, text in roles.items()})))
    finished = {
        role: {"x": [text[i : i + 80] for i in range(len(text) - 80)], "y": list(text[80:])} for role, text in roles.items()
    }
    eager = Shakespeare().load(write_roles(tmp_path, leaf(finished)))
    assert lazy.source.labels.tolist() == eager.source.labels.tolist()
    rows = torch.arange(len(lazy.train))
    assert torch.equal(lazy.source.inputs(rows), eager.source.inputs(rows))
    assert {k: [r.tolist() for r in v] for k, v in lazy.owners.items()} == {
        k: [r.tolist() for r in v] for k, v in eager.owners.items()
    }
    assert len(lazy.owners["SHORT"][0]) == 0
    first = "".join(VOCABULARY[symbol] for symbol in lazy.source.inputs(torch.tensor([0]))[0].tolist())
    assert first == TEXT[:80]
    assert VOCABULARY[lazy.source.labels[0]] == TEXT[80]
    assert lazy.schema.shape == (80,)
    assert lazy.schema.vocabulary == len(lazy.schema.classes) == 90
    assert lazy.overlap == 80


def test_text_is_held_once(tmp_path, leaf):
    text = TEXT * 100
    source = Shakespeare().load(write_roles(tmp_path, leaf({"A": {"raw": text}}))).source
    assert source.text.nbytes == len(text)
    assert source.starts.nbytes + source.labels.nbytes <= 16 * len(text)
    assert source.inputs(torch.tensor([0])).dtype == torch.int64


def test_other_lengths(tmp_path, leaf):
    root = write_roles(tmp_path, leaf({"A": {"raw": TEXT}}))
    dataset = Shakespeare(length=5).load(root)
    assert len(dataset.train) == len(TEXT) - 5
    with pytest.raises(DataError, match="no window of 500"):
        Shakespeare(length=500).load(root)
    with pytest.raises(DataError, match="length: must be >= 1, got 0"):
        Shakespeare(length=0)


@pytest.mark.parametrize(
    ("entry", "size", "message"),
    [
        ({"raw": 5}, 5, "'raw' must be a string"),
        ({"raw": TEXT}, 5, "contradicts num_samples = 5"),
        ({"x": ["short"], "y": ["a"]}, 1, "strings of 80"),
        ({"x": [TEXT[:80]], "y": ["ab"]}, 1, "'y' must be single characters, got 'ab'"),
        ({"x": [TEXT[:80]], "y": [3]}, 1, "'y' must be single characters, got 3"),
        ({"x": [TEXT[:80]], "y": []}, 1, "'y' must have num_samples = 1 entries, got 0"),
    ],
)
def test_wrong_texts_are_refused_with_user_and_file(tmp_path, leaf, entry, size, message):
    root = write_roles(
        tmp_path,
        leaf({"A": entry}, [size])
        if "y" in entry
        else json.dumps({"users": ["A"], "num_samples": [size], "user_data": {"A": entry}}),
    )
    with pytest.raises(DataError, match=message) as caught:
        Shakespeare().load(root)
    assert "roles.json, user 'A'" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "x", "y", "raw"]), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(
    users=st.just(["a"]) | json_values,
    sizes=st.lists(st.integers(0, 2), max_size=2) | json_values,
    data=st.fixed_dictionaries({"a": st.fixed_dictionaries({"x": json_values, "y": json_values}) | json_values}) | json_values,
    dataset_class=st.sampled_from([Femnist, Shakespeare]),
)
def test_any_json_gives_a_data_error_or_a_data_set(tmp_path_factory, users, sizes, data, dataset_class):
    folder = tmp_path_factory.getbasetemp() / dataset_class.__name__.lower()
    folder.mkdir(exist_ok=True)
    (folder / "all.json").write_text(json.dumps({"users": users, "num_samples": sizes, "user_data": data}))
    try:
        dataset = dataset_class().load(folder.parent)
    except DataError as error:
        assert str(folder) in str(error)
    else:
        assert len(dataset.train) > 0


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=50))
def test_any_bytes_give_a_data_error(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "bytes" / "femnist"
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "all.json").write_bytes(content)
    with pytest.raises(DataError):
        Femnist().load(folder.parent)


@pytest.mark.skipif("FEDME_DATA" not in os.environ, reason="needs data sets (FEDME_DATA=DIRECTORY make test)")
def test_real_leaf_files():
    root = Path(os.environ["FEDME_DATA"])
    femnist, shakespeare = Femnist().load(root), Shakespeare().load(root)
    assert femnist.source.x.dtype == torch.uint8
    assert all(len(train) and len(test) for train, test in femnist.owners.values())
    assert len(shakespeare.owners) == 1129
    counts = torch.bincount(shakespeare.source.labels, minlength=90)
    assert counts[-1] < 100
    assert counts.argmax() == VOCABULARY.index(" ")
