"""LG-FedAvg: every client learns a representation of its own, and all share the classifier on top of it.

Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov and Morency, "Think Locally, Act Globally: Federated Learning with Local
and Global Representations", 2020, Algorithm 1: a client trains its local body and its copy of the global head together; the
server averages the heads by sample counts. Bodies may be of different architectures, if their features have one width.

Deviations: no rounds of FedAvg come first (the paper starts so where architectures allow it), and there are no auxiliary losses
for the local representation. The head is the last linear layer of each network; `shared` names layers instead, the same in all
networks. The first head is that of the first client's network or, in a deployment, of `models.shared`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Task, TaskError
from fedme.core.model import Arch, Model
from fedme.core.settings import setting
from fedme.learning.partial_model import Choice, Part, chosen_part, fork, head_of, named, require_some
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.methods.shared_part import SharedPartMethod, State, Up

HEAD = "head."  # the head travels under this name: each architecture has its own


@dataclass(frozen=True)
class LGFedAvg(SharedPartMethod):
    """Clients learn representations of their own, by any architecture, and share the last layer."""

    train: Training = field(default_factory=Training)
    shared: tuple[str, ...] | None = setting(
        None, "patterns of the names of shared weights, for example ['fc2.']; the last linear layer by default"
    )
    weighting: Literal["samples", "uniform"] = setting("samples", "weights of the mean: numbers of training samples, or equal")
    defence: Defence = OPEN

    paper = (
        "P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov and L.-P. Morency, "
        '"Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020, '
        "arXiv:2001.01523"
    )
    own_architectures = True
    uses_shared_model = False
    travels = "the last layer, or those that are named"
    nothing_to_offer = "its clients share the last layer, not a model; run it again with the new client among them"
    nothing_to_audit = "its clients share the last layer, not models that could be evaluated"

    @classmethod
    def name(cls) -> str:
        return "lg-fedavg"

    def check(self, task: Task) -> None:
        super().check(task)
        expected = _shapes(self._part_of(task, self._first_arch(task)))
        for client, member in task.members.items():
            require_some(member.arch, self.shared or (), "method.shared")
            shapes = _shapes(self._part_of(task, member.arch))
            if odd := [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]:
                raise TaskError(
                    f"client {client} cannot share the layers of method '{self.name()}': {odd[0]} has shape "
                    f"{shapes.get(odd[0])} in {member.arch.name}, expected "
                    f"{expected.get(odd[0])}; use networks whose last layers have as many inputs"
                )

    def _first_arch(self, task: Task) -> Arch:
        """The architecture whose head the server starts from: the first client's, or the shared one if clients join later."""
        return task.shared if task.open else next(iter(task.members.values())).arch

    def _part_of(self, task: Task, arch: Arch) -> Part:
        return self.shared_part(Model.init(arch, Key(0), task.dtype))

    def shared_choice(self, arch: Arch) -> Choice:
        return named(*((head_of(arch),) if self.shared is None else self.shared))

    def shared_part(self, model: Model) -> Part:
        part = chosen_part(model, self.shared_choice(model.arch))
        return part if self.shared is not None else _renamed(part, head_of(model.arch), HEAD)

    def joined(self, state: State, part: Part) -> Model:
        return fork(state.arch, state.own, part if self.shared is not None else _renamed(part, HEAD, head_of(state.arch)))

    def arch_of(self, task: Task, me: ClientId) -> Arch:
        return task.members[me].arch

    def init_server(self, task: Task, key: Key) -> Part:
        return self.shared_part(Model.init(self._first_arch(task), key.at("shared"), task.dtype))

    def offers(self, server: Part, task: Task, key: Key) -> dict[str, Model]:
        return {}

    def visible_models(self, message: Part | Up, task: Task) -> Iterator[tuple[str, Model]]:
        return iter(())


def _renamed(part: Part, old: str, new: str) -> Part:
    """The part with another prefix of its names."""
    params, buffers = ({new + name.removeprefix(old): p for name, p in of.items()} for of in (part.params, part.buffers))
    return Part(params, buffers)


def _shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for of in (part.params, part.buffers) for name, value in of.items()}
