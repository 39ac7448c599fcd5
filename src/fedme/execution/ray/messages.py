"""Operations and their results as messages between the driver and its actors.

Weights are numbers in a message: an actor has them already, or gets them beside the message, packed. Splits of the experiment's
data are numbers too, because an actor has opened the same data. What operations have in common (architectures, optimizers,
schedules) is in the message once. Results that are weights stay with the actor, under numbers that the message names.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedme.core.data import Source, Split
from fedme.core.held_params import HeldParams
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import ClassSums, EstimateStatistics, Evaluate, Op, Predict, Score, Train, Trained
from fedme.core.tree import Params
from fedme.execution.ray.packed_weights import PackedWeights

Number = int  # of weights
NO_WEIGHTS = -1  # in place of the number of an empty set
_Model = tuple[int, Number, Number]  # architecture (in `common`), weights, buffers
TRAINED, MODEL, SCORE, OUTPUT = range(4)  # kinds of results
OPERATIONS: tuple[type[Op], ...] = (Train, Evaluate, Predict, EstimateStatistics)


@dataclass(frozen=True)
class Message:
    """Operations for an actor. Each of `units` is executed in one go; `first` is the number of the first weights they make."""

    operations: Sequence[tuple[Any, ...]]
    units: Sequence[Sequence[int]]
    common: list[Any]
    first: Number
    sent: Sequence[Sequence[Number]] = ()  # the numbers of the weights in every package beside the message
    forget: Sequence[Number] = ()  # weights that are not needed any more


@dataclass(frozen=True)
class Results:
    """What an actor answers: the results in the order of the operations, their seconds, and the paths that they took."""

    values: Sequence[Any]
    seconds: Sequence[float]
    archs: Sequence[str]  # names
    outputs: PackedWeights  # predictions
    packages: Sequence[Any]  # references to packed weights
    forms: Sequence[Sequence[Any]]  # of the weights in every package
    paths: Counter[tuple[str, str, str]]


@dataclass(frozen=True)
class Failure:
    """Why an operation could not be executed."""

    reason: str


class Splits:
    """The splits of an experiment by number. Driver and actors have equal ones, in the same order, with the same names."""

    def __init__(self, named: Mapping[str, Split]) -> None:
        self.names, self.splits = list(named), list(named.values())
        self._numbers = {id(split): number for number, split in enumerate(self.splits)}
        self._sources = {id(split.source): number for number, split in reversed(list(enumerate(self.splits)))}

    def pack(self, split: Split) -> Any:
        """A split as a part of a message: its number, or the rows of a source that is known by a split or sent itself."""
        if (number := self._numbers.get(id(split))) is not None:
            return number
        source: int | Source = self._sources.get(id(split.source), split.source)
        tensors = {"rows": split.rows} | ({} if split.targets is None else {"targets": split.targets})
        return source, PackedWeights.of([tensors])

    def unpack(self, part: Any) -> Split:
        """The split of a part of a message."""
        if isinstance(part, int):
            return self.splits[part]
        source, packed = part
        (tensors,) = packed.unpack()
        return Split(self.splits[source].source if isinstance(source, int) else source, tensors["rows"], tensors.get("targets"))

    def name(self, split: Split) -> str:
        """What an error calls a split."""
        number = self._numbers.get(id(split))
        return self.names[number] if number is not None else f"{len(split)} samples"


class OperationPacker:
    """Makes the operations of one message; `numbers` are those of weights by their identity."""

    def __init__(self, splits: Splits, numbers: Mapping[int, Number]) -> None:
        self.splits, self.numbers = splits, numbers
        self.common: list[Any] = []
        self._places: dict[Any, int] = {}

    def pack(self, op: Op) -> tuple[Any, ...]:
        """An operation as a part of the message."""
        split = self.splits.pack(op.data)
        kind = OPERATIONS.index(type(op))
        if not isinstance(op, Train):
            return (kind, self._model(op.model), split, *((op.timed,) if isinstance(op, Evaluate) else ()))
        models, frozen = ({role: self._model(m) for role, m in models.items()} for models in (op.models, op.frozen))
        opt = {role: self._weights(state) for role, state in op.opt.items()}
        shared = tuple(map(self._shared, (op.optimizer, op.batch_schedule, op.mechanism, op.collect, op.keep_opt)))
        return kind, models, split, shared, (op.key.seed, op.key.path), opt, frozen

    def _model(self, model: Model) -> _Model:
        return self._shared(model.arch), self._weights(model.params), self._weights(model.buffers)

    def _weights(self, params: Params) -> Number:
        return self.numbers[id(params)] if params else NO_WEIGHTS

    def _shared(self, value: Any) -> int:
        """The place of a value in `common`; equal values have one place if they can be compared."""
        try:
            place = self._places.get(value)
        except TypeError:  # not hashable
            place = None
            known = id(value)
        else:
            known = value
        if place is None:
            place = self._places[known] = len(self.common)
            self.common.append(value)
        return place


def weights_of(op: Op) -> list[Params]:
    """Every set of weights that an operation needs."""
    if not isinstance(op, Train):
        return [params for params in (op.model.params, op.model.buffers) if params]
    models = [*op.models.values(), *op.frozen.values()]
    sets = [params for model in models for params in (model.params, model.buffers)]
    return [params for params in (*sets, *op.opt.values()) if params]


def unpack_operations(message: Message, splits: Splits, held: Mapping[Number, Params]) -> list[Op]:
    """The operations of a message, with weights that the actor has."""

    def weights(number: Number) -> Params:
        return {} if number == NO_WEIGHTS else held[number]

    @_memoized
    def model(packed: _Model) -> Model:  # one object for one model: a stack recognises a shared model by identity
        arch, params, buffers = packed
        return Model(message.common[arch], weights(params), weights(buffers))

    def unpacked(packed: tuple[Any, ...]) -> Op:
        kind, models, split, *rest = packed
        operation, data = OPERATIONS[kind], splits.unpack(split)
        if operation is not Train:
            return operation(model(models), data, *rest)  # type: ignore[no-any-return]
        shared, key, opt, frozen = rest
        optimizer, schedule, mechanism, collect, keep_opt = (message.common[place] for place in shared)
        states = {role: weights(state) for role, state in opt.items()}
        trained, fixed = ({role: model(packed) for role, packed in roles.items()} for roles in (models, frozen))
        return Train(trained, optimizer, data, schedule, Key(*key), states, fixed, mechanism, collect, keep_opt)

    return [unpacked(packed) for packed in message.operations]


def _memoized(function: Callable[[_Model], Model]) -> Callable[[_Model], Model]:
    known: dict[_Model, Model] = {}

    def call(packed: _Model) -> Model:
        if packed not in known:
            known[packed] = function(packed)
        return known[packed]

    return call


class ResultPacker:
    """Makes the results of one message. Weights are sorted into packages, of which the driver may fetch some and not others."""

    def __init__(self) -> None:
        self.archs: dict[str, int] = {}
        self.outputs: list[Params] = []
        self.packages: dict[str, list[Params]] = {}
        self.kept: list[Params] = []  # all sets, in the order of their numbers

    def pack(self, result: Any) -> Any:
        """A result as a part of the answer."""
        if isinstance(result, Trained):
            models = {role: self._model(model, role) for role, model in result.models.items()}
            opt = {role: self._keep(state, f"{role}, optimizer") for role, state in result.opt.items()}
            self.outputs.extend({"sums": total.sums, "counts": total.counts} for total in result.seen.values())
            return TRAINED, models, opt, dict(result.losses), list(result.seen)
        if isinstance(result, Model):
            return MODEL, self._model(result, "statistics")
        if isinstance(result, Score):
            return SCORE, result.samples, result.loss, result.accuracy, result.seconds
        assert isinstance(result, Tensor)
        self.outputs.append({"": result})
        return (OUTPUT,)

    def _model(self, model: Model, package: str) -> tuple[Any, ...]:
        arch = self.archs.setdefault(model.arch.name, len(self.archs))
        return arch, self._keep(model.params, package), self._keep(model.buffers, package), model.finite

    def _keep(self, params: Params, package: str) -> tuple[Number, int, int] | None:
        if not params:
            return None
        sets = self.packages.setdefault(package, [])
        sets.append(params)
        self.kept.append(params)
        return len(self.kept) - 1, list(self.packages).index(package), len(sets) - 1


def unpack_results(results: Results, archs: Mapping[str, Arch], held: Callable[[Number, int, int], HeldParams]) -> list[Any]:
    """The results of a message's operations. `held` makes weights from their number, package and place."""
    outputs = iter(results.outputs.unpack())

    def weights(kept: tuple[Number, int, int] | None) -> Params:
        return {} if kept is None else held(*kept)

    def model(packed: tuple[Any, ...]) -> Model:
        arch, params, buffers, finite = packed
        made = Model(archs[results.archs[arch]], weights(params), weights(buffers))
        vars(made)["finite"] = finite  # the actor knows: the weights need not come here for that
        return made

    def unpacked(kind: int, *value: Any) -> Any:
        if kind == TRAINED:
            models, opt, losses, collected = value
            trained = {role: model(packed) for role, packed in models.items()}
            seen = {role: ClassSums(**next(outputs)) for role in collected}
            return Trained(trained, {role: weights(state) for role, state in opt.items()}, losses, seen)
        if kind == MODEL:
            return model(*value)
        return Score(*value) if kind == SCORE else next(outputs)[""]

    return [unpacked(*value) for value in results.values]
