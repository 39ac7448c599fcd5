"""Networks that are chains of dense layers, however they are written: recognised by their programs."""

import functools

import torch

from fedme.core.key import Key
from fedme.core.model import Arch, Model, dropout_layers
from fedme.execution.lowering import lowered
from fedme.execution.program import FUNCTIONS, Node
from fedme.execution.stacked_dense import FORWARD, Activation, DenseLayer, Dropout, Linear, dense_pass


@functools.lru_cache(maxsize=256)
def dense_layers(arch: Arch, shape: tuple[int, ...]) -> tuple[DenseLayer, ...] | str:
    """The layers of a network for inputs of this shape, or why it is no chain of dense layers."""
    program = lowered(arch, shape, False, 1)
    if isinstance(program, str):
        return program
    layers: list[DenseLayer] = []
    value = 0
    for node in program.nodes:
        own = _layers_of(node) if node.inputs == (value,) and not any(node.starts) else []
        if not own:
            return f"{arch.name} is not a chain of dense layers"
        layers += own
        value = node.output
    used = [name for layer in layers if isinstance(layer, Linear) for name in (layer.weight, layer.bias) if name]
    if sorted(used) != sorted(Model.init(arch, Key(0)).params):
        return f"{arch.name} has tied, frozen or unused weights"
    return _disagreement(arch, shape, tuple(layers)) or tuple(layers)


def _layers_of(node: Node) -> list[DenseLayer]:
    in_order = node.table == tuple(range(len(node.table)))
    if node.type == "dense" and in_order and not node.numbers[2]:
        weight, bias = node.parameters
        assert weight is not None
        return [Linear(weight, bias), Activation("relu")] if node.numbers[1] else [Linear(weight, bias)]
    if node.type == "elementwise" and FUNCTIONS[node.numbers[0]] in FORWARD:
        return [Activation(FUNCTIONS[node.numbers[0]])]
    if node.type == "dropout" and in_order and node.numbers[0] == 0 and node.numbers[1] == node.numbers[2] and node.layer:
        return [Dropout(node.layer, node.reals[0])]
    return []


def _disagreement(arch: Arch, shape: tuple[int, ...], layers: tuple[DenseLayer, ...]) -> str:
    """How the layers differ from the network, which may do what a trace does not see; empty if they do not."""
    key = Key(0).at("check")
    model = Model.init(arch, key, torch.float64)
    x = torch.randn((3, *shape), generator=key.torch(), dtype=torch.float64)
    masks = {layer: torch.tensor(7) for layer in dropout_layers(arch)}
    try:
        leaves = {name: p.clone().requires_grad_() for name, p in model.params.items()}
        logits = Model(arch, leaves, model.buffers)(x.clone(), training=True, masks=masks)  # it may change its inputs
        wanted = torch.autograd.grad(logits.square().sum(), list(leaves.values()))
        with torch.inference_mode():
            predicted = model(x.clone())
    except Exception as error:  # a user's network may raise anything
        return f"{arch.name} fails on random inputs ({type(error).__name__}: {error})"
    weights = {name: p.unsqueeze(0) for name, p in model.params.items()}
    result = dense_pass(layers, weights, x.flatten(1).unsqueeze(0), {layer: seed.view(1) for layer, seed in masks.items()})
    gradients = result.gradients(2 * result.logits)
    evaluated = dense_pass(layers, weights, x.flatten(1).unsqueeze(0), None).logits[0]
    pairs = [
        (result.logits[0], logits),
        (evaluated, predicted),
        *((gradients[name][0], g) for name, g in zip(leaves, wanted, strict=True)),
    ]
    agree = all(torch.allclose(ours, expected.double(), rtol=1e-9, atol=1e-9) for ours, expected in pairs)
    return "" if agree else f"{arch.name} does more than its layers say"
