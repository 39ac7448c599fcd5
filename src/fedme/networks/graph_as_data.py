"""A network as data: the graph of its operations, traced by torch.export, without its weights.

The graph is read back by an interpreter that knows PyTorch's Core ATen operators, some operators that consist of them, and
arithmetic of sizes. Nothing in the data is imported or evaluated. (`torch.export.load` evaluates expressions of the file.)
The graph is that of evaluation mode.
"""

import base64
import logging
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from fedme.core.data import Inputs
from fedme.core.model import default_dtype, output_of
from fedme.networks.input_sizes import ArchError

# Operators that people's networks consist of and that are not in the core: with them most graphs need not be decomposed.
COMPOSITE = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default", "bilinear.default", "matmul.default", "einsum.default", "scaled_dot_product_attention.default",
        "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "conv3d.padding",
        "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input",
        "batch_norm.default", "layer_norm.default", "group_norm.default", "instance_norm.default", "rms_norm.default",
        "max_pool1d.default", "max_pool2d.default", "max_pool3d.default", "adaptive_max_pool2d.default",
        "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default", "pad.default", "dropout.default",
        "softmax.int", "log_softmax.int", "silu.default", "mish.default", "hardswish.default", "hardsigmoid.default",
        "softplus.default", "selu.default", "celu.default", "prelu.default", "log_sigmoid.default",
        "flatten.using_ints", "unflatten.int", "reshape.default", "transpose.int", "contiguous.default", "chunk.default",
        "split.Tensor", "stack.default", "unbind.int", "squeeze.default", "movedim.int", "t.default", "sum.default",
        "to.dtype", "to.dtype_layout", "to.device", "detach.default", "__and__.Tensor", "__or__.Tensor",
        "zeros.default", "zeros_like.default", "ones.default", "ones_like.default", "new_zeros.default", "new_ones.default",
        "arange.default", "arange.start", "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input",
    )
)  # fmt: skip
# Operators that are not in the core and have no decomposition.
FURTHER = frozenset(
    f"aten.{name}"
    for name in (
        "lift_fresh_copy.default", "linalg_vector_norm.default", "_linalg_det.default", "addbmm.default", "addmv.default",
        "max.default", "min.default", "erfc.default", "exp2.default", "special_erfcx.default", "signbit.default",
        "round.decimals", "remainder.Scalar_Tensor", "logcumsumexp.default", "unfold.default", "repeat_interleave.Tensor",
        "bincount.default", "histc.default", "_unique2.default", "unique_consecutive.default", "unique_dim.default",
        "bitwise_and.Scalar_Tensor", "bitwise_or.Scalar_Tensor", "bitwise_xor.Scalar_Tensor", "bitwise_left_shift.Tensor",
        "bitwise_left_shift.Tensor_Scalar", "bitwise_left_shift.Scalar_Tensor", "bitwise_right_shift.Tensor",
        "bitwise_right_shift.Tensor_Scalar", "bitwise_right_shift.Scalar_Tensor", "__lshift__.Scalar", "__rshift__.Scalar",
        "upsample_bilinear2d.default", "upsample_bicubic2d.default", "upsample_trilinear3d.default",
        "_upsample_bilinear2d_aa.default", "_upsample_bicubic2d_aa.default", "view_copy.default",
        "complex.default", "polar.default", "angle.default", "_conj.default", "_fft_c2c.default", "view_as_complex.default",
        "view_as_complex_copy.default", "view_as_real.default", "view_as_real_copy.default",
        "blackman_window.default", "hamming_window.default",
    )
)  # fmt: skip
FUNCTIONAL = {"aten.detach_.default": "aten.detach.default"}  # changes nothing but what gradients see
# Of the core, but not for networks: results that are random or depend on memory that is not initialised, and gradients.
EXCLUDED = re.compile(r"aten\.(empty|rand|_local_scalar|.*_backward)|.*\.out$")
SIZES: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_ite", "sym_not")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
}
_SIZE_NAMES = {function: name for name, function in SIZES.items()}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
MAIN_MEMORY: Mapping[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in (
        torch.device("cpu"), torch.strided,
        torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
    )
}  # fmt: skip
WEIGHT_TYPES = ("parameter", "frozen", "buffer")
KEYS = ("inputs", "weights", "constants", "nodes", "output")

