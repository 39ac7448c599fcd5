"""The exchange of models: which client receives whose model as a guest, and how the trained copies are averaged."""

from collections.abc import Callable, Iterable, Mapping

from fedme.core.data import ClientId, Split
from fedme.core.first_draws import first_draws
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, evaluate_each
from fedme.core.typed import TypedError
from fedme.learning.robust_aggregation import Defence

Fits = Callable[[ClientId, ClientId], bool]


def acceptance(task: Task, models: Mapping[ClientId, Model]) -> Fits | None:
    """Whether a client accepts another one's model (size, architecture) and the owner lends it to that client.

    None if no client has such limits.
    """
    members = [task.members[client] for client in models]
    if all(limit is None for m in members for limit in (m.max_parameters, m.accepts, m.lends_to)):
        return None

    def fits(borrower: ClientId, lender: ClientId) -> bool:
        receiver, owner, model = task.members[borrower], task.members[lender], models[lender]
        small = receiver.max_parameters is None or model.parameters <= receiver.max_parameters
        accepted = receiver.accepts is None or model.arch.name in receiver.accepts
        return small and accepted and (owner.lends_to is None or borrower in owner.lends_to)

    return fits


def lenders(clusters: Mapping[ClientId, int], fits: Fits | None, key: Key) -> dict[ClientId, ClientId | None]:
    """For every client the owner of the guest it receives: a random other member of its cluster, else of the cohort.

    Draws are independent. A client for which no other model fits gets None; without `fits` every model fits every client.
    """
    members: dict[int, list[ClientId]] = {}
    for client, cluster in clusters.items():
        members.setdefault(cluster, []).append(client)
    chosen: dict[ClientId, ClientId | None] = {}
    for alike in members.values() if fits is None else ():
        if len(alike) > 1:  # in constant time per client: there may be ten thousand
            indices = first_draws([key.at("lender", me) for me in alike], len(alike) - 1)
            chosen |= {me: alike[i + (i >= place)] for place, (me, i) in enumerate(zip(alike, indices, strict=True))}

    def drawn(me: ClientId, cluster: int) -> ClientId | None:
        others = [other for other in clusters if other != me and (fits is None or fits(me, other))]
        candidates = [other for other in others if clusters[other] == cluster] or others
        return candidates[int(key.at("lender", me).numpy().integers(len(candidates)))] if candidates else None

    return {me: chosen[me] if me in chosen else drawn(me, cluster) for me, cluster in clusters.items()}


def admitted_guest(
    own: Model, guest: Model | None, validation: Split, defence: Defence
) -> Computation[tuple[Model | None, dict[str, str | int | float | bool]]]:
    """The guest unless `defence.guest` rejects it, and a note about a rejection. Without validation data none is rejected."""
    if guest is None or defence.guest is None or not len(validation):
        return guest, {}
    own_score, guest_score = yield from evaluate_each((own, guest), validation)
    if not defence.unwelcome(own_score, guest_score):
        return guest, {}
    return None, {"guest_refused": f"loss {guest_score.loss:.3g} against {own_score.loss:.3g} of the own model"}


def finite_or_none(model: Model | None) -> Model | None:
    """The model, or None if it diverged."""
    return model if model is not None and model.finite else None


def require_lender(sent: ClientId | None, replied: ClientId | None, returned: bool, adopts: bool) -> None:
    """Raise a TypedError for a reply about a guest that the client did not have."""
    if replied != sent:
        raise TypedError("lender", f"must be {sent}, got {replied}")
    if adopts and not returned:
        raise TypedError("adopts", "a model that was not sent back cannot be adopted")


def averaged_copies(
    models: Mapping[ClientId, Model], copies: Iterable[tuple[ClientId | None, Model | None]]
) -> dict[ClientId, Model]:
    """Every model as the mean of its trained copies, with equal weights (FedMe Eq. 8, 9).

    A model without copies stays as it is.
    """
    by_owner: dict[ClientId, list[Model]] = {}
    for owner, copy in copies:
        if owner is not None and copy is not None:
            by_owner.setdefault(owner, []).append(copy)
    return {**models, **{owner: average(trained) for owner, trained in by_owner.items()}}
