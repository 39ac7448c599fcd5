"""Several labels at once and numbers to predict: every method, batched equals alone."""

from dataclasses import replace

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import BODIES, CLASSES, DENSE, DROPPING, LINEAR, WIDE, clients, federate, personal, split, task

SIZES = (7, 23, 1, 12)
OWN = ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
TRAIN = Training(epochs=2, batch=5, lr=0.02, momentum=0.5, clip=5.0)


def targets(kind, count):
    values = torch.randn((count, CLASSES), generator=Key(5).torch())
    return values > 0.3 if kind == "multi-label" else values


def federation(kind):
    data = clients(SIZES, public=8)
    source = data["0"].train.source
    source = replace(source, labels=targets(kind, len(source.labels)))

    def moved(client):
        parts = {name: replace(getattr(client, name), source=source) for name in ("train", "val", "test", "public")}
        return replace(client, **parts)

    return {name: moved(client) for name, client in data.items()}


def setting(kind, archs, shared=LINEAR):
    made = task(archs, shared=shared, public=8, unlabeled=split(10, Key(9)))
    return replace(made, schema=replace(made.schema, task_type=kind))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.classes_only])
@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_every_method_batched_equals_alone(name, kind):
    method = METHODS[name](train=TRAIN)
    archs = (DENSE, WIDE, DROPPING, LINEAR) if name in OWN else (BODIES.get(name, LINEAR),) * 4
    made, data = setting(kind, archs, LINEAR if name == "pfml" else DROPPING), federation(kind)
    batched = Dispatcher()
    a = personal(method, *federate(method, made, data, rounds=2), rounds=2)
    b = personal(method, *federate(method, made, data, rounds=2, execute=batched), rounds=2)
    for client in data:
        assert a[client].arch == b[client].arch
        assert all(torch.allclose(p, b[client].params[n], rtol=0, atol=1e-9) for n, p in a[client].params.items())
        assert a[client].finite
    assert any(path in ("compiled", "stacked") for _, path, _ in batched.paths)


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
@pytest.mark.parametrize("path", ["stacked", "workers"])
def test_other_ways_agree_too(kind, path):
    method = METHODS["fedme"](train=TRAIN)
    made, data = setting(kind, (DENSE, WIDE, DROPPING, LINEAR)), federation(kind)
    a = personal(method, *federate(method, made, data, rounds=2), rounds=2)
    b = personal(method, *federate(method, made, data, rounds=2, execute=Dispatcher(workers=2, path=path)), rounds=2)
    for client in data:
        assert all(torch.allclose(p, b[client].params[n], rtol=0, atol=1e-9) for n, p in a[client].params.items())


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.classes_only])
def test_methods_of_classes_refuse_other_tasks(name):
    with pytest.raises(TaskError, match=f"method '{name}' is for classification, and this is regression; use another"):
        METHODS[name](train=TRAIN).check(setting("regression", (LINEAR,) * 4))


def test_what_has_no_meaning_is_refused_with_the_reason():
    for method, kind, message in [
        (METHODS["fedme"](adopt="accuracy"), "regression", "adopt = 'accuracy' has no meaning.*use 'loss'"),
        (METHODS["fedme"](adopt_by={"1": "accuracy"}), "regression", "no meaning"),
        (
            METHODS["fedmd"](digest_loss="kl"),
            "multi-label",
            "digest_loss = 'kl' compares probabilities of classes.*'mae' or 'mse'",
        ),
    ]:
        with pytest.raises(TaskError, match=message):
            method.check(setting(kind, (LINEAR,) * 4))
    METHODS["fedme"](adopt="accuracy").check(setting("multi-label", (LINEAR,) * 4))
