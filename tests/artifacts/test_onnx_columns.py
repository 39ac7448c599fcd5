"""Exported models take raw rows: text, gaps, numbers that stand for gaps, and unknown categories."""

import json

import numpy as np
import pandas
import pytest

import fedme

onnxruntime = pytest.importorskip("onnxruntime")


def site(seed, count=60):
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "age": draw.normal(55, 10, count).round(1),
            "x": draw.choice([0, 180, 240, 300], count),  # 0 stands for a gap, and the name is that of the network's input
            "thal": draw.choice([3, 6, 7], count).astype(float),  # numbers that are categories
            "sex": draw.choice(["f", "m"], count).astype(object),
            "id": np.arange(count),
        }
    )
    frame.loc[draw.choice(count, 6), "age"] = np.nan
    frame.loc[draw.choice(count, 6), "thal"] = np.nan
    frame.loc[draw.choice(count, 6), "sex"] = None
    return frame.assign(ill=draw.choice(["no", "yes"], count))


OPTIONS = {"ignore": ["id"], "categorical": ["thal"], "missing": {"age": "indicator", "*": "median"}, "na_values": {"x": [0]}}


def fit(options, frames, output, label="ill"):
    clients = [fedme.Client(name, train=frame, label=label, model="dnn-16") for name, frame in frames.items()]
    return fedme.FedMe(rounds=2, data=options).fit(clients, output=output, quiet=True)


@pytest.mark.parametrize("label", ["ill", "age"])
def test_raw_rows_go_into_an_exported_model(tmp_path, label):
    frames = {"a": site(1), "b": site(2)}
    options = OPTIONS if label == "ill" else {**OPTIONS, "missing": "indicator"}
    if label == "age":
        frames = {name: frame.dropna(subset="age") for name, frame in frames.items()}
    model = fit(options, frames, tmp_path / "run", label)["a"]
    new = site(3).drop(columns=label)
    if label == "age":
        new = new.assign(ill=site(3)["ill"])
    new.loc[0, "sex"], new.loc[1, "thal"] = "other", 9.0  # categories that the model does not know
    expected = model.logits(new).numpy()
    session = onnxruntime.InferenceSession(str(model.export(tmp_path / "a.onnx")))
    facts = session.get_modelmeta().custom_metadata_map
    feed = {}
    for column in json.loads(facts["columns"]):
        values = new[[column["name"]]]
        text = column["type"] == "text"
        feed[column["name"]] = values.fillna("").to_numpy(dtype=object) if text else values.to_numpy(dtype=np.float32)
    assert "id" not in feed
    (output,) = session.run(None, feed)
    assert np.allclose(output, expected, atol=2e-4, rtol=2e-4)
    single = session.run(None, {name: values[:1] for name, values in feed.items()})[0]
    assert np.allclose(single, expected[:1], atol=2e-4, rtol=2e-4)


def test_a_table_of_numbers_goes_in_as_one_matrix_with_gaps(tmp_path):
    import torch

    options = {"ignore": ["id", "sex"], "missing": "indicator", "na_values": {"x": [0]}}
    model = fit(options, {"a": site(1), "b": site(2)}, tmp_path / "run")["a"]
    new = site(3).drop(columns="ill")
    matrix = new[["age", "x", "thal"]].to_numpy(dtype=np.float32)
    expected = model.logits(new)
    session = onnxruntime.InferenceSession(str(model.export(tmp_path / "a.onnx")))
    assert np.allclose(session.run(["logits"], {"x": matrix})[0], expected, atol=1e-4)
    program = torch.export.load(model.export(tmp_path / "a.pt2")).module()
    assert torch.allclose(program(torch.from_numpy(matrix)), expected, atol=1e-4)
    assert torch.allclose(model.logits(torch.from_numpy(matrix)), expected, atol=1e-4)
