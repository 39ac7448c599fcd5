"""The compiled backend (`compiled.cpp`): programs made of traced networks, one client after another on every thread.

The weights of a client stay in the processor's cache for all its steps, and no Python runs between them. Small operations share
a call (`compiled_calls.py`), which has their networks (`compiled_networks.py`).
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from fedme.core.data import Arrays, Split
from fedme.core.flat_params import flat_params
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, EstimateStatistics, Evaluate, Op, Predict, Train
from fedme.execution import reference
from fedme.execution.batch_sizes import size_obstacle
from fedme.execution.compiled_jobs import together
from fedme.execution.compiled_library import active, library, vector_bytes
from fedme.execution.compiled_networks import known_program
from fedme.execution.compiled_training import training_obstacle
from fedme.execution.input_tables import InputTable, InputTables
from fedme.execution.lowering import lowered
from fedme.execution.program import Program
from fedme.execution.reference import scores
from fedme.execution.routing import Route, Tick, effort, models_of, no_tick, pieces
from fedme.execution.threads import Helpers, Running, on_threads
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD

PIECES = 2  # calls per thread: fewer cost less, more are divided more evenly
LARGE = 2e7  # effort of a call that is worth itself, about 2 ms


@functools.lru_cache(maxsize=256)
def program_of(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> Program | str:
    """The program of a network for inputs of this shape, if its results agree with the network; else why there is none."""
    # In float64 a small difference is not a rounding error; in the type of the model the layout of its vectors is checked too.
    for checked in (torch.float64, dtype):
        program = lowered(arch, shape, symbols, vector_bytes() // checked.itemsize, checked)
        if isinstance(program, str):
            return program
        if program.narrowed and dtype == torch.float64:
            return "its forward pass computes in single precision"
        if reason := disagreement(arch, shape, symbols, checked):
            return reason
    return program


@functools.lru_cache(maxsize=256)
def disagreement(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> str:
    """How the program of a network differs from the network itself; empty if it does not.

    A trace does not see everything: a network may have its own backward pass, or change tensors behind another name. So both
    are trained for a few steps on random inputs, with batches of several samples and of one, on yes-or-no labels: they give
    every output a gradient, also a single one.
    """
    key, program, samples = Key(0).at("check"), known_program(arch, shape, symbols, dtype), torch.arange(9)
    x = torch.randn((len(samples), *shape), generator=key.torch()).to(dtype)
    if symbols:
        x = torch.randint(program.symbols, x.shape, generator=key.torch())
    labels = torch.rand((len(samples), program.classes), generator=key.at("labels").torch()) > 0.5
    data = Split(Arrays(x, labels), samples)
    model = Model.init(arch, key, dtype)
    # A second step in float32 would show how fast rounding errors grow.
    schedule = BatchSchedule(epochs=2, batch=4, steps=None if dtype == torch.float64 else 1, shuffle=False)
    op = Train({"net": model}, SGD(CrossEntropy(), 0.05, 0.5), data, schedule, key)
    if names := sorted(model.params.keys() - set(program.parameters)):
        return f"the weight {names[0]} is not used"
    if name := other_buffer(program, model):
        return f"not all models have the same numbers in the buffer {name}"
    held = {**model.params, **model.buffers}
    if names := [name for name in program.parameters if name in held and held[name].dtype != dtype]:
        return f"it computes with {names[0]}, which is {str(held[names[0]].dtype).removeprefix('torch.')}"
    try:
        wanted = reference.train(op).models["net"]
        target = reference.predict(Predict(wanted, data))
    except Exception as error:  # a user's network may raise anything
        return f"its training fails on random inputs ({type(error).__name__}: {error})"
    tables = InputTables(torch.device("cpu"))

    def run(op: Op) -> Any:
        return Compiled(tables).run([op], no_tick)[0]

    tolerance = 1e-2 if dtype != torch.float64 else 1e-5 if program.narrowed else 1e-7
    trained = run(op).models["net"]
    before, after, expected = (
        {name: value.double() for name, value in {**m.params, **m.buffers}.items()} for m in (model, trained, wanted)
    )
    for name, value in expected.items():
        if torch.equal(after[name], value):
            continue  # also if it is infinite, as in a mask
        change = (value - before[name]).norm() + 1e-3 * value.numel() ** 0.5
        if not bool((after[name] - value).norm() <= tolerance * change):
            return f"compiled training differs from the network in {name}"
    logits = run(Predict(wanted, data))
    agree = torch.allclose(logits, target.to(logits.dtype), tolerance, tolerance * float(target.abs().max()))
    return "" if agree else "compiled predictions differ from those of the network"


def other_buffer(program: Program, model: Model) -> str:
    """A buffer of a model that has other numbers than those that are part of the program; empty if there is none."""
    named = ((name, model.buffers.get(name), value) for name, value in program.assumed)
    return next((name for name, own, value in named if own is None or not torch.equal(own, value.to(own.dtype))), "")


class Compiled:
    """Training and inference in compiled code, on `threads` threads or as many as torch has."""

    name = "compiled"

    def __init__(self, tables: InputTables, threads: int = 1) -> None:
        self.tables, self.threads = tables, threads

    def missing(self) -> str:
        """Why there is no compiled code; empty if there is."""
        return active(code) if isinstance(code := library(), str) else ""

    def supports(self, op: Op) -> str:
        """Why the compiled code cannot run the operation; empty if it can."""
        if isinstance(library(), str):
            return "no compiled code"
        if reason := self.tables.supports(op):
            return reason
        table = self.tables.table(op)
        for model in models_of(op):
            if model.dtype not in (torch.float32, torch.float64):
                return f"unsupported type {model.dtype}"
            program = program_of(model.arch, table.shape, table.symbols, model.dtype)
            if isinstance(program, str):
                return program
            if table.symbols and not 0 <= table.range[0] <= table.range[1] < program.symbols:
                return f"symbols from {table.range[0]} to {table.range[1]}, but the network knows {program.symbols}"
        if reason := self._obstacle(op, table):
            return reason
        return training_obstacle(op) if isinstance(op, Train) else ""

    def supports_alike(self, op: Op) -> bool:
        """Whether an operation is supported, if one that is alike is."""
        return not self._obstacle(op, self.tables.table(op))

    @staticmethod
    def _obstacle(op: Op, table: InputTable) -> str:
        """Why the programs of the networks do not describe this operation: by its batches or buffers."""
        for model in models_of(op):
            if model.buffers and (
                name := other_buffer(known_program(model.arch, table.shape, table.symbols, model.dtype), model)
            ):
                return f"the network was traced with other numbers in its buffer {name}"
        return size_obstacle(op, table.shape, table.symbols)

    def group(self, op: Op) -> Hashable:
        """Operations on one table of inputs."""
        return isinstance(op, Train), models_of(op)[0].dtype, id(op.data.source)

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        """Run operations on several threads; `tick` is called on this thread."""
        helpers, efforts = self._helpers(), [effort(op) for op in ops]
        # Predictions of one call share the weights of a model that they have in common.
        most = LARGE if isinstance(ops[0], Train) else 10 * LARGE
        parts = pieces(efforts, min(sum(efforts) / (PIECES * helpers.threads), most))
        compute = functools.partial(together, table=self.tables.table(ops[0]))
        results = dict[int, Any]()
        for part, done in zip(
            parts, on_threads([[ops[i] for i in part] for part in parts], compute, helpers, tick), strict=True
        ):
            results.update(zip(part, done, strict=True))
        return with_scores(ops, [results[index] for index in range(len(ops))])

    def start(self, ops: Sequence[Op], routes: Sequence[Route]) -> Running[list[Any]]:
        """Let a helper run operations of one group, in one call; those that evaluate predict only (see `with_scores`)."""
        return Running(together(ops, self.tables.table(ops[0]), routes), self._helpers())

    def _helpers(self) -> Helpers:
        code = library()
        assert not isinstance(code, str)
        return Helpers.of(code, max(torch.get_num_threads(), self.threads))


def alike_for_compiled(op: Op) -> Hashable:
    """What decides whether and with what an operation runs, in little time; None: ask. As long as the operations live."""
    data = op.data
    if data.targets is not None or isinstance(op, EstimateStatistics) or not len(data):
        return None
    if not isinstance(op, Train):
        flat, timed = flat_params(op.model.params), isinstance(op, Evaluate) and op.timed
        same = type(op), timed, id(data.source), id(op.model.arch), not op.model.buffers
        return None if flat is None else (*same, id(flat.layout))  # a layout has the type of the weights
    alike: list[Any] = [id(data.source), id(op.optimizer), id(op.mechanism), id(op.collect), op.keep_opt, len(op.opt)]
    for role, model in op.models.items():
        if (flat := flat_params(model.params)) is None:
            return None
        alike += role, id(model.arch), not model.buffers, id(flat.layout)
    return (*alike, *op.frozen)


def with_scores(ops: Sequence[Op], results: list[Any]) -> list[Any]:
    """The same results, with the scores of the logits of evaluations."""
    looks = [index for index, op in enumerate(ops) if isinstance(op, Evaluate)]
    scored = scores([results[index] for index in looks], [ops[index].data for index in looks])
    for index, score in zip(looks, scored, strict=True):
        results[index] = score
    return results
