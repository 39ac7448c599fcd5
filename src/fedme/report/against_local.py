"""A run beside a run of Local with the same samples: the gain of every client, tested on the same test samples."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedme.artifacts import outputs as model_outputs, saved_models
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientId
from fedme.core.typed import TypedError
from fedme.report.run_data import Run
from fedme.results import verdicts
from fedme.results.statistics import Gain
from fedme.results.summary import measures_of
from fedme.results.verdicts import Verdict

FILES = {"round": "model", "finetuned": "finetuned"}  # the saved model of a stage


def verdicts_of(run: Run, baseline: Run, stage: str) -> list[Verdict]:
    """A verdict per client that both runs have evaluated; `stage` is that of `run`.

    The models' answers to every test sample, which finished runs keep, give intervals and p values. Without them, as in an
    unfinished run, the gain is known and its interval is not.
    """
    measure = measures_of(run.result)[0]
    now, before = run.last(("personal", stage, "test")), baseline.last(("personal", "round", "test"))
    unit = _unit(run)
    judged = []
    for client in run.clients:
        if client not in now or client not in before:
            continue
        value, local = now[client][measure.key], before[client][measure.key]
        if value is None or local is None:
            continue
        gains = _paired(run, baseline, client, stage, unit)
        gain = gains.get(measure.key)
        if gain is None:  # the same number as in the records, without an interval
            gains = {measure.key: Gain(now[client]["samples"], measure.gain(value, local), -math.inf, math.inf, math.nan)}
        labels = run.labels["clients"][client] if run.labels and client in run.labels["clients"] else {}
        judged.append(
            Verdict(
                client=client,
                task=run.result.get("task", "classification"),
                model=FILES[stage],
                arch=now[client]["arch"],
                local_arch=before[client]["arch"],
                samples=now[client]["samples"],
                value=value,
                local=local,
                constant=None,
                gains=gains,
                trained=labels.get("train", 0),
                tested=run.labels["digest"] if run.labels else "",
            )
        )
    return judged


def _paired(run: Run, baseline: Run, client: ClientId, stage: str, unit: tuple[float, ...] | None) -> Mapping[str, Gain]:
    """The gains by the answers to every sample; empty if they were not kept or are not to the same samples."""
    try:
        ours, targets = _answers(run, client, FILES[stage])
        theirs, same = _answers(baseline, client, "model")
    except RunError:
        return {}
    if unit is None or ours is None or theirs is None or targets is None or same is None or not torch.equal(targets, same):
        return {}
    if ours.shape != theirs.shape or not len(targets):
        return {}
    return verdicts.gains(run.result.get("task", "classification"), ours, theirs, targets, unit)


def _answers(run: Run, client: ClientId, name: str) -> tuple[Tensor | None, Tensor | None]:
    models, targets = model_outputs.of_split(model_outputs.read(saved_models.folder_of(run.folder, client)), "test")
    return models.get(name), targets


def _unit(run: Run) -> tuple[float, ...] | None:
    """The unit of standardised targets; None if no saved model says it."""
    if run.result.get("task", "classification") != "regression":
        return ()
    for about in _descriptions(run):
        try:
            return saved_models.schema_of(about).unit
        except (TypedError, KeyError, TypeError, AttributeError):
            return None
    return None


def _descriptions(run: Run) -> list[dict[str, Any]]:
    for client in run.clients:
        try:
            return [saved_models.describe(saved_models.folder_of(run.folder, client))]
        except RunError:
            continue
    return []
