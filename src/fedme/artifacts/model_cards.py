"""The description of a saved model and its model card: architecture, client, data, metrics and lineage."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import fedme
from fedme.core.data import ClientData
from fedme.core.metrics import MEASURES
from fedme.core.task_types import TaskType
from fedme.federation.client_work import ModelScore
from fedme.results.lineage import Lineage

TITLES = {"balanced_accuracy": "balanced accuracy"}
CARD_TITLES = {"personal": "Personal model", "best": "Personal model after the best round", "global": "Model of the server"}
OUTPUTS = {"classification": "Classes", "multi-label": "Labels, each present or absent", "regression": "Predicted values"}


def about(
    data: ClientData,
    stage: str,
    method: str,
    rounds: int,
    scores: Sequence[ModelScore],
    lineage: Lineage | None,
    task_type: TaskType = "classification",
    role: str = "personal",
) -> dict[str, Any]:
    """The part of a model's description that says how it was trained and how well it performs."""
    model = "personal" if role == "finetuned" else role
    personal = [s for s in scores if s.model == model and s.stage == stage]
    primary = MEASURES[task_type][0].key
    description: dict[str, Any] = {
        "client": data.id,
        "model": model,
        "stage": stage,
        "method": method,
        "rounds": rounds,
        "data": {"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        primary: {s.split: getattr(s.metrics, primary) for s in personal},
        "metrics": {s.split: s.metrics.plain(task_type) for s in personal},
        "versions": {"fedme": fedme.__version__, "torch": _torch_version()},
    }
    if data.preprocessing is not None:
        description["preprocessing"] = dict(data.preprocessing)
    return description | ({"lineage": asdict(lineage)} if lineage is not None else {})


@functools.cache
def _torch_version() -> str:
    return metadata.version("torch")


def markdown(description: Mapping[str, Any]) -> str:
    """The model card."""
    d = description
    tuned = ", then fine-tuned on its own samples" if d["stage"] == "finetuned" else ""
    shape = " x ".join(map(str, d["inputs"]["shape"])) or "1"
    classes = d["classes"]
    task: TaskType = d.get("task", "classification")
    listed = ", ".join(classes[:20]) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    lines = [
        f"# {CARD_TITLES.get(d['model'], 'Model')} of client {d['client']}",
        "",
        f"Trained by FedMe {d['versions']['fedme']} with method `{d['method']}` for {d['rounds']} rounds{tuned}.",
        "",
        f"* Architecture: `{d['arch']}`, {d['parameters']:,} weights ({d['dtype']})",
        f"* Inputs: {shape} numbers per sample{_prepared(d['preprocessing'])}",
        f"* {OUTPUTS[task]} ({len(classes)}): {listed}",
        f"* Samples of the client: {_sizes(d['data'])}",
        *_lineage(d),
        f"* Made with torch {d['versions']['torch']}",
        "",
        "| part | samples | " + " | ".join(TITLES.get(m.key, m.title) for m in MEASURES[task]) + " |",
        "|---|---:|" + "---:|" * len(MEASURES[task]),
        *(
            f"| {split} | {m['samples']} | " + " | ".join(_number(m[measure.key]) for measure in MEASURES[task]) + " |"
            for split, m in d["metrics"].items()
        ),
        "",
        "The validation part was used to select models; the test part was used for this evaluation only.",
    ]
    return "\n".join(lines) + "\n"


def _sizes(data: Mapping[str, int]) -> str:
    return f"{data['train']} for training, {data['val']} for validation, {data['test']} for testing"


def _prepared(preprocessing: Mapping[str, Any]) -> str:
    columns = preprocessing.get("columns")
    named = f", from the columns {', '.join(column['name'] for column in columns)}" if columns else ""
    return named + (", scaled as the model's description says" if preprocessing.get("scale") else "")


def _lineage(d: Mapping[str, Any]) -> list[str]:
    lineage = d.get("lineage")
    if lineage is None:
        return []
    steps = [f"adopted by {a['by']} from {a['lender']} after round {a['round']}" for a in lineage["adoptions"]]
    line = f"* Lineage: began as the model of {lineage['origin']}" + (f"; {'; '.join(steps)}" if steps else ", never replaced")
    return [f"{line} (rounds count from 0)"] if steps else [line]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
