"""What the choice of a model on the validation part does to test accuracy: the table in docs/use-models.md.

FEDME_DATA=folder python benchmarks/model_choice.py [SEEDS [WORD]]     (WORD chooses settings)

Needs UCI HAR (`har/person_*.npz`) and the four files of the heart disease data (`heart/processed.*.data`). Half of a client's
samples are for training, a quarter each for validation and testing. Settings were chosen before: nothing is tuned.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import last_batch
import torch
from rich.console import Console

import fedme
from fedme.artifacts import model_choice, outputs as model_outputs, saved_models
from fedme.config.experiment import Experiment, load
from fedme.core.key import Key
from fedme.results import verdicts
from fedme.results.statistics import compare
from fedme.running import local_baseline, run
from fedme.running.progress import Display

Tested = dict[str, float]  # test accuracy in %, by model


def sites(name: str, learner: type[fedme.Learner], folder: Path, seed: int) -> Experiment:
    """Persons of UCI HAR, or hospitals: clients as the data has them."""
    clients = []
    for client, (x, y) in {"HAR": last_batch._persons, "heart": last_batch._hospitals}[name]().items():
        order = Key(seed).at("samples", client).numpy().permutation(len(y))
        parts = [order[len(y) // 2 :], order[: len(y) // 4], order[len(y) // 4 : len(y) // 2]]
        clients.append(fedme.Client(client, *((x[part], y[part]) for part in parts)))
    train = {"batch": 20, "lr": 0.05, "momentum": 0.9, "epochs": 2}
    models = {"pool": ["mlr", "dnn-64"]}
    method = learner(rounds=10, seed=seed, train=train, models=models, finetune={"epochs": 2})
    return method.fit(clients, output=folder, quiet=True).experiment


def preset(words: str, folder: Path, seed: int) -> Experiment:
    """An ordinary experiment."""
    name, *changes = words.split()
    experiment, _ = load(name, [*changes, f"seed={seed}", f"output={folder}"])
    run.start(experiment, Display(Console(stderr=True), quiet=True))
    return experiment


SETTINGS: Mapping[str, Callable[[Path, int], Experiment]] = {
    **{
        f"{name}, {method.__name__}": partial(sites, name, method)
        for name in ("heart", "HAR")
        for method in (fedme.FedAvg, fedme.FedMe)
    },
    "digits, FedMe": partial(preset, "digits-fedme data.val=0.3 rounds=10"),
    "digits, FML": partial(preset, "digits-fedme method.name=fml data.val=0.3 rounds=10"),
}


def tested(folder: Path, experiment: Experiment, cache: Path) -> tuple[list[tuple[str, Tested]], list[verdicts.Verdict]]:
    """The choice and the test accuracies of every client, and the verdicts."""
    with Display(Console(stderr=True), quiet=True) as display:
        judged = local_baseline.judge(folder, experiment, display, cache)
    found = []
    for verdict in judged:
        at = saved_models.folder_of(folder, verdict.client)
        answers, y = model_outputs.of_split(model_outputs.read(at), "test")
        assert y is not None
        scores = {name: 100 * (z.argmax(1) == y).double().mean().item() for name, z in answers.items()}
        assert verdict.local is not None
        assert verdict.constant is not None
        scores |= {"local": 100 * verdict.local, "constant": 100 * verdict.constant}
        choice = model_choice.read(at)
        assert choice is not None
        scores |= {"chosen": scores[verdict.model], "chosen or local": scores[choice.name]}
        found.append((verdict.model, scores))
    return found, judged


COLUMNS = ("model", "finetuned", "global", "best", "chosen", "local", "chosen or local", "constant")
HEADER = ["setting", *COLUMNS, "chosen - own", "chosen or local - own", "fine-tuning kept, its gain", "gain where not kept"]
Rows = list[list[tuple[str, Tested]]]  # by seed and client


def main(seeds: int, word: str) -> None:
    """Print a line per setting: means over clients and seeds, the gain of the choice, and fine-tuning kept and not kept."""
    print(f"| {' | '.join([*HEADER, 'better / worse / cannot tell'])} |")
    print("|---" * (len(HEADER) + 1) + "|")
    for setting, start in SETTINGS.items():
        if word not in setting:
            continue
        rows: Rows = []
        counts, began = [0, 0, 0], time.time()
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                clients, judged = tested(Path(folder) / "run", start(Path(folder) / "run", seed), Path(folder) / "local")
                rows.append(clients)
                whole = verdicts.overall(judged)
                counts = [a + len(b) for a, b in zip(counts, (whole.better, whole.worse, whole.open), strict=True)]
        kept = [s["finetuned"] - s["model"] for row in rows for name, s in row if name == "finetuned"]
        left = [s["finetuned"] - s["model"] for row in rows for name, s in row if name != "finetuned"]
        share = f"{100 * len(kept) / (len(kept) + len(left)):.0f} %, {statistics.fmean(kept):+.1f}" if kept else "0 %"
        cells = [*(mean(rows, name) for name in COLUMNS), gain(rows, "chosen"), gain(rows, "chosen or local"), share]
        cells += [f"{statistics.fmean(left):+.1f}" if left else "-", " / ".join(map(str, counts))]
        print(f"| {setting} | {' | '.join(cells)} |", flush=True)
        print(f"{setting}: {time.time() - began:.0f} s", file=sys.stderr, flush=True)


def mean(rows: Rows, name: str) -> str:
    """The mean over clients and seeds."""
    values = [scores[name] for row in rows for _, scores in row if name in scores]
    return f"{statistics.fmean(values):.1f}" if values else "-"


def gain(rows: Rows, name: str) -> str:
    """The mean difference to the own model, with its 95 % interval over seeds."""
    test = compare([statistics.fmean(s[name] - s["model"] for _, s in row) for row in rows])
    return f"{test.mean:+.2f} ({test.low:+.2f} to {test.high:+.2f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2] if len(sys.argv) > 2 else "")