Graph = dict[str, Any]


class NotTraceable(Exception):
    """A network whose graph cannot be written as data; the text says why."""


def graph_of(module: nn.Module, inputs: Inputs) -> Graph:
    """The graph of a network in evaluation mode; `inputs` are two samples. Raises NotTraceable."""
    names = list(inputs) if isinstance(inputs, Mapping) else []
    tensors = tuple(inputs.values()) if isinstance(inputs, Mapping) else (inputs,)
    batch = {0: torch.export.Dim("samples", min=1)}
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with quiet(), default_dtype(dtype):  # a network may make tensors in its forward pass
            program = torch.export.export(_Logits(module.eval(), names), tensors, dynamic_shapes=((batch,) * len(tensors),))
    except Exception as error:  # the exporter may raise anything on a user's network
        raise NotTraceable(f"torch cannot trace it ({first_line(error)})") from error
    try:
        graph = _written(program, module, names)
    except NotTraceable:  # it takes seconds, and makes a graph of the core operators alone
        try:
            with quiet():
                program = program.run_decompositions()
        except Exception as error:
            raise NotTraceable(f"torch cannot decompose its operations ({first_line(error)})") from error
        graph = _written(program, module, names)
    return graph


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what the exporters say about their own internals: warnings, log messages, and graphs printed beside an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def first_line(error: Exception) -> str:
    """The class of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Logits(nn.Module):
    """A network that takes its inputs in order and returns a tensor."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, *tensors: Tensor) -> Tensor:
        return output_of(self.network(**dict(zip(self.names, tensors, strict=True))) if self.names else self.network(*tensors))


def _written(program: Any, module: nn.Module, names: Sequence[str]) -> Graph:
    """The program as data. Values are numbered: inputs, weights, constants, and then one value per node."""
    weights = _weights(module)
    numbers = {weight[0]: len(names or [""]) + number for number, weight in enumerate(weights)}
    constants: list[Any] = []
    values: dict[Any, int] = {}
    inputs = 0
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind.name == "USER_INPUT":
            values[node] = inputs
            inputs += 1
        elif spec.kind.name in ("PARAMETER", "BUFFER"):
            values[node] = numbers[_first_names(module)[spec.target.removeprefix("network.")]]
        elif spec.kind.name == "CONSTANT_TENSOR":
            values[node] = len(names or [""]) + len(weights) + len(constants)
            constants.append(_constant(program.constants[spec.target]))
        else:
            raise NotTraceable(f"it has an input that is not a tensor ({spec.kind.name})")
    output = _output(program)
    nodes: list[Any] = []
    for node in _needed(program.graph, output):
        if node.op == "placeholder":
            continue
        if node.op != "call_function":
            raise NotTraceable(f"its graph has a part that is not an operation ({node.op} {node.target})")
        named = {key: _plain(value, values) for key, value in node.kwargs.items()}
        plain = [_name(node.target), _plain(list(node.args), values), named]
        values[node] = len(names or [""]) + len(weights) + len(constants) + len(nodes)
        nodes.append(plain)
    return {"inputs": list(names), "weights": weights, "constants": constants, "nodes": nodes, "output": values[output]}


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every weight and buffer by each of its names: tied weights have several."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _weights(module: nn.Module) -> list[Any]:
    named: list[tuple[str, str, Tensor]] = []
    named += [("parameter" if p.requires_grad else "frozen", name, p) for name, p in module.named_parameters()]
    named += [("buffer", name, b) for name, b in module.named_buffers()]
    return [[name, kind, _dtype_name(tensor.dtype), list(tensor.shape)] for kind, name, tensor in named]


