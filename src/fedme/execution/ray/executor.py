"""An executor on Ray: operations that wait at the same time are dealt to actors by effort, one message per actor.

Weights that several actors need are put into Ray's object store once. What an actor got or trained stays there: a later
operation on it goes to the same actor, and weights come to the driver only when somebody reads them. An actor that dies costs
its operations, which are repeated elsewhere, with the same result: they depend on nothing but their message.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions

from fedme.core.held_params import Form, HeldParams, held_params
from fedme.core.model import Arch
from fedme.core.operations import Op, Train
from fedme.core.tree import Params
from fedme.execution.dispatcher import Dispatcher, Unit, explanation
from fedme.execution.ray import EngineError
from fedme.execution.ray.actors import LOST, POLL_INTERVAL, Actor, Actors, cause
from fedme.execution.ray.messages import (
    Failure,
    Message,
    Number,
    OperationPacker,
    ResultPacker,
    Results,
    Splits,
    unpack_results,
    weights_of,
)
from fedme.execution.ray.packed_weights import PackedWeights, nbytes
from fedme.execution.ray.weight_numbers import WeightNumbers
from fedme.execution.routing import Tick, effort

REPEATS = 3  # of an operation whose actors died, until the run fails
SLACK = 1.05  # how much more than its part of the effort an actor may get, to spare moving weights
DEPTH = 4  # trainings in succession whose results nobody has read, and which would be repeated if they were lost
RESERVED = 1 << 24  # numbers for the results of one message


@dataclass
class Traffic:
    """What was sent and fetched; the bytes are those of weights, counted once per actor that gets them."""

    calls: int = 0
    puts: int = 0
    bytes_sent: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True)
class Work:
    """Operations that wait, the units in which they may be executed, and the weights that they need."""

    operations: Sequence[Op]
    units: Sequence[Unit]
    needs: Sequence[Sequence[Number]]  # of every unit
    weights: Mapping[Number, Params]
    numbers: Mapping[int, Number]  # of weights by their identity

    def indices(self, units: Iterable[int]) -> list[int]:
        """The operations of some units."""
        return [index for unit in units for index in self.units[unit].operations]


class Package:
    """Weights that an actor put into Ray's object store. They come to the driver together, when one of them is read.

    `again` computes them once more if they are lost.
    """

    def __init__(self, reference: Any, again: Callable[[], list[Params]], traffic: Traffic) -> None:
        self._reference, self._traffic = reference, traffic
        self._again: Callable[[], list[Params]] | None = again
        self._sets: list[Params] | None = None

    def get(self, place: int) -> Params:
        """One of the sets of weights. A checkpoint is written by a thread: two may fetch the same."""
        reference, again, sets = self._reference, self._again, self._sets
        if sets is None:
            try:
                packed: PackedWeights = ray.get(reference)
                self._traffic.bytes_fetched += packed.bytes.nbytes
                sets = packed.unpack()
            except LOST:
                assert again is not None
                sets = again()
            self._sets = sets
            self._reference = self._again = None
        return sets[place]


class RayExecutor:
    """Executes operations on actors.

    `router` says which of them must run as one program; with `separate` none must, because results on devices are not those of
    one process anyway. `memory` is the number of bytes that all actors together may keep.
    """

    def __init__(
        self,
        actors: Actors,
        router: Dispatcher,
        splits: Splits,
        tick: Tick,
        poll: Tick,
        memory: int,
        separate: bool = False,
    ) -> None:
        self.actors, self.router, self.splits, self.tick, self.poll = actors, router, splits, tick, poll
        self.memory, self.separate = memory, separate
        self.numbers = WeightNumbers()
        self.traffic = Traffic()
        self.paths: Counter[tuple[str, str, str]] = Counter()
        self._archs: dict[str, Arch] = {}
        self._depths: weakref.WeakKeyDictionary[HeldParams, int] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a checkpoint is written by a thread, which may find that weights are lost
        self._level = 0

    def __call__(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        """The result of every operation and its seconds."""
        separately = (
            [Unit([index], effort(op), own_program=False) for index, op in enumerate(operations)] if self.separate else None
        )
        return self._run(operations, self.router.units(operations) if separately is None else separately)

    def explain(self) -> list[str]:
        """What was sent, why there is no compiled code, and one line per path that operations took, with the reason."""
        sent, fetched = (f"{count / 1e6:.1f} MB" for count in (self.traffic.bytes_sent, self.traffic.bytes_fetched))
        first = f"on Ray: {self.traffic.calls} messages, weights of {sent} sent and of {fetched} fetched"
        return [first, *self.router.explain(), *explanation(self.paths)]

    def close(self) -> None:
        """End the actors."""
        self.actors.close()

    def _run(self, operations: Sequence[Op], units: Sequence[Unit]) -> list[tuple[Any, float]]:
        with self._lock:
            self._level += 1
            try:
                return self._run_locked(operations, units)
            finally:
                self._level -= 1

    def _run_locked(self, operations: Sequence[Op], units: Sequence[Unit]) -> list[tuple[Any, float]]:
        results: dict[int, tuple[Any, float]] = {}
        waiting, repeats = list(range(len(units))), [0] * len(units)
        pending: dict[Any, tuple[Actor, list[int], Number]] = {}
        for number in self.numbers.gone() if self._level == 1 else ():  # what lost weights are computed from is in use
            for actor in self.actors.alive:
                actor.drop(number)
        work = self._work(operations, units)
        while waiting or pending:
            if waiting:
                pending |= self._send(work, waiting)
                waiting = []
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_INTERVAL)
            self.poll()
            for reference in done:
                actor, sent, first = pending.pop(reference)
                try:
                    answer = ray.get(reference)
                except LOST as error:
                    self.actors.lost(actor, error)
                    waiting += sent
                    for unit in sent:
                        repeats[unit] += 1
                    if failed := [units[unit] for unit in sent if repeats[unit] > REPEATS]:
                        raise EngineError(self._repeated(operations, failed, error)) from error
                    continue
                except exceptions.RayError as error:
                    raise EngineError(f"a Ray process failed: {cause(error)}") from error
                if isinstance(answer, Failure):
                    raise EngineError(answer.reason)
                indices = work.indices(sent)
                values = self._values(answer, actor, first, [operations[index] for index in indices], renumbered(work, sent))
                results.update(zip(indices, zip(values, answer.seconds, strict=True), strict=True))
                for _ in indices:
                    self.tick()
        return [results[index] for index in range(len(operations))]

    def _work(self, operations: Sequence[Op], units: Sequence[Unit]) -> Work:
        """What is to be done. Weights that would take many trainings to compute again are fetched."""
        weights: dict[Number, Params] = {}
        numbers: dict[int, Number] = {}
        needs: list[list[Number]] = []
        for unit in units:
            needed: dict[Number, None] = {}
            for params in (params for index in unit.operations for params in weights_of(operations[index])):
                if (number := numbers.get(id(params))) is None:
                    held = held_params(params)
                    if held is not None and not held.here and self._depths.get(held, 0) >= DEPTH:
                        held.loaded()
                    number = numbers[id(params)] = self.numbers.of(params)
                    weights[number] = params
                needed[number] = None
            needs.append(list(needed))
        return Work(operations, units, needs, weights, numbers)

    def _send(self, work: Work, waiting: Sequence[int]) -> dict[Any, tuple[Actor, list[int], Number]]:
        """Deal units to the actors that are there, and send every actor one message."""
        dealt = {actor: units for actor, units in self._deal(work, waiting).items() if units}
        missing: dict[Number, list[Actor]] = {}
        used: dict[Actor, dict[Number, None]] = {}
        for actor, units in dealt.items():
            used[actor] = dict.fromkeys(number for unit in units for number in work.needs[unit])
            for number in used[actor]:
                if number not in actor.has:
                    missing.setdefault(number, []).append(actor)
        packages: dict[tuple[Actor, ...], list[Number]] = {}
        for number, receivers in missing.items():
            packages.setdefault(tuple(receivers), []).append(number)
        beside: dict[Actor, list[tuple[list[Number], Any]]] = {actor: [] for actor in dealt}
        for together, numbers in packages.items():
            packed = PackedWeights.of(work.weights[number] for number in numbers)
            reference = ray.put(packed)
            self.traffic.puts += 1
            self.traffic.bytes_sent += packed.bytes.nbytes * len(together)
            for actor in together:
                beside[actor].append((numbers, reference))
                for number, form in zip(numbers, packed.forms, strict=True):
                    actor.add(number, nbytes(form))
        pending = {}
        for actor, units in dealt.items():
            self._make_room(actor, used[actor])
            packer, first = OperationPacker(self.splits, work.numbers), self.numbers.reserve(RESERVED)
            packed_operations = [packer.pack(work.operations[index]) for index in work.indices(units)]
            self._archs |= {value.name: value for value in packer.common if isinstance(value, Arch)}
            numbered = renumbered(work, units)
            rest = [index for unit in numbered if not unit.own_program for index in unit.operations]
            programs = [*([rest] if rest else []), *(list(unit.operations) for unit in numbered if unit.own_program)]
            sent, references = [numbers for numbers, _ in beside[actor]], [reference for _, reference in beside[actor]]
            forget, actor.forget = actor.forget, []
            message = Message(packed_operations, programs, packer.common, first, sent, forget)
            self.traffic.calls += 1
            pending[actor.handle.run.remote(message, *references)] = actor, list(units), first
        return pending

    def _deal(self, work: Work, waiting: Sequence[int]) -> dict[Actor, list[int]]:
        """The units of every actor: the largest first, to an actor that has its weights, else to the one with the least to do.

        A training leaves the actor that has its weights if that has more than its part to do already.
        """
        units, actors = work.units, list(self.actors.ready())
        loads, dealt = dict.fromkeys(actors, 0.0), {actor: list[int]() for actor in actors}
        most = SLACK * sum(units[unit].effort for unit in waiting) / len(actors)
        for unit in sorted(waiting, key=lambda unit: -units[unit].effort):
            has = [sum([number in actor.has for number in work.needs[unit]]) for actor in actors]
            best = max(has)
            actor = min((actor for actor, count in zip(actors, has, strict=True) if count == best), key=loads.__getitem__)
            trains = isinstance(work.operations[units[unit].operations[0]], Train)
            if trains and loads[actor] + units[unit].effort > most:
                actor = min(actors, key=loads.__getitem__)
            dealt[actor].append(unit)
            loads[actor] += units[unit].effort
        return dealt

    def _make_room(self, actor: Actor, used: Collection[Number]) -> None:
        """Let an actor forget the weights that were used longest ago, if it has more than its part of the memory."""
        for number in used:
            if number in actor.has:
                actor.has.move_to_end(number)
        limit = self.memory // max(1, len(self.actors.alive))
        for number in list(actor.has):
            if actor.bytes <= limit or number in used:
                break
            actor.drop(number)

    def _values(self, answer: Results, actor: Actor, first: Number, ops: Sequence[Op], units: Sequence[Unit]) -> list[Any]:
        """The results in an answer; their weights stay where they are."""
        depth = 1
        if answer.packages:
            inputs = [there for op in ops for params in weights_of(op) if (there := held_params(params)) is not None]
            depth += max((self._depths.get(there, 0) for there in inputs if not there.here), default=0)
        packages = [
            Package(reference, functools.partial(self._again, ops, units, place), self.traffic)
            for place, reference in enumerate(answer.packages)
        ]

        def held(number: int, package: int, place: int) -> HeldParams:
            form: Form = answer.forms[package][place]
            params = HeldParams(form, functools.partial(packages[package].get, place))
            self.numbers.add(params, first + number)
            actor.add(first + number, nbytes(form))
            self._depths[params] = depth
            return params

        self.paths.update(answer.paths)
        return unpack_results(answer, self._archs, held)

    def _again(self, ops: Sequence[Op], units: Sequence[Unit], package: int) -> list[Params]:
        """The weights of a lost package, computed once more."""
        packer = ResultPacker()
        for value, _ in self._run(ops, units):
            packer.pack(value)
        return [
            params.loaded() if isinstance(params, HeldParams) else params for params in list(packer.packages.values())[package]
        ]

    def _repeated(self, operations: Sequence[Op], failed: Sequence[Unit], error: Exception) -> str:
        """Which operations have failed with every actor, and how the last one ended."""
        ops = [operations[index] for unit in failed for index in unit.operations]
        names = [f"{type(op).__name__.lower()} on {self.splits.name(op.data)}" for op in ops[:5]]
        more = f" and {len(ops) - 5} more" if len(ops) > 5 else ""
        return (
            f"the Ray processes that executed these operations died, {REPEATS + 1} times: {', '.join(names)}{more}; "
            f"is there enough memory? The last one: {cause(error)}"
        )


def renumbered(work: Work, units: Sequence[int]) -> list[Unit]:
    """The units with operations by their places in a message."""
    in_message, start = [], 0
    for unit in (work.units[unit] for unit in units):
        in_message.append(Unit(range(start, start + len(unit.operations)), unit.effort, unit.own_program))
        start += len(unit.operations)
    return in_message
