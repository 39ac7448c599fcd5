"""Clients that fail, by chance or by plan, in front of any engine: what a server has to live with.

A client can be away (not joined yet, or gone): then it is not asked. It can drop out: it never hears of the round and stays as
it is. And its reply can be lost, or late: then it has trained, and goes on from there, but the server knows nothing of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Round, Task, TaskError
from fedme.core.settings import setting
from fedme.federation.round import Engine, EngineWrapper, NoReply, Quorum, Reply
from fedme.learning.training_settings import require

Rounds = Mapping[ClientId, tuple[int, ...]]  # a plan: in which rounds it happens to a client


@dataclass(frozen=True)
class Faults:
    """The `[faults]` table: simulated failures of clients, and what the server needs for a round to count."""

    dropout: float | Mapping[ClientId, float] = setting(0.0, "probability that a client misses a round; also client = number")
    dropped_in: Rounds = setting(help="table client = rounds that the client misses for certain", default_factory=dict)
    lost: float | Mapping[ClientId, float] = setting(0.0, "probability that a reply is lost; also client = number")
    lost_in: Rounds = setting(help="table client = rounds in which its reply is lost for certain", default_factory=dict)
    seconds: float | Mapping[ClientId, float] = setting(1.0, "simulated time that a client takes to reply; adds no waiting")
    spread: float = setting(0.0, "standard deviation of the logarithm of `seconds`, drawn for every reply")
    deadline: float | None = setting(None, "seconds after which a reply is late and is discarded")
    join: Mapping[ClientId, int] = setting(help="table client = round in which it joins or returns", default_factory=dict)
    leave: Mapping[ClientId, int] = setting(help="table client = first round without the client", default_factory=dict)
    quorum: int | float = setting(1, "replies that a round needs: a number (1), or a fraction of the requested replies (0.5)")
    repeats: int = setting(2, "how often clients without a reply are asked again while a round is below the quorum")

    def __post_init__(self) -> None:
        for name in ("dropout", "lost"):
            require(all(0 <= p <= 1 for p in _values(getattr(self, name))), name, "must be between 0 and 1")
        require(all(0 < s < math.inf for s in _values(self.seconds)), "seconds", "must be positive")
        require(0 <= self.spread < math.inf, "spread", f"must be >= 0, got {self.spread}")
        require(self.deadline is None or self.deadline > 0, "deadline", f"must be > 0, got {self.deadline}")
        for name in ("dropped_in", "lost_in"):
            rounds = [t for rounds_of_client in getattr(self, name).values() for t in rounds_of_client]
            require(all(t >= 0 for t in rounds), name, "rounds must be >= 0; they count from 0")
        for name in ("join", "leave"):
            require(all(t >= 0 for t in getattr(self, name).values()), name, "rounds must be >= 0; they count from 0")
        both = [client for client in self.join if self.join[client] == self.leave.get(client)]
        require(not both, "join", f"{', '.join(both)} cannot join and leave in the same round")
        share = isinstance(self.quorum, float)
        require(
            self.quorum > 0 and (not share or self.quorum <= 1),
            "quorum",
            f"must be an integer >= 1, or a fraction > 0 and <= 1.0, got {self.quorum}",
        )
        require(self.repeats >= 0, "repeats", f"must be >= 0, got {self.repeats}")

    @property
    def needs(self) -> Quorum:
        """What the server needs of a round."""
        return Quorum(self.quorum, self.repeats)

    @property
    def simulates(self) -> bool:
        """Whether anybody can fail."""
        return self != Faults(quorum=self.quorum, repeats=self.repeats)

    def check(self, task: Task) -> None:
        """Refuse what is said of clients that do not exist, and a quorum that can never be reached."""
        for name in ("dropout", "dropped_in", "lost", "lost_in", "seconds", "join", "leave"):
            table = getattr(self, name)
            if isinstance(table, Mapping) and (unknown := sorted(table.keys() - task.members.keys())):
                raise TaskError(f"faults.{name} names {', '.join(unknown)}, but there is no such client")
        if isinstance(self.quorum, int) and self.quorum > len(task.members):
            raise TaskError(f"faults.quorum is {self.quorum}, but there are only {len(task.members)} clients")

    def unavailable(self, client: ClientId, t: int) -> str:
        """Why a client is not there in a round; empty if it is."""
        join, leave = self.join.get(client), self.leave.get(client)
        if join is not None and t < join and (leave is None or join < leave):
            return f"joins in round {join}"
        if leave is not None and t >= leave and (join is None or join < leave or t < join):
            return f"left in round {leave}"
        return ""

    def drops(self, client: ClientId, t: int, key: Key) -> str:
        """Why a client does not hear of the round; empty if it does."""
        if t in self.dropped_in.get(client, ()) or _happens(self.dropout, client, key.at("dropout")):
            return "dropped out"
        return ""

    def loses(self, client: ClientId, when: Round, key: Key) -> str:
        """Why the reply of a client that trained does not arrive in time; empty if it does."""
        if when.t in self.lost_in.get(client, ()) or _happens(self.lost, client, key.at("lost", when.phase)):
            return "its reply was lost"
        if self.deadline is not None:
            took = _of(self.seconds, client, 1.0)
            took *= math.exp(self.spread * key.at("seconds", when.phase).numpy().standard_normal())
            if took > self.deadline:
                return f"late: it took {took:.2f} s, the deadline is {self.deadline:g} s"
        return ""


def _values(setting: float | Mapping[ClientId, float]) -> list[float]:
    return list(setting.values()) if isinstance(setting, Mapping) else [setting]


def _of(setting: float | Mapping[ClientId, float], client: ClientId, otherwise: float) -> float:
    return setting.get(client, otherwise) if isinstance(setting, Mapping) else setting


def _happens(chance: float | Mapping[ClientId, float], client: ClientId, key: Key) -> bool:
    probability = _of(chance, client, 0.0)
    return probability > 0 and bool(key.numpy().random() < probability)


class FailingClients(EngineWrapper):
    """An engine whose clients fail. What is drawn depends on the seed, the round, the attempt and the client only."""

    def __init__(self, engine: Engine, faults: Faults, root: Key) -> None:
        super().__init__(engine)
        self.faults, self.key = faults, root.at("faults")
        self.when: Round | None = None
        self.asked = set[ClientId]()  # in this exchange, whose clients may come in groups
        self.attempts = Counter[ClientId]()  # how often a client was asked again in this round: it may succeed then
        self.held: dict[ClientId, Reply] = {}  # replies that did not arrive; asked again, a client would make the same ones

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """Clients that have not joined yet or have left."""
        absent = {client: self.faults.unavailable(client, when.t) for client in self.current_task().members}
        return {**{client: reason for client, reason in absent.items() if reason}, **self.engine.unavailable(when)}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Hand messages to those who do not drop out, and hold back the replies that do not arrive."""
        self._count(when, downs)
        keys = {client: self.key.at("round", when.t, "attempt", self.attempts[client], "client", client) for client in downs}
        dropped = {
            client: NoReply(why)
            for client in downs
            if client != POOL and (why := self.faults.drops(client, when.t, keys[client]))
        }
        asked = {client: down for client, down in downs.items() if client not in dropped and client not in self.held}
        arrived = {**self.engine.exchange(asked, when)}
        arrived |= {client: answer for client, answer in self.held.items() if client in downs and client not in dropped}
        replies: dict[ClientId, Reply | NoReply] = {**arrived, **dropped}
        for client, answer in arrived.items():
            if client != POOL and isinstance(answer, Reply) and (why := self.faults.loses(client, when, keys[client])):
                self.held[client], replies[client] = answer, NoReply(why)
        return replies

    def _count(self, when: Round, clients: Iterable[ClientId]) -> None:
        """Notice who is asked again in the same exchange. Who came back in one exchange is there in the next of the round."""
        if self.when is None or self.when.t != when.t:
            self.attempts.clear()
        if self.when != when:
            self.when, self.held, self.asked = when, {}, set()
        self.attempts.update(self.asked.intersection(clients))
        self.asked.update(clients)
