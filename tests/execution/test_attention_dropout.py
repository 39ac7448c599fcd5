"""Attention with dropout: the masks are keyed, so it is compiled, and equal on every path."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedme.core.attention import attention, attention_of
from fedme.core.data import Arrays, Split
from fedme.core.dropout import FUNCTIONAL
from fedme.core.key import Key
from fedme.core.model import Arch, Model, dropout_layers
from fedme.core.operations import BatchSchedule, Train
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_support import needs_compiled_code, same

CLASSES, LENGTH, WIDTH = 3, 4, 8


class Encoder(nn.Module):
    """As people write it: the dropout of the layer is 0.1 by default."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, **{"batch_first": True, **options})
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


class SequenceFirst(Encoder):
    def __init__(self):
        super().__init__(batch_first=False)

    def forward(self, x):
        return self.head(self.layers(x.transpose(0, 1)).mean(0))


class Causal(nn.Module):
    """Attention as in small language models: by the function, with dropout in training only."""

    def __init__(self, masked=False):
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES), 0.3
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1))
        self.masked = masked

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        mask = {"attn_mask": self.seen} if self.masked else {"is_causal": True}
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, **mask)
        return self.out(self.dropout(y.transpose(1, 2).flatten(2)).mean(1))


class Across(nn.Module):
    """Queries of another width than keys and values, and the weights of attention are used too."""

    def __init__(self):
        super().__init__()
        self.ask, self.tell = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 5)
        self.attention = nn.MultiheadAttention(6, 3, dropout=0.2, kdim=5, vdim=5, bias=False, batch_first=True)
        self.head = nn.Linear(6 + LENGTH, CLASSES)

    def forward(self, x):
        told = self.tell(x)
        y, weights = self.attention(self.ask(x[:, :2]), told, told)
        return self.head(torch.cat([y.mean(1), weights.mean(1)], 1))


def masked_causal():
    return Causal(masked=True)


def operation(factory):
    x = torch.randn((9, LENGTH, WIDTH), generator=Key(0).torch(), dtype=torch.float64)
    data = Split(Arrays(x, torch.arange(9) % CLASSES), torch.arange(9))
    model = Model.init(Arch(factory), Key(1), torch.float64)
    return Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(2, 4), Key(2))


COMPILED = [Encoder, Causal, Across]
NETWORKS = [*COMPILED, SequenceFirst, masked_causal]  # dropout of another dimension than the first; a mask that is a buffer


@needs_compiled_code
@pytest.mark.parametrize("factory", COMPILED)
def test_it_is_compiled_as_by_the_reference(factory):
    op, engine = operation(factory), Dispatcher()
    assert engine.route(op).backend.name == "compiled", engine.route(op).reason
    ((done, _),) = engine([op])
    assert same(done.models["own"], reference.run(op).models["own"], 1e-9)


@pytest.mark.parametrize("factory", NETWORKS)
@pytest.mark.parametrize("path", ["workers", "stacked"])
def test_other_paths_are_as_the_reference(factory, path):
    op = operation(factory)
    ((done, _),) = Dispatcher(path=path)([op])
    assert same(done.models["own"], reference.run(op).models["own"], 1e-9)


@pytest.mark.parametrize("factory", NETWORKS)
def test_dropout_takes_part_and_depends_on_the_key_only(factory):
    arch = Arch(factory)
    x, layers = torch.ones(2, LENGTH, WIDTH), dropout_layers(arch)
    assert any(name.endswith(FUNCTIONAL) for name in layers)
    model = Model.init(arch, Key(1))
    with torch.random.fork_rng():
        first, again, other = (model(x, training=True, masks=dict.fromkeys(layers, torch.tensor(s))) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_without_dropout_it_is_the_layer_of_torch(options, batch_first):
    def values(length, width):
        x = torch.randn((3, length, width), generator=Key(10 * length + width).torch(), dtype=torch.float64)
        return x if batch_first else x.transpose(0, 1)

    layer = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=batch_first, dtype=torch.float64, **options)
    q, k, v = values(4, 8), values(6, options.get("kdim", 8)), values(6, options.get("vdim", 8))
    causal, absent = torch.ones(4, 6, dtype=torch.bool).triu(1), torch.zeros(3, 6, dtype=torch.bool)
    absent[1, 4:] = True
    added = torch.randn((6, 4, 6), generator=Key(9).torch(), dtype=torch.float64)
    masks = [{}, {"attn_mask": causal}, {"key_padding_mask": absent}, {"attn_mask": causal, "key_padding_mask": absent}]
    for mask, average in itertools.product([*masks, {"attn_mask": added}, {"attn_mask": added[0]}], [False, True]):
        expected = layer(q, k, v, average_attn_weights=average, **mask)
        got = attention_of(layer, lambda x, _: x, q, k, v, average_attn_weights=average, **mask)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, expected, strict=True)), mask
    if not options:
        expected, _ = layer(q, q, q, need_weights=False)
        got, nothing = attention_of(layer, lambda x, _: x, q, q, q, need_weights=False)
        assert nothing is None
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(4, 4).tril().bool()}])
def test_without_dropout_it_is_the_function_of_torch(options):
    q, k, v = (torch.randn((3, 2, 4, 8), generator=Key(n).torch(), dtype=torch.float64) for n in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.allclose(attention(lambda x, _: x, q, k, v, **options)[0], expected, rtol=0, atol=1e-12)
