"""Runs as tasks of a Ray cluster: every task is one run, in a process of its own on some node.

The nodes need FedMe, the data and the run directories at the same paths as here, which a shared file system gives them. A node
that dies costs the rounds since the last checkpoint: Ray starts its tasks elsewhere, and they continue.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console

from fedme.execution.compiled_library import NARROW
from fedme.execution.device import given, gpus
from fedme.execution.ray import load_module
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted
from fedme.running.run_queue import POLL, Launcher, Outcome, Planned, attempt

PASSED_ON = ("FEDME_DATA", NARROW)  # environment variables that runs need on other nodes too


def on_ray(address: str) -> Launcher:
    """Launch runs on the Ray cluster at `address`."""
    load_module("execution.ray.cluster")  # says so if Ray is not installed

    def launch(plans: Sequence[Planned]) -> AbstractContextManager[Iterator[Outcome | None]]:
        return _tasks(address, plans)

    return launch


@contextmanager
def _tasks(address: str, plans: Sequence[Planned]) -> Iterator[Iterator[Outcome | None]]:
    import ray

    load_module("execution.ray.cluster").join(address)
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    waiting: dict[Any, Planned] = {}
    try:
        for planned in plans:
            options: dict[str, Any] = {"max_retries": 3, **needs(planned)}
            task = ray.remote(**options)(run_elsewhere)
            waiting[task.remote(json.dumps(on_node(planned).plain()), environment)] = planned
        yield _outcomes(waiting)
    finally:
        for reference in waiting:
            ray.cancel(reference, force=False)  # the process saves, and ends
        if waiting:
            ray.wait(list(waiting), num_returns=len(waiting), timeout=30)
        ray.shutdown()


def needs(planned: Planned) -> dict[str, int]:
    """The processors and GPUs that a task asks for."""
    engine = planned.config["engine"]
    return {"num_cpus": max(engine.get("workers") or 1, engine["threads"]), "num_gpus": gpus(engine["device"])}


def on_node(planned: Planned) -> Planned:
    """The plan as its task runs it: of the GPUs of its node it sees the one that it was given, under whatever number."""
    engine = planned.config["engine"]
    config = {**planned.config, "engine": {**engine, "device": given(engine["device"])}}
    return Planned(planned.name, planned.folder.resolve(), config)


def _outcomes(waiting: dict[Any, Planned]) -> Iterator[Outcome | None]:
    import ray

    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=POLL)
        for reference in ready:
            planned = waiting.pop(reference)
            try:
                yield Outcome(planned, **json.loads(ray.get(reference)))
            except ray.exceptions.RayError as error:
                yield Outcome(planned, f"its task on Ray ended: {str(error).splitlines()[0]}; the same command continues it")
        if not ready:
            yield None


def run_elsewhere(plan: str, environment: Mapping[str, str]) -> str:
    """The task: run a plan in a process of its own, so that its memory and its settings of PyTorch end with it."""
    command = [sys.executable, "-m", "fedme.running.ray_jobs"]
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(plan.encode())
        process.stdin.close()
        while process.poll() is None:  # Ray interrupts between instructions only
            time.sleep(POLL)
        answer = process.stdout.read().decode()
        return answer or json.dumps({"error": f"its process died (exit code {process.returncode}); the same command continues"})
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def main() -> None:
    """Run the plan on standard input, and print its outcome."""
    planned = Planned.read(json.load(sys.stdin))
    try:
        outcome = attempt(planned, Display(Console(stderr=True), quiet=True))
    except (Interrupted, KeyboardInterrupt):
        outcome = Outcome(planned, "stopped; the same command continues")
    print(json.dumps({"error": outcome.error, "in_use": outcome.in_use}))


if __name__ == "__main__":
    main()
