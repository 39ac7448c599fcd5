"""The best that every client could do alone, and whether joining helped it.

Alone, a client trains every architecture of the federation on its own samples, for as many rounds as it took part in, and keeps
the one that is best on its validation part. That does not depend on the method, so it is computed once for the same samples,
architectures and training settings: the models are kept in `.local/` beside the run directory, and all runs there share them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedme.artifacts import local_models, outputs as model_outputs, saved_models
from fedme.config.experiment import Experiment
from fedme.config.named_code import command_for
from fedme.core.atomic_files import RunError, locked, together
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.datasets.federated_dataset import Federation
from fedme.execution.lockstep import run_in_lockstep
from fedme.results import records, summary, verdicts
from fedme.results.verdicts import Verdict
from fedme.running import assembly
from fedme.running.local_training_name import FOLDER, local_training_name
from fedme.running.progress import Display
from fedme.running.run import on_disk, stopping

GROUP = 32  # clients trained at a time; a stopped training keeps the finished groups


def judge(run: Path, experiment: Experiment, display: Display, cache: Path | None = None) -> list[Verdict]:
    """The verdict for every client of a finished run. The first time it trains every client alone.

    `cache` is the folder for models trained alone; `.local` beside the run by default.
    """
    known = verdicts.read(run)
    if known is not None:
        return known
    if not (run / summary.NAME).exists():
        raise RunError(f"{run}: the run is not finished; `{command_for(run)}` continues it")
    if experiment.data_name == "sites":
        raise RunError(f"{run}: the samples are at the sites; every site asks there, with `fedme deploy verdict`")
    if experiment.data_name != "given":  # in memory already
        display.note(f"loading {experiment.data_name} ...")
    federation = assembly.gather(experiment)
    local = train_locally(run, experiment, federation, display, cache)
    clients = [client for client in federation.clients if client not in federation.malicious]
    judged = [
        local_models.verdict_of(
            saved_models.folder_of(run, client),
            saved_models.folder_of(local, client),
            federation.clients[client],
            federation.dataset.schema,
        )
        for client in clients
        if len(federation.clients[client].test)
    ]
    if not judged:
        raise RunError(f"{run}: no client has test samples, so there is nothing to compare on; set data.test")
    verdicts.write(run, judged)
    return judged


def train_locally(
    run: Path, experiment: Experiment, federation: Federation, display: Display, cache: Path | None = None
) -> Path:
    """The folder with every client's model trained alone; clients that are not there yet are trained."""
    rounds = rounds_of_clients(run, experiment, federation.clients)
    candidates = assembly.candidates(experiment, federation)
    name = local_training_name(experiment, federation, candidates, rounds, experiment.train)
    folder = (cache or run.resolve().parent / FOLDER) / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), on_disk(folder), stopping() as stop:
        missing = [c for c in federation.clients if not model_outputs.exist(saved_models.folder_of(folder, c))]
        if not missing:
            return folder

        def tick() -> None:
            display.tick()
            stop()

        display.note("training every client on its own samples alone, to compare")
        total = sum(len(candidates[client]) * (rounds[client] + 1) + 2 for client in missing)
        display.start("alone: training", total, by_operation=True)
        execute = assembly.executor(experiment.settings.engine, tick)
        try:
            for group in _groups(missing):
                work = {
                    client: local_models.train_client(
                        federation.clients[client],
                        candidates[client],
                        experiment.train,
                        rounds[client],
                        Key(experiment.settings.seed).at("local", client),
                        assembly.DTYPES[experiment.settings.engine.dtype],
                        experiment.settings.models.update_bn,
                        federation.dataset.schema.unit,
                    )
                    for client in group
                }
                done = {client: timed.value for client, timed in run_in_lockstep(work, execute).items()}
                with together():
                    for client, local in done.items():
                        schema = federation.dataset.schema
                        own, classes = saved_models.folder_of(folder, client), assembly.label_space(experiment, schema, client)
                        local_models.save(own, federation.clients[client], local, schema, classes, rounds[client])
        finally:
            execute.close()
    return folder


def _groups(clients: Sequence[ClientId]) -> Iterator[Sequence[ClientId]]:
    for start in range(0, len(clients), GROUP):
        yield clients[start : start + GROUP]


def rounds_of_clients(run: Path, experiment: Experiment, clients: Mapping[ClientId, Any]) -> dict[ClientId, int]:
    """The rounds in which every client trained; a client that never trained alone gets as many as the most active one."""
    trained: dict[ClientId, set[int]] = defaultdict(set)
    missed: set[tuple[ClientId, int]] = set()
    for row in records.read(run):
        if row["stage"] == "training":
            trained[row["client"]].add(row["round"])
        if (row.get("notes") or {}).get("missing"):
            missed.add((row["client"], row["round"]))
    counts = {client: sum((client, t) not in missed for t in trained[client]) for client in clients}
    most = max(counts.values(), default=0) or experiment.settings.rounds
    return {client: count or most for client, count in counts.items()}
