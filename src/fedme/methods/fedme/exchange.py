"""Who lends a model to whom (a random other member of one's cluster, else of the cohort), and what comes back of it."""

from collections.abc import Callable, Iterable, Mapping

from fedme.core import tree
from fedme.core.data import ClientId, Split
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, evaluate, in_parallel
from fedme.core.typed import TypedError
from fedme.learning.robust_aggregation import Defence

Fits = Callable[[ClientId, ClientId], bool]


def room_for(task: Task, models: Mapping[ClientId, Model]) -> Fits | None:
    """Whether a borrower takes a lender's model (its size and its architecture) and the lender lends it to this one.

    None where nobody has such wishes.
    """
    members = [task.members[client] for client in models]
    if all(wish is None for each in members for wish in (each.max_parameters, each.accepts, each.lends_to)):
        return None

    def fits(borrower: ClientId, lender: ClientId) -> bool:
        taker, giver, model = task.members[borrower], task.members[lender], models[lender]
        small = taker.max_parameters is None or model.parameters <= taker.max_parameters
        wanted = taker.accepts is None or model.arch.name in taker.accepts
        return small and wanted and (giver.lends_to is None or borrower in giver.lends_to)

    return fits


def lenders(clusters: Mapping[ClientId, int], fits: Fits | None, key: Key) -> dict[ClientId, ClientId | None]:
    """For every client the one whose model it receives, drawn independently; None when no other model fits it.

    `fits(borrower, lender)` says whether the borrower can take the lender's model; without it every model fits everybody.
    """
    company: dict[int, list[ClientId]] = {}
    for client, cluster in clusters.items():
        company.setdefault(cluster, []).append(client)
    place = {client: place for mine in company.values() for place, client in enumerate(mine)}

    def drawn(me: ClientId, cluster: int) -> ClientId | None:
        draw = key.at("lender", me).numpy()
        near = company[cluster]
        if fits is None and len(near) > 1:  # without a look at everybody: there may be ten thousand
            at = int(draw.integers(len(near) - 1))
            return near[at + (at >= place[me])]
        others = [other for other in clusters if other != me and (fits is None or fits(me, other))]
        candidates = [other for other in others if clusters[other] == cluster] or others
        return candidates[int(draw.integers(len(candidates)))] if candidates else None

    return {me: drawn(me, cluster) for me, cluster in clusters.items()}


def welcomed(
    own: Model, guest: Model | None, validation: Split, defence: Defence
) -> Computation[tuple[Model | None, dict[str, str | int | float | bool]]]:
    """The guest, if it is let in, and what there is to say about it. Without validation data nobody is turned away."""
    if guest is None or defence.guest is None or not len(validation):
        return guest, {}
    mine, its = yield from in_parallel([evaluate(own, validation), evaluate(guest, validation)])
    if not defence.unwelcome(mine, its):
        return guest, {}
    return None, {"guest_refused": f"loss {its.loss:.3g} against {mine.loss:.3g} of the own model"}


def sound(model: Model | None) -> Model | None:
    """The model, unless it diverged: that one is not passed on."""
    return model if model is not None and model.finite else None


def require_lender(sent: ClientId | None, said: ClientId | None, returned: bool, adopts: bool) -> None:
    """Refuse a reply about a guest that the client never had."""
    if said != sent:
        raise TypedError("lender", f"the guest was {sent}'s, not {said}'s")
    if adopts and not returned:
        raise TypedError("adopts", "a model that was not sent back cannot be adopted")


def merged(
    models: Mapping[ClientId, Model],
    copies: Iterable[tuple[ClientId | None, Model | None]],
    combine: tree.Combine = tree.average,
) -> dict[ClientId, Model]:
    """Every model as the mean of the copies of it that came back (FedMe Eq. 8, 9: each counts the same).

    A model of which no copy came back stays as it was; `combine` may be something else than the mean.
    """
    mine: dict[ClientId, list[Model]] = {}
    for owner, copy in copies:
        if owner is not None and copy is not None:
            mine.setdefault(owner, []).append(copy)
    return {**models, **{client: average(found, None, combine) for client, found in mine.items()}}
