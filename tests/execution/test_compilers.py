"""The kernels give the same results with GCC, with Clang, with AVX-512 and on ARM64 (under qemu)."""

import functools
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Train
from fedme.execution.compiled_library import library
from fedme.execution.compiled_networks import CompiledProgram
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.lowering import lowered
from fedme.execution.program import NODE_TYPES
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_traced_networks import Depthwise, Functional, Grouped, GroupNormNet, ResNet, Transformer

SOURCES = Path(__file__).resolve().parents[2] / "src" / "fedme" / "execution"
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-pthread", "-I", SOURCES]
COMPILERS = {
    "gcc": ["g++"],
    "gcc-avx512": ["g++", "-DFEDME_AVX512"],
    "clang": ["clang++"],
    "arm64": ["aarch64-linux-gnu-g++", "-static"],
}
PACKAGES = {"g++": "g++", "clang++": "clang", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu qemu-user-static"}


class Recurrent(nn.Module):
    """A convolution wide enough for Winograd's method, and recurrent layers over the rows of its maps."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.lstm, self.gru = nn.LSTM(96, 5, batch_first=True), nn.GRU(5, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        maps = torch.relu(self.wide(torch.relu(self.first(x))))
        return self.head(self.gru(self.lstm(maps.transpose(1, 2).flatten(2))[0])[0][:, -1])


class FewChannels(nn.Module):
    """Convolutions with few channels on wide maps, where vectors run along columns."""

    def __init__(self):
        super().__init__()
        self.spread = nn.Linear(36, 12 * 24)
        self.first, self.second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, (5, 3), (2, 1))
        self.third, self.last = nn.Conv2d(16, 2, 3, dilation=(1, 2)), nn.Linear(2 * 2 * 18, 5)

    def forward(self, x):
        x = self.spread(x.flatten(1)).view(-1, 1, 12, 24)
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(x)).flatten(1))


class Conditional(nn.Module):
    """Comparisons and choices between values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 11), nn.Linear(11, 5)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = torch.where((x > 0.1) | (x <= -0.5), x.sin(), 0.3 * x.cos())
        return self.last(x.masked_fill(x < x.mean(1, keepdim=True), -0.5) + (x >= 0.2).to(x.dtype))


class Unusual(nn.Module):
    """Weights with their inputs first, dropout where the batch is the second dimension, and arithmetic on a weight alone."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.ConvTranspose2d(1, 3, 4, 2, 1), nn.InstanceNorm2d(3, affine=True), nn.Dropout(0.3)
        self.weight, self.scale = nn.Parameter(torch.randn(48, 11) / 7), nn.Parameter(torch.rand(()))
        self.head = nn.Linear(11, 5)

    def forward(self, x):
        maps = nn.functional.interpolate(self.norm(self.up(x))[:, :, ::4, ::4], size=(4, 4))
        x = self.drop((maps.flatten(1) @ self.weight).t()).t()
        return self.head((x / (1 + x.std(1, keepdim=True)) * self.scale.exp()).cumsum(1))


NETWORKS = (Functional, ResNet, GroupNormNet, Depthwise, Transformer, Grouped, Recurrent, FewChannels, Conditional, Unusual)


def numbers(values, kind="<i8"):
    array = np.ascontiguousarray(values, dtype=kind)
    return struct.pack("<q", array.size) + array.tobytes()


def number(value):
    return struct.pack("<q", value)


def training(network, dtype, steps, vector_bytes):
    """A training as bytes: what it is given, and what the installed extension (or else the reference) makes of it."""
    x = torch.randn(16, 1, 6, 6, generator=Key(3).torch()).to(dtype)
    arch = Arch(network)
    model = Model.init(arch, Key(4), dtype)
    data = Split(Arrays(x, torch.arange(16) % 5), torch.arange(16))
    schedule = BatchSchedule(steps=steps, batch=4, shuffle=False)
    op = Train({"own": model}, SGD(CrossEntropy(), 0.05, 0.9), data, schedule, Key(5))
    after = Dispatcher(path="compiled")([op])[0][0].models["own"]
    program = lowered(arch, (1, 6, 6), False, vector_bytes // dtype.itemsize)
    kind = f"<f{dtype.itemsize}"
    positions, sizes = schedule.positions(16, Key(5).at("batches"))
    parts = [number(dtype.itemsize), numbers(x.flatten(1), kind), number(36), numbers(positions), numbers(data.y[positions])]
    parts += [numbers(sizes), numbers(sizes, "<f8"), numbers([[v.size, v.sums, v.gradient] for v in program.values])]
    parts.append(number(len(program.nodes)))
    for node, spec in zip(program.nodes, CompiledProgram(program).nodes, strict=True):
        fixed = [NODE_TYPES.index(node.type), *spec.inputs, spec.output, *spec.parameters, spec.seed, *spec.starts]
        parts += [numbers(fixed), numbers(node.numbers), numbers(node.reals, "<f8"), numbers(node.table)]
    parts.append(number(len(program.parameters)))
    for name in program.parameters:
        before, wanted = ({**m.params, **m.buffers}[name] for m in (model, after))
        parts += [number(name in model.params), numbers(before, kind), numbers(wanted, kind)]
    seeds = [Key(5).at("dropout", "own", layer).integer() for layer in program.layers]
    return b"".join([*parts, numbers(seeds), number(program.output), number(program.classes)])


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """A program that replays trainings, built once by every compiler."""

    @functools.cache
    def built(compiler):
        command, *flags = COMPILERS[compiler]
        program = tmp_path_factory.mktemp(compiler) / "replay"
        subprocess.run([command, *FLAGS, *flags, "-o", program, Path(__file__).with_name("replay.cpp")], check=True)
        return program

    return built


@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(torch.float32, 1, 1e-6), (torch.float64, 12, 1e-9)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compilers_agree(compiler, dtype, steps, tolerance, replay, tmp_path):
    command = COMPILERS[compiler][0]
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if shutil.which(command) is None or (compiler == "arm64" and emulator is None):
        pytest.skip(f"needs {command} (apt-get install {PACKAGES[command]})")
    if wide := compiler.endswith("avx512"):
        code = library()
        if isinstance(code, str) or not code.fedme_avx512_pays():
            pytest.skip("needs a processor with fast AVX-512")
    program = replay(compiler)
    trainings = [training(network, dtype, steps, 64 if wide else 32) for network in NETWORKS]
    (tmp_path / "trainings").write_bytes(number(len(trainings)) + b"".join(trainings))
    run = [emulator, program] if compiler == "arm64" else [program]
    done = subprocess.run([*run, tmp_path / "trainings", str(tolerance)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
