"""Programs of the compiled code: nodes over values with a fixed layout in memory."""

from dataclasses import dataclass

from torch import Tensor

NODE_TYPES = (
    *("dense", "convolution", "depthwise", "pool", "elementwise", "binary", "dropout", "gather", "broadcast"),
    *("channel_norm", "row_norm", "softmax", "matrix_product", "embedding", "lstm", "gru"),
)
FUNCTIONS = (
    *("affine", "relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "leaky_relu", "elu", "hardswish", "hardsigmoid"),
    *("clamp", "softplus", "mish", "exp", "log", "sqrt", "abs", "square", "reciprocal", "sin", "cos"),
    *("greater", "at_least", "equal", "choose"),
)


@dataclass
class Value:
    """A value: its size per sample with padding, and the layout of its rows."""

    size: int
    width: int  # of a row
    padded_width: int
    elements: int  # without padding
    gradient: bool = False
    sums: bool = False


@dataclass(frozen=True)
class Node:
    """A node of the compiled code; `compiled_*.hpp` say what its numbers mean."""

    type: str
    inputs: tuple[int, ...]
    output: int
    parameters: tuple[str | None, ...] = ()
    numbers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()
    table: tuple[int, ...] = ()
    layer: str | None = None  # a dropout layer
    starts: tuple[int, ...] = ()  # where the used part of every parameter begins; nothing: at 0


@dataclass(frozen=True)
class Program:
    """The nodes of a network in the order they run. The first value is the input."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    output: int
    classes: int
    parameters: tuple[str, ...]
    layers: tuple[str, ...]  # dropout layers
    counters: tuple[str, ...]  # buffers that count batches
    symbols: int  # that an embedding knows; 0: the inputs are numbers
    constants: tuple[tuple[str, Tensor], ...] = ()  # tensors that the forward pass makes, which are no parameters
    assumed: tuple[tuple[str, Tensor], ...] = ()  # buffers whose numbers are part of the program
    narrowed: bool = False  # whether the network computes with fewer digits than its weights have
