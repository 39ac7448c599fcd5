"""Export of saved models as ONNX, torch.export and safetensors. The exported program fills gaps and scales its inputs itself.

An ONNX program of a model with categories takes the raw columns of a table, and encodes them too (`onnx_columns.py`).
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedme.artifacts.onnx_columns import column_types, with_columns
from fedme.core.atomic_files import RunError, replacing
from fedme.core.data import Inputs
from fedme.core.model import output_of
from fedme.datasets.data_files import require_package
from fedme.datasets.preprocessing import DTYPES, Preparation, TensorSpec
from fedme.networks.graph_as_data import first_line, quiet

Target = Literal["onnx", "torch-export", "safetensors"]
SUFFIXES: dict[Target, str] = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}


def target_of(path: Path) -> Target | None:
    """The format that the suffix of a file names."""
    return next((name for name, suffix in SUFFIXES.items() if suffix == path.suffix), None)


class Deployed(nn.Module):
    """A network with its preprocessing, from the matrix of a table or a tensor on; it returns a tensor.

    Gaps are filled, a single input tensor is scaled (several tensors, passed by name, are not), and regression outputs are
    scaled back.
    """

    gap_values: Tensor
    gap_marks: Tensor
    gap_indicators: Tensor

    scale_factor: Tensor
    scale_mean: Tensor
    scale_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, network: nn.Module, preparation: Preparation, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype
        self.fills = preparation.fills
        if preparation.fills:
            columns = preparation.numeric_columns()
            values = torch.zeros(preparation.matrix.shape)
            marks = torch.full((max(len(c.na_values or ()) for _, c in columns), *values.shape), torch.nan)
            for at, column in columns:
                values[at] = column.value or 0.0
                for number, mark in enumerate(column.na_values or ()):
                    marks[number, at] = mark
            self.register_buffer("gap_values", values)
            self.register_buffer("gap_marks", marks)
            self.register_buffer("gap_indicators", torch.tensor([at for at, c in columns if c.indicates], dtype=torch.int64))
        self.scales_inputs, self.scales_outputs = preparation.scale is not None, preparation.targets is not None
        if preparation.scale is not None:
            scaling = preparation.scale.scaling()
            self.register_buffer("scale_factor", torch.tensor(scaling.factor, dtype=torch.float32))
            self.register_buffer("scale_mean", scaling.mean)
            self.register_buffer("scale_std", scaling.std)
        if preparation.targets is not None:
            scaling = preparation.targets.scaling()
            self.register_buffer("target_mean", scaling.mean)
            self.register_buffer("target_std", scaling.std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or predicted values."""
        if self.fills:
            gap = x.isnan()
            if len(self.gap_marks):
                gap = gap | (x.unsqueeze(1) == self.gap_marks).any(1)
            indicators = gap[:, self.gap_indicators].to(x.dtype)
            x = torch.cat((torch.where(gap, self.gap_values.to(x.dtype), x), indicators), 1)
        if self.scales_inputs:
            x = ((x.to(torch.float32) * self.scale_factor - self.scale_mean) / self.scale_std).to(self.dtype)
        return self.unscaled(self.network(x))

    def unscaled(self, output: Any) -> Tensor:
        """The output of the network as a tensor in the unit of the targets."""
        z = output_of(output)
        return z * self.target_std.to(z.dtype) + self.target_mean.to(z.dtype) if self.scales_outputs else z


def deployable(network: nn.Module, preparation: Preparation) -> nn.Module:
    """The network with its scaling; the network itself if it needs none and returns a tensor."""
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    sample = example(preparation, dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        filled = preparation.fill(sample)
        scaled = preparation.scale.scaling()(filled).to(dtype) if preparation.scale and isinstance(filled, Tensor) else filled
        output = network.eval()(**scaled) if isinstance(scaled, Mapping) else network.eval()(scaled)
    if preparation.scale is None and preparation.targets is None and not preparation.fills and isinstance(output, Tensor):
        return network
    return _class_with_inputs(list(sample) if isinstance(sample, Mapping) else [])(network, preparation, dtype).eval()


def _class_with_inputs(names: Sequence[str]) -> type[Deployed]:
    """The class whose forward takes inputs of these names; exporters read its signature."""
    if not names:
        return Deployed

    def forward(self: Deployed, **named: Tensor) -> Tensor:
        return self.unscaled(self.network(**named))

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("Deployed", (Deployed,), {"forward": forward})


def example(preparation: Preparation, dtype: torch.dtype) -> Inputs:
    """Two samples of zeros, to trace a network with."""

    def zeros(form: TensorSpec) -> Tensor:
        unscaled = form.dtype == "float32" and preparation.scale is None
        return torch.zeros((2, *form.shape), dtype=dtype if unscaled else DTYPES[form.dtype])

    form = preparation.form
    return {name: zeros(part) for name, part in form.items()} if isinstance(form, Mapping) else zeros(preparation.matrix)


def _call(
    module: nn.Module, preparation: Preparation
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any] | tuple[Any, ...]]:
    """Arguments to trace the module with, and the batch axis of each."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    sample = example(preparation, dtype)
    batch = {0: torch.export.Dim("samples", min=1)}
    if isinstance(sample, Mapping):
        return (), dict(sample), dict.fromkeys(sample, batch)
    return (sample,), {}, (batch,)


def output_name(preparation: Preparation) -> str:
    """The name of the output of an ONNX file."""
    return "logits" if preparation.targets is None else "values"


def to_onnx(module: nn.Module, preparation: Preparation, path: Path, facts: Mapping[str, str]) -> None:
    """Write an ONNX file with `facts` in its metadata."""
    onnx = require_package("onnx", "ONNX", "export")
    require_package("onnxscript", "ONNX", "export")
    args, kwargs, axes = _call(module, preparation)
    names = list(kwargs) or ["x"]
    try:
        with quiet():
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamic_shapes=axes,
                input_names=names,
                output_names=[output_name(preparation)],
                verbose=False,
                dynamo=True,
            )
    except Exception as error:  # the exporter may raise anything on a user's network
        raise RunError(f"{path}: torch cannot export this network to ONNX ({first_line(error)})") from error
    assert program is not None
    proto = program.model_proto
    if any(column.categories is not None for column in preparation.columns):
        proto, facts = with_columns(proto, preparation.columns), {**facts, "columns": column_types(preparation.columns)}
    for key, value in sorted(facts.items()):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


def to_torch_export(module: nn.Module, preparation: Preparation, path: Path, facts: Mapping[str, str]) -> None:
    """Write a torch.export program with `facts` as extra files."""
    args, kwargs, axes = _call(module, preparation)
    try:
        with quiet():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=axes)
    except Exception as error:
        raise RunError(f"{path}: torch cannot export this network ({first_line(error)})") from error
    with replacing(path) as temporary, temporary.open("wb") as file, quiet():
        torch.export.save(program, file, extra_files=dict(facts))
