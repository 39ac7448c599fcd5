"""FML: a shared "meme" model and a private model learn from each other at every client; only the meme travels.

Shen et al., "Federated mutual learning: a collaborative machine learning method for heterogeneous data, models, and
objectives" (FITEE 2023), section 4.2: Algorithm 1 and Eq. 5, 6: L_local = alpha CE + (1 - alpha) KL(meme || local),
L_meme = beta CE + (1 - beta) KL(local || meme). The server merges the memes with equal weights, and replies do not tell the
numbers of samples (section 6, point 3); in a deployment, `tell.samples = false` keeps them out of a site's description too.

With `shared` only the weights whose names start so travel ("features." of a convolutional network); the rest of the meme is
the client's adaptor, kept between rounds, so that clients with different numbers of classes learn together (section 5.3,
point 3).

Deviations: clients fork the newest global model every round (line 8 of Algorithm 1 says generation 0); alpha and beta are
0.5, the default of the authors' code, as the paper gives none; schedules follow the text of section 6, point 2 (linear, or
`step` at thirds of the rounds). FedMe's comparison runs it otherwise: loss = "sum", weighting = "samples", optimizer_state =
"reset"; its notebook also trains both models for one more round before it tests them, which is not done here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Report, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, Models, OptState, immediately, train
from fedme.core.settings import setting
from fedme.learning.objectives import Mutual
from fedme.learning.partial_model import Part, cut, fork, patterns_of, require_same_part, require_some, rest
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.schedules import ramp
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import told_samples
from fedme.methods.shared_part import PartAveraging, Up


@dataclass(frozen=True)
class State:
    """What never leaves a client: its private model with the state of its optimizer, and its adaptor, the rest of its meme."""

    own: Model
    opt: OptState
    meme: Arch
    adaptor: Part


@dataclass(frozen=True)
class FML(PartAveraging[State]):
    """A shared and a private model, of any architecture, learn from each other; only the shared one travels."""

    train: Training = field(default_factory=Training)
    alpha: float | tuple[float, float] = setting(0.5, "weight of the labels for the private model; a pair: first, last round")
    beta: float | tuple[float, float] = setting(0.5, "weight of the labels for the meme; a pair: first, last round")
    schedule: Literal["linear", "step"] = setting("linear", "how a pair changes over the rounds")
    shared: str | tuple[str, ...] = setting("", "prefix or patterns of the names of the weights that travel; all by default")
    loss: Literal["convex", "sum"] = setting("convex", "sum: CE + KL, both with weight 1")
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    optimizer_state: Literal["keep", "reset"] = setting(
        "keep", "the state of the private model's optimizer (momentum) between rounds"
    )
    order: Literal["simultaneous", "alternating"] = setting("simultaneous", "whether meme and private model step in turns")
    defence: Defence = OPEN

    paper = (
        "T. Shen, J. Zhang, X. Jia, F. Zhang, Z. Lv, K. Kuang, C. Wu and F. Wu, "
        '"Federated mutual learning: a collaborative machine learning method for heterogeneous data, models, and '
        'objectives", Frontiers of Information Technology & Electronic Engineering 2023; first version: '
        "arXiv:2006.16765"
    )
    own_architectures = True
    hides_samples = True
    travels = 'a "meme" model, or a part of it'

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            ends = value if isinstance(value, tuple) else (value, value)
            require(all(0 <= end <= 1 for end in ends), name, f"must be in [0, 1], got {value}")

    def depends_on_rounds(self) -> str:
        pairs = [name for name in ("alpha", "beta") if isinstance(getattr(self, name), tuple)]
        return f"method.{pairs[0]} changes from the first to the last round" if pairs else ""

    def check(self, task: Task) -> None:
        if not self.shared:
            super().check(task)
        require_some(task.shared, patterns_of(self.shared), "method.shared")
        memes = {m.id: self._meme(task, m.id) for m in task.members.values()}
        require_same_part(memes, task.shared, self.shared)

    def init_server(self, task: Task, key: Key) -> Part:
        return cut(Model.init(task.shared, key.at("shared"), task.dtype), self.shared)

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        meme = self._meme(task, me)
        adaptor = rest(Model.init(meme, key.at("adaptor", me), task.dtype), self.shared)
        own = task.first_model(me, key)
        return immediately(State(own, {}, meme, adaptor))

    def _meme(self, task: Task, me: ClientId) -> Arch:
        """The shared architecture with as many outputs as the client has classes."""
        labels = task.members[me].labels
        return task.shared if labels == task.schema.classes else task.resolve(task.shared.name, len(labels))

    def client_round(
        self, state: State, down: Part, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Up, Report]]:
        alpha, beta = ramp(self.alpha, self.schedule, when), ramp(self.beta, self.schedule, when)
        peer = (1.0, 1.0) if self.loss == "sum" else (1.0 - alpha, 1.0 - beta)
        labels = (1.0, 1.0) if self.loss == "sum" else (alpha, beta)
        objective = Mutual("own", "global", labels, peer)
        trained = yield from train(
            {"own": state.own, "global": fork(state.meme, state.adaptor, down)},
            self.train.local_optimizer(objective, when, alternating=self.order == "alternating"),
            data.train,
            self.train.batch_schedule(when),
            key.at("train"),
            state.opt if self.optimizer_state == "keep" else None,
        )
        opt = {role: kept for role, kept in trained.opt.items() if role == "own"}
        own, meme = trained.models["own"], trained.models["global"]
        after = State(own, opt, state.meme, rest(meme, self.shared))
        return after, Up(cut(meme, self.shared), told_samples(self.weighting, data)), Report(trained.losses)

    def models(self, state: State, delivery: Part, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.own, "global": fork(state.meme, state.adaptor, delivery)})

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples, gradients=2 if self.order == "alternating" else 1)]

    def offers(self, server: Part, task: Task, key: Key) -> dict[str, Model]:
        fresh = Model.init(task.shared, key.at("newcomer"), task.dtype)  # what is not shared starts from random weights
        return {"global": fork(task.shared, Part(fresh.params, fresh.buffers), server)}

    def visible_models(self, message: Part | Up, task: Task) -> Iterator[tuple[str, Model]]:
        part = message.part if isinstance(message, Up) else message
        fresh = Model.init(task.shared, Key(0), task.dtype)
        if part.params.keys() == fresh.params.keys():  # a part of the weights cannot be evaluated
            yield "part", fork(task.shared, rest(fresh, ""), part)
