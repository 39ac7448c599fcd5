"""Ray without its processes, which are slow to start: actors live in this process, and everything is pickled as with Ray."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle, exceptions

OBJECTS: dict[int, "Reference"] = {}


class Reference:
    """A reference to an object in the store; one that an actor has put there is lost with it."""

    numbers = itertools.count()

    def __init__(self, value: Any, owner: Any = None, task: bool = False) -> None:
        self.number, self.pickled, self.owner, self.task = next(self.numbers), cloudpickle.dumps(value), owner, task
        OBJECTS[self.number] = self

    def __reduce__(self) -> Any:
        return known, (self.number,)


def known(number: int) -> Reference:
    """The reference with this number, after it was pickled."""
    return OBJECTS[number]


class Cluster:
    """What `fedme.execution.ray` uses of Ray. `sent` and `answered` have the bytes of all messages and answers."""

    def __init__(self) -> None:
        self.current: Any = None
        self.sent: list[int] = []
        self.answered: list[int] = []
        self.puts: list[int] = []  # of the driver
        self.gets: list[int] = []  # by the driver, of what actors have put
        self.options: list[dict[str, Any]] = []  # of the actors

    def remote(self, **options: Any) -> Any:
        self.options.append(options)
        return lambda cls: SimpleNamespace(remote=lambda *arguments: Handle(self, cls, arguments))

    def put(self, value: Any) -> Reference:
        reference = Reference(value, self.current)
        if self.current is None:
            self.puts.append(len(reference.pickled))
        return reference

    def get(self, reference: Reference) -> Any:
        if reference.owner is not None and reference.owner.dead:
            if reference.task:
                raise exceptions.ActorDiedError()
            raise exceptions.OwnerDiedError("00", "", "")
        if self.current is None and not reference.task:
            self.gets.append(len(reference.pickled))
        return cloudpickle.loads(reference.pickled)

    def wait(self, references: list[Reference], num_returns: int = 1, timeout: float = 0.0) -> Any:
        return references[:num_returns], references[num_returns:]

    def kill(self, handle: "Handle") -> None:
        handle.dead = True


class Handle:
    """A handle of an actor in this process."""

    def __init__(self, cluster: Cluster, cls: type, arguments: tuple[Any, ...]) -> None:
        self.cluster, self.dead = cluster, False
        self.actor = cls(*map(self._resolved, arguments))

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, *arguments))

    def _call(self, name: str, *arguments: Any) -> Reference:
        pickled = cloudpickle.dumps([argument for argument in arguments if not isinstance(argument, Reference)])
        received = iter(cloudpickle.loads(pickled))
        resolved = [self._resolved(a) if isinstance(a, Reference) else next(received) for a in arguments]
        if self.dead:
            return Reference(None, self, task=True)
        with self._inside():
            answer = getattr(self.actor, name)(*resolved)
        reference = Reference(answer, self, task=True)
        if name == "run":
            self.cluster.sent.append(len(pickled))
            self.cluster.answered.append(len(reference.pickled))
        return reference

    def _resolved(self, argument: Any) -> Any:
        return cloudpickle.loads(argument.pickled) if isinstance(argument, Reference) else argument

    @contextlib.contextmanager
    def _inside(self) -> Any:
        before, self.cluster.current = self.cluster.current, self
        try:
            yield
        finally:
            self.cluster.current = before


CLUSTERS: list[Cluster] = []


def current_actor() -> Handle | None:
    """The actor that is at work, if one is."""
    return CLUSTERS[-1].current if CLUSTERS else None


def in_this_process(monkeypatch: Any) -> Cluster:
    """Replace Ray by a cluster in this process."""
    cluster = Cluster()
    CLUSTERS.append(cluster)
    for name in ("actor", "actors", "executor"):
        monkeypatch.setattr(f"fedme.execution.ray.{name}.ray", cluster)
    monkeypatch.setattr("fedme.execution.ray.cluster.joined", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("fedme.execution.ray.cluster.places", lambda *_: 2)
    return cluster
