"""Malicious clients for simulations: the `[attack]` table. Their replies are changed on the way to the server."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Round, Task
from fedme.core.model import Arch, Model
from fedme.core.settings import setting
from fedme.federation.client_work import AnyMethod
from fedme.federation.reply_validation import check_reply
from fedme.federation.round import Engine, EngineWrapper, NoReply, Reply
from fedme.learning.training_settings import require

AttackType = Literal["sign-flip", "huge-norm", "label-flip", "non-finite", "shape", "architecture", "replay"]
FACTORS = {"sign-flip": -10.0, "huge-norm": 1000.0}  # what the change of a model is multiplied by


@dataclass(frozen=True)
class Attack:
    """Which clients are malicious, and what they do."""

    clients: int | tuple[ClientId, ...] = setting((), "number of malicious clients, drawn at random, or a list of names")
    kind: AttackType = setting("sign-flip", "'label-flip' trains on wrong labels; the other attacks change the reply")
    strength: float | None = setting(None, "factor on the honest change, for 'sign-flip' (default 10) and 'huge-norm' (1000)")

    def __post_init__(self) -> None:
        require(not isinstance(self.clients, int) or self.clients >= 0, "clients", f"must be >= 0, got {self.clients}")
        require(
            self.strength is None or self.kind in FACTORS, "strength", f"has no effect on the attack '{self.kind}'; remove it"
        )
        require(self.strength is None or self.strength > 0, "strength", f"must be > 0, got {self.strength}")

    def malicious(self, clients: Sequence[ClientId], root: Key) -> tuple[ClientId, ...]:
        """Who of these clients it is, in their order."""
        if not isinstance(self.clients, int):
            if unknown := sorted(set(self.clients) - set(clients)):
                raise ValueError(f"names {', '.join(unknown)}, but there is no such client")
            return tuple(client for client in clients if client in self.clients)
        if self.clients > len(clients):
            raise ValueError(f"must be at most {len(clients)}, the number of clients, got {self.clients}")
        chosen = root.at("attack").numpy().choice(len(clients), self.clients, replace=False)
        return tuple(clients[index] for index in sorted(chosen))

    def poisoned(self, data: ClientData, classes: int) -> ClientData:
        """The data that a malicious client trains on: labels in reverse order. Its test data are unchanged."""
        if self.kind != "label-flip":
            return data
        flipped = {name: getattr(data, name).labelled(classes - 1 - getattr(data, name).y) for name in ("train", "val")}
        return replace(data, **flipped)


class MaliciousClients(EngineWrapper):
    """An engine some of whose clients send spoilt replies. Their evaluation is honest."""

    def __init__(self, engine: Engine, method: AnyMethod, attack: Attack, malicious: Sequence[ClientId]) -> None:
        super().__init__(engine)
        self.method, self.attack, self.malicious = method, attack, malicious

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Collect the replies and change those of malicious clients."""
        task = self.engine.current_task()
        answers = dict(self.engine.exchange(downs, when))
        for client in self.malicious:
            answer = answers.get(client)
            if isinstance(answer, Reply):
                answers[client] = self._spoilt(task, downs[client], answer, when)
        return answers

    def _spoilt(self, task: Task, down: Any, answer: Reply, when: Round) -> Reply:
        kind = self.attack.kind
        if answer.up is None or kind == "label-flip":
            return answer
        if kind == "replay":
            return replace(answer, when=replace(when, t=when.t - 1))
        sent = check_reply(self.method, task, down, answer.up, when, None)
        if kind in FACTORS:
            factor = FACTORS[kind] if self.attack.strength is None else self.attack.strength * (1 if FACTORS[kind] > 0 else -1)
            changed = {name: _stretched(getattr(answer.up, name), received, factor) for name, received in sent.items()}
            return replace(answer, up=replace(answer.up, **changed))
        return replace(answer, up=_once(answer.up, SPOILING[kind]))


def _stretched(got: Any, sent: Any, factor: float) -> Any:
    """What the client would send if it had learnt `factor` times as much."""
    if isinstance(got, Tensor) and got.is_floating_point():
        return sent + factor * (got - sent)
    if isinstance(got, Mapping):
        return {name: _stretched(value, sent[name], factor) for name, value in got.items()}
    if dataclasses.is_dataclass(got) and not isinstance(got, type | Arch):
        names = [field.name for field in dataclasses.fields(got)]
        return replace(got, **{name: _stretched(getattr(got, name), getattr(sent, name), factor) for name in names})
    return got


Spoiling = Callable[[Any], Any]  # a value spoilt, or NotImplemented


def _once(value: Any, spoil: Spoiling) -> Any:
    """The value with the first of its parts that can be spoilt."""
    if (new := spoil(value)) is not NotImplemented:
        return new
    if isinstance(value, Mapping):
        for name, item in value.items():
            if (new := _once(item, spoil)) is not item:
                return {**value, name: new}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Arch):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if (new := _once(item, spoil)) is not item:
                return replace(value, **{field.name: new})
    return value


def _one_not_a_number(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return NotImplemented
    return torch.where(torch.arange(value.numel()).reshape(value.shape) == 0, torch.full_like(value, torch.nan), value)


def _another_shape(value: Any) -> Any:
    return value.unsqueeze(0) if isinstance(value, Tensor) else NotImplemented


def _another_architecture(value: Any) -> Any:
    """A model that claims to be another network; weights without one get another name, and outputs another size."""
    if isinstance(value, Model):
        return replace(value, arch=Arch.named("intruder", value.arch.factory, **dict(value.arch.options)))
    if isinstance(value, Mapping) and value:
        first = next(iter(value))
        return {f"intruder.{first}" if name == first else name: item for name, item in value.items()}
    if not isinstance(value, Tensor):
        return NotImplemented
    return value[..., 1:] if value.dim() else value.unsqueeze(0)


SPOILING: dict[str, Spoiling] = {
    "non-finite": _one_not_a_number,
    "shape": _another_shape,
    "architecture": _another_architecture,
}
