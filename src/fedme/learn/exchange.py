"""Who lends a model to whom (a random other member of one's cluster, else of the cohort), and what comes back of it."""

from collections.abc import Callable, Iterable, Mapping

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.core.model import Model, average

Fits = Callable[[ClientId, ClientId], bool]


def room_for(task: Task, models: Mapping[ClientId, Model]) -> Fits:
    """Whether a borrower takes a lender's model (its size and its architecture) and the lender lends it to this one."""

    def fits(borrower: ClientId, lender: ClientId) -> bool:
        taker, giver, model = task.members[borrower], task.members[lender], models[lender]
        small = taker.max_parameters is None or model.parameters <= taker.max_parameters
        wanted = taker.accepts is None or model.arch.name in taker.accepts
        return small and wanted and (giver.lends_to is None or borrower in giver.lends_to)

    return fits


def lenders(clusters: Mapping[ClientId, int], fits: Fits, key: Key) -> dict[ClientId, ClientId | None]:
    """For every client the one whose model it receives, drawn independently; None when no other model fits it.

    `fits(borrower, lender)` says whether the borrower can take the lender's model.
    """
    chosen: dict[ClientId, ClientId | None] = {}
    for me, cluster in clusters.items():
        others = [other for other in clusters if other != me and fits(me, other)]
        near = [other for other in others if clusters[other] == cluster] or others
        chosen[me] = near[int(key.at("lender", me).numpy().integers(len(near)))] if near else None
    return chosen


def merged(models: Mapping[ClientId, Model], copies: Iterable[tuple[ClientId, Model]]) -> dict[ClientId, Model]:
    """Every model as the mean of the copies of it that came back (FedMe Eq. 8, 9: each counts the same).

    Copies that diverged are left out; a model of which no copy came back stays as it was.
    """
    mine: dict[ClientId, list[Model]] = {}
    for owner, copy in copies:
        if copy.finite:
            mine.setdefault(owner, []).append(copy)
    return {**models, **{client: average(found) for client, found in mine.items()}}