def _output(program: Any) -> Any:
    """The node of the logits. Changes of buffers, the other outputs of a decomposed graph, are left out."""
    returned = next(node for node in program.graph.nodes if node.op == "output").args[0]
    kinds = [spec.kind.name for spec in program.graph_signature.output_specs]
    return returned[kinds.index("USER_OUTPUT")]


def _needed(graph: Any, output: Any) -> list[Any]:
    """The nodes that the output depends on, in order. The others are checks of the exporter."""
    needed, waiting = set(), [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in needed]


def _name(target: Any) -> str:
    if target in _SIZE_NAMES:
        return _SIZE_NAMES[target]
    name = FUNCTIONAL.get(str(target), str(target))
    try:
        _operator(name)
    except ArchError as error:
        raise NotTraceable(str(error)) from error
    return name


def _plain(value: Any, values: Mapping[Any, int]) -> Any:
    """An argument as data: {"value": 3} refers to a value."""
    if isinstance(value, torch.fx.Node):
        return {"value": values[value]}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": str(value)}
    if isinstance(value, list | tuple):
        return [_plain(item, values) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if value in MAIN_MEMORY.values():
        return {"memory": str(value).removeprefix("torch.")}
    raise NotTraceable(f"an argument of an operation is {value!r}")


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NotTraceable(f"it has numbers of type {name}")
    return name


def _constant(tensor: Tensor) -> list[Any]:
    plain = tensor.detach().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [_dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]


STEPS = "the graph"  # not a name that an attribute of a network can have


class GraphNetwork(nn.Module):
    """The network of a graph: it computes one node after another. Its weights have no values until they are loaded."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        if not isinstance(graph, dict) or set(graph) != set(KEYS):
            raise ArchError(f"a graph must have {', '.join(KEYS)}")
        for key in KEYS[:-1]:
            if not isinstance(graph[key], list):
                raise ArchError(f"'{key}' of a graph must be a list, got {type(graph[key]).__name__}")
        if not all(isinstance(name, str) for name in graph["inputs"]):
            raise ArchError("the inputs of a graph must be names")
        places = [self._add(weight) for weight in graph["weights"]]
        # The network's own parts may have any name, so this is kept under one that no attribute has.
        self.__dict__[STEPS] = Steps(graph, places)

    def _add(self, weight: Any) -> tuple[nn.Module, str]:
        """Register a weight without values; returns its owner and its last name."""
        valid = isinstance(weight, list) and len(weight) == 4 and isinstance(weight[3], list)
        valid = valid and all(isinstance(word, str) for word in weight[:3]) and all(type(n) is int for n in weight[3])
        if not valid or weight[1] not in WEIGHT_TYPES or weight[2] not in DTYPES:
            raise ArchError(f"a weight of a graph must be [name, kind, dtype, shape], got {str(weight)[:100]}")
        *path, last = weight[0].split(".")
        owner: nn.Module = self
        try:
            # Not by add_module, which refuses names of nn.Module's methods; as attributes of a network they are possible.
            for part in path:
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            values = torch.empty(weight[3], dtype=DTYPES[weight[2]])
            if not all(weight[0].split(".")) or any(
                last in names for names in (owner._parameters, owner._buffers, owner._modules)
            ):
                raise KeyError("its name is empty or used twice")
            if weight[1] == "buffer":
                owner._buffers[last] = values
            else:
                owner._parameters[last] = nn.Parameter(values, weight[1] == "parameter")
        except (KeyError, RuntimeError, ValueError, OverflowError) as error:
            raise ArchError(f"weight '{weight[0][:100]}' of a graph is invalid: {error}") from error
        return owner, last

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        """Logits, or predicted values."""
        steps: Steps = self.__dict__[STEPS]
        given = [named[name] for name in steps.inputs] if named else list(tensors)
        weights = [_weight(owner, name) for owner, name in steps.places]
        values: list[Any] = [*given, *weights, *steps.constants]
        for (function, args, kwargs), unused in zip(steps.nodes, steps.unused, strict=True):
            values.append(function(*_filled(args, values), **_filled(kwargs, values)))
            for place in unused:
                values[place] = None
        return values[steps.output]  # type: ignore[no-any-return]


class Steps:
    """What a graph computes: its nodes in order, and where their values come from."""

    def __init__(self, graph: Mapping[str, Any], places: Sequence[tuple[nn.Module, str]]) -> None:
        self.inputs: list[str] = graph["inputs"]
        self.places = places
        self.constants = [_read_constant(constant) for constant in graph["constants"]]
        first = len(self.inputs or [""]) + len(self.places) + len(self.constants)
        self.nodes = [_read_node(node, first + number) for number, node in enumerate(graph["nodes"])]
        self.output = graph["output"]
        if type(self.output) is not int or not 0 <= self.output < first + len(self.nodes):
            raise ArchError(f"the output of a graph must be the number of a value, got {str(self.output)[:50]}")
        last = {place: number for number, (_, args, kwargs) in enumerate(self.nodes) for place in _places((args, kwargs))}
        self.unused: list[list[int]] = [[] for _ in self.nodes]  # values that no later node needs
        for place, number in last.items():
            if place != self.output:
                self.unused[number].append(place)


def _weight(owner: nn.Module, name: str) -> Tensor:
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]  # type: ignore[return-value]


class _Value(int):
    """The number of a value in the arguments of a node."""


def _places(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, _Value):
        yield int(arguments)
    elif isinstance(arguments, list | tuple):
        for item in arguments:
            yield from _places(item)
    elif isinstance(arguments, dict):
        yield from _places(list(arguments.values()))


def _filled(arguments: Any, values: Sequence[Any]) -> Any:
    """Arguments with values in the place of their numbers."""
    if isinstance(arguments, _Value):
        return values[arguments]
    if isinstance(arguments, list):
        return [_filled(item, values) for item in arguments]
    return {key: _filled(item, values) for key, item in arguments.items()} if isinstance(arguments, dict) else arguments


def _operator(name: str) -> Callable[..., Any]:
    """The operator of this name, if it is one that a graph may have."""
    if name in SIZES:
        return SIZES[name]
    parts = re.fullmatch(r"aten\.(\w+)\.(\w+)", name)
    op = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None) if parts and not EXCLUDED.match(name) else None
    if (
        isinstance(op, torch._ops.OpOverload)
        and not op._schema.is_mutable
        and (name in COMPOSITE or name in FURTHER or torch.Tag.core in op.tags)
    ):
        return op
    raise ArchError(f"{name[:50]!r} is not an operator of saved graphs")


def _read_node(node: Any, number: int) -> tuple[Callable[..., Any], Any, Any]:
    valid = isinstance(node, list) and len(node) == 3 and isinstance(node[0], str)
    if not valid or not isinstance(node[1], list) or not isinstance(node[2], dict):
        raise ArchError(f"a node of a graph must be [operator, arguments, named arguments], got {str(node)[:100]}")
    named = {key: _read_argument(value, number) for key, value in node[2].items()}
    return _operator(node[0]), _read_argument(node[1], number), named


def _read_argument(value: Any, number: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_read_argument(item, number) for item in value]
    kind, content = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "value" and type(content) is int and 0 <= content < number:
        return _Value(content)
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "dtype" and isinstance(content, str) and content in DTYPES:
        return DTYPES[content]
    if kind == "memory" and isinstance(content, str) and content in MAIN_MEMORY:
        return MAIN_MEMORY[content]
    raise ArchError(f"invalid argument in a graph: {str(value)[:100]}")


def _read_constant(constant: Any) -> Tensor:
    try:
        dtype, shape, text = constant
        data = bytearray(base64.b64decode(text, validate=True))
        values = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
        return values.reshape(tuple(shape))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ArchError(f"invalid constant in a graph: {error}") from error
