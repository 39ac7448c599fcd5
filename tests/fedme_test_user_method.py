"""A method as a user might write it, with names that no built-in method has: it must get everything the built-in ones get."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Method, Plan, PlannedTraining, Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately, predict, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training


@dataclass(frozen=True)
class Pot:
    broth: Model
    tastings: int = 0


@dataclass(frozen=True)
class Ladle:
    portion: Model


@dataclass(frozen=True)
class Larder:
    leftovers: Model | None = None


@dataclass(frozen=True)
class Spoonful:
    seasoned: Model
    grams: float


@dataclass(frozen=True)
class Soup(Method[Pot, Larder, Ladle, Spoonful]):
    """Clients season a portion of the server's broth twice and keep a blend."""

    train: Training = field(default_factory=Training)
    salt: float = setting(0.5, "weight of the client's own seasoning in its blend")

    travels = "portions of one broth"

    def init_server(self, task: Task, key: Key) -> Pot:
        return Pot(Model.init(task.shared, key.at("pot"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Larder]:
        return immediately(Larder())

    def dispatch(self, task: Task, server: Pot, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Ladle]]:
        return immediately({client: Ladle(server.broth) for client in plan.train})

    def client_round(
        self, state: Larder, down: Ladle, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Larder, Spoonful, Report]]:
        optimizer, schedule = self.train.local_optimizer(CrossEntropy(), when), self.train.batch_schedule(when)
        first = yield from train({"pan": down.portion}, optimizer, data.train, schedule, key.at("first"))
        second = yield from train(first.models, optimizer, data.train, schedule, key.at("second"))
        seasoned = second.models["pan"]
        blend = seasoned.with_params(tree.mix(seasoned.params, down.portion.params, self.salt))
        return Larder(blend), Spoonful(seasoned, 2.0 * len(data.train)), Report(second.losses)

    def expects(self, task: Task, down: Ladle, up: Spoonful, when: Round) -> dict[str, Any]:
        return {"seasoned": down.portion}

    def aggregate(self, server: Pot, replies: Mapping[ClientId, Spoonful], when: Round, key: Key) -> Pot:
        if not replies:
            return server
        grams = [up.grams for up in replies.values()]
        return Pot(average([up.seasoned for up in replies.values()], grams), server.tastings + len(replies))

    def deliver(self, task: Task, server: Pot, client: ClientId) -> Ladle:
        return Ladle(server.broth)

    def models(self, state: Larder, delivery: Ladle, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.leftovers or delivery.portion, "global": delivery.portion})

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples, times=2)]

    def disclosures(self) -> list[str]:
        return ["how many grams a client adds"]

    def offers(self, server: Pot, task: Task, key: Key) -> dict[str, Model]:
        return {"broth": server.broth}


@dataclass(frozen=True)
class Unannounced(Soup):
    """The same, but the second training is not announced."""

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples)]


@dataclass(frozen=True)
class MeanSpoonful:
    seasoned: Model
    means: Tensor


@dataclass(frozen=True)
class Leaking(Soup):
    """Uploads class means: of outputs for training samples, or of the samples themselves."""

    reads: str = "outputs"

    def client_round(  # type: ignore[override]
        self, state: Larder, down: Ladle, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Larder, MeanSpoonful, Report]]:
        values = (yield from predict(down.portion, data.train)) if self.reads == "outputs" else data.train.inputs().flatten(1)
        labels = data.train.y
        means = torch.stack([values[labels == c].mean(0) for c in range(10)])
        return state, MeanSpoonful(down.portion, means), Report({})


@dataclass(frozen=True)
class Recipe:
    """A message without models: tables of weights and a tensor, under names of their own."""

    base: Mapping[str, Tensor]
    scale: float


@dataclass(frozen=True)
class Tasting:
    mixed: Mapping[str, Tensor]
    colour: Tensor
    cooks: int


@dataclass(frozen=True)
class Blind(Soup):
    """Declares nothing of what its replies must look like: their fields resemble what is sent in no name."""

    def dispatch(  # type: ignore[override]
        self, task: Task, server: Pot, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, Recipe]]:
        return immediately({client: Recipe(server.broth.params, 2.0) for client in plan.train})

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Larder]:
        return immediately(Larder(Model.init(task.shared, Key(0).at("pot"), task.dtype)))

    def client_round(  # type: ignore[override]
        self, state: Larder, down: Recipe, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Larder, Tasting, Report]]:
        assert state.leftovers is not None
        optimizer, schedule = self.train.local_optimizer(CrossEntropy(), when), self.train.batch_schedule(when)
        begin = {"pan": state.leftovers.with_params(down.base)}
        done = yield from train(begin, optimizer, data.train, schedule, key.at("first"))
        colour = torch.bincount(data.train.y, minlength=10).to(next(iter(down.base.values())).dtype)
        return Larder(done.models["pan"]), Tasting(done.models["pan"].params, colour, len(data.train)), Report(done.losses)

    def expects(self, task: Task, down: Any, up: Any, when: Round) -> dict[str, Any]:
        return {}

    def aggregate(self, server: Pot, replies: Mapping[ClientId, Any], when: Round, key: Key) -> Pot:
        if not replies:
            return server
        total = sum(up.colour for up in replies.values())
        assert total.shape == (10,), "somebody's colour has another shape"
        return Pot(average([server.broth.with_params(up.mixed) for up in replies.values()], [1.0] * len(replies)), 0)

    def deliver(self, task: Task, server: Pot, client: ClientId) -> Recipe:  # type: ignore[override]
        return Recipe(server.broth.params, 2.0)

    def models(self, state: Larder, delivery: Recipe, data: ClientData, when: Round, key: Key) -> Computation[Models]:  # type: ignore[override]
        assert state.leftovers is not None
        return immediately({"personal": state.leftovers, "global": state.leftovers.with_params(delivery.base)})


@dataclass(frozen=True)
class Coloured(Blind):
    """The same with the tensor first, which is what an attack spoils."""

    def client_round(  # type: ignore[override]
        self, state: Larder, down: Recipe, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Larder, "Swatch", Report]]:
        larder, tasting, report = yield from Blind.client_round(self, state, down, data, when, key)
        return larder, Swatch(tasting.colour, tasting.mixed), report


@dataclass(frozen=True)
class Swatch:
    colour: Tensor
    mixed: Mapping[str, Tensor]
