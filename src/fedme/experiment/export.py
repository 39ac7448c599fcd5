"""Saved models for other programs: ONNX, torch.export, safetensors. They take samples as numbers and scale them."""

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedme.core.data import Inputs
from fedme.datasets.files import needed
from fedme.datasets.preparation import DTYPES, Form, Preparation
from fedme.experiment.files import RunError, replacing

Target = Literal["onnx", "torch-export", "safetensors"]
SUFFIXES: dict[Target, str] = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}


class Scaled(nn.Module):
    """A network with the scaling of its inputs in front: it takes samples as they were given."""

    factor: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preparation: Preparation, dtype: torch.dtype) -> None:
        super().__init__()
        assert preparation.scale is not None
        scaling = preparation.scale.scaling()
        self.network, self.dtype = network, dtype
        self.register_buffer("factor", torch.tensor(scaling.factor, dtype=torch.float32))
        self.register_buffer("mean", scaling.mean)
        self.register_buffer("std", scaling.std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        scaled = (x.to(torch.float32) * self.factor - self.mean) / self.std
        return self.network(scaled.to(self.dtype))  # type: ignore[no-any-return]


def deployable(network: nn.Module, preparation: Preparation) -> nn.Module:
    """The network itself, or with the scaling in front where samples are scaled."""
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    return network if preparation.scale is None else Scaled(network, preparation, dtype).eval()


def example(preparation: Preparation, dtype: torch.dtype) -> Inputs:
    """Two samples of zeros."""

    def zeros(form: Form) -> Tensor:
        kind = dtype if form.dtype == "float32" and preparation.scale is None else DTYPES[form.dtype]
        return torch.zeros((2, *form.shape), dtype=kind)

    form = preparation.form
    return {name: zeros(each) for name, each in form.items()} if isinstance(form, Mapping) else zeros(form)


def _call(
    module: nn.Module, preparation: Preparation
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any] | tuple[Any, ...]]:
    """Arguments to trace the module with, and which of their axes counts samples."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    sample = example(preparation, dtype)
    batch = {0: torch.export.Dim("samples", min=1)}
    if isinstance(sample, Mapping):
        return (), dict(sample), dict.fromkeys(sample, batch)
    return (sample,), {}, (batch,)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of their own parts."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def to_onnx(module: nn.Module, preparation: Preparation, path: Path, facts: Mapping[str, str]) -> None:
    """Write an ONNX file; `facts` are put into it."""
    onnx = needed("onnx", "ONNX", "export")
    needed("onnxscript", "ONNX", "export")
    args, kwargs, axes = _call(module, preparation)
    names = list(kwargs) or ["x"]
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamic_shapes=axes,
                input_names=names,
                output_names=["logits"],
                verbose=False,
                dynamo=True,
            )
    except Exception as error:  # whatever a network and the exporter make of each other
        raise RunError(f"{path}: torch cannot export this network to ONNX ({_first_line(error)})") from error
    assert program is not None
    proto = program.model_proto
    for key, value in sorted(facts.items()):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


def to_torch_export(module: nn.Module, preparation: Preparation, path: Path, facts: Mapping[str, str]) -> None:
    """Write a torch.export program."""
    args, kwargs, axes = _call(module, preparation)
    try:
        with _quiet():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=axes)
    except Exception as error:
        raise RunError(f"{path}: torch cannot export this network ({_first_line(error)})") from error
    with replacing(path) as temporary, temporary.open("wb") as file, _quiet():
        torch.export.save(program, file, extra_files=dict(facts))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def copy_weights(folder: Path, name: str, path: Path) -> None:
    """The weights as they are saved, and beside them the description that says what they are."""
    for suffix in (".safetensors", ".json"):
        with replacing(path.with_suffix(suffix)) as temporary:
            shutil.copyfile(folder / f"{name}{suffix}", temporary)
