"""Networks and partitions of other libraries, the real ones: Hugging Face, timm, Flower Datasets. Nothing is downloaded."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import fedme
from fedme.core.key import Key

QUICK = {"rounds": 2, "train": {"epochs": 1}}


def texts(count, seed):
    ids = torch.randint(0, 50, (count, 12), generator=Key(seed).torch())
    mask = (torch.arange(12) < torch.randint(5, 13, (count, 1), generator=Key(seed + 1).torch())).long()
    return {"input_ids": ids, "attention_mask": mask}, (ids[:, 0] > 25).long()


def images(count, seed):
    draw = Key(seed).torch()
    y = torch.randint(0, 3, (count,), generator=draw)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=draw).to(torch.uint8)
    x[torch.arange(count), y] //= 2
    return x, y


def bert(classes: int, vocabulary: int, **options: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=vocabulary, num_labels=classes, max_position_embeddings=16, **sizes, **options)
    return transformers.BertForSequenceClassification(config)


def distilbert(classes: int, vocabulary: int) -> nn.Module:
    import transformers

    config = transformers.DistilBertConfig(
        vocab_size=vocabulary, num_labels=classes, dim=16, n_layers=1, n_heads=2, hidden_dim=16
    )
    return transformers.DistilBertForSequenceClassification(config)


def test_networks_of_hugging_face(tmp_path):
    """They return objects with `logits`; inputs are dictionaries."""
    pytest.importorskip("transformers", reason="needs transformers (pip install -c constraints.txt -e '.[dev-full]')")
    import onnxruntime

    clients = [
        fedme.Client("north", train=texts(30, 1), model=fedme.Arch(bert)),
        fedme.Client("south", train=texts(30, 2), model=fedme.Arch(distilbert)),
        fedme.Client("east", train=texts(30, 3), model=bert(2, 50)),  # an instance: saved as ONNX
    ]
    result = fedme.FedMe(**QUICK).fit(clients, output=tmp_path / "run", quiet=True)
    x, _ = texts(7, 9)
    for client in result:
        model = result[client]
        expected = model.logits(x)
        assert torch.allclose(model.module(**x), expected, atol=1e-6)
        if client == "east":
            program = torch.export.load(model.export(tmp_path / "east.pt2")).module()
            assert torch.allclose(program(**x), expected, atol=1e-5)
        else:
            session = onnxruntime.InferenceSession(model.export(tmp_path / f"{client}.onnx"))
            found = session.run(["logits"], {name: value.numpy() for name, value in x.items()})[0]
            assert np.allclose(found, expected, atol=1e-5)


def test_a_hugging_face_network_of_numbers():
    pytest.importorskip("transformers", reason="needs transformers (pip install -c constraints.txt -e '.[dev-full]')")
    x, _ = texts(30, 1)
    clients = [fedme.Client(name, train=(x, x["input_ids"].float().mean(1)), model=fedme.Arch(bert)) for name in "ab"]
    result = fedme.FedMe(**QUICK).fit(clients, quiet=True)
    assert result["a"].task == "regression"
    assert np.allclose(result["a"].predict(x), result["a"].module(**x).detach().numpy()[:, 0], rtol=1e-4)


@functools.cache
def timm():
    """It needs the torchvision that belongs to the torch that is installed."""
    try:
        import timm
    except (ImportError, RuntimeError):
        pytest.skip("needs timm (pip install timm, with the torchvision of your torch)")
    return timm


def resnet(classes: int) -> nn.Module:
    return timm().create_model("resnet10t", num_classes=classes)


def vit(classes: int) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
    return timm().create_model("vit_tiny_patch16_224", num_classes=classes, **sizes)


@pytest.mark.slow
def test_networks_of_timm(tmp_path):
    clients = [
        fedme.Client("a", train=images(30, 1), model=fedme.Arch(resnet)),
        fedme.Client("b", train=images(30, 2), model=fedme.Arch(vit)),
        fedme.Client("c", train=images(30, 3), model=timm().create_model("mobilenetv3_small_050", num_classes=3)),
    ]
    result = fedme.FedMe(rounds=1, train={"epochs": 1}).fit(clients, output=tmp_path / "run", quiet=True)
    for client in result:
        assert set(result[client].predict(images(5, 9)[0]).tolist()) <= {0, 1, 2}


def test_partitions_of_flower_datasets():
    partitioner = pytest.importorskip(
        "flwr_datasets.partitioner", reason="needs flwr_datasets (pip install -c constraints.txt -e '.[dev-full]')"
    )
    from sklearn.datasets import load_digits

    import datasets

    digits = load_digits()
    features = datasets.Features(
        {"image": datasets.Array2D((8, 8), "float32"), "label": datasets.ClassLabel(names=[str(i) for i in range(10)])}
    )
    rows = {"image": digits.images.astype("float32")[:400], "label": digits.target[:400]}
    divided = partitioner.DirichletPartitioner(num_partitions=4, partition_by="label", alpha=0.5, min_partition_size=20)
    divided.dataset = datasets.Dataset.from_dict(rows, features=features)
    clients = [fedme.Client(str(i), train=divided.load_partition(i), label="label", model="dnn-16") for i in range(4)]
    result = fedme.FedMe(**QUICK).fit(clients, quiet=True)
    assert len(result["0"].classes) == 10
    assert set(result["0"].predict(digits.images[:20].astype("float32"))) <= set(range(10))
    assert sum(sum(result[c].about["data"].values()) for c in result) == 400
