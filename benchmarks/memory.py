"""The memory that a run takes: starts `fedme run` with the given words and watches the process and its workers.

    python benchmarks/memory.py [scale-images [KEY=VALUE ...]]
    python benchmarks/memory.py --weights 100e6 [--methods fedavg fedme] [KEY=VALUE ...]

With `--weights`, four clients train a dense network of about so many weights, and the peak is also given in multiples of the
model. Resident memory is counted as the kernel shares it out (PSS): pages that several processes share count once. It includes
Python and its libraries. Linux only.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGA = 2**20
LAYERS = 11
CLIENTS = ["partition.name=iid", "partition.clients=4", "data.limit=400", "train.batch=25", "train.epochs=1", "rounds=3"]


def family(pid: int) -> list[int]:
    """A process and everything it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def resident(pid: int) -> int:
    """Bytes that a process has in memory, its part of what is shared."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def watched(words: list[str]) -> dict[str, Any]:
    """Run and watch."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "fedme", "run", *words, f"output={run}"])
        peak = 0
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # one of them has just ended
                peak = max(peak, sum(resident(pid) for pid in family(process.pid)))
            time.sleep(0.1)
        spent = time.monotonic() - began
        saved = sum(path.stat().st_size for path in run.glob("clients/*/*.safetensors"))
        disk = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    if process.returncode:
        sys.exit(process.returncode)
    sizes = {"peak_mb": round(peak / MEGA), "models_mb": round(saved / MEGA), "run_mb": round(disk / MEGA)}
    return sizes | {"seconds": round(spent, 1)}


def network_of(weights: float) -> tuple[str, int]:
    """A dense network of about so many weights, and their number."""
    width = round((weights / (LAYERS - 1)) ** 0.5)
    count = 64 * width + (LAYERS - 1) * width * width + LAYERS * width + 10 * (width + 1)
    return "dnn" + f"-{width}" * LAYERS, count


def large(weights: float, method: str, words: list[str]) -> dict[str, Any]:
    """The same with a dense network of about so many weights, by method; the peak also in models."""
    network, count = network_of(weights)
    named = [f"models.pool=['{network}']", f"models.shared={network}"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "experiment.toml"
        config.write_text(f'[method]\nname = "{method}"\n[data]\nname = "digits"\n')
        found = watched([str(config), *CLIENTS, *named, *words])
    model = 4 * count / MEGA
    return {"method": method, "weights": count, **found, "peak_models": round(found["peak_mb"] / model, 2)}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedme"])
    parser.add_argument("words", nargs="*", help="preset and settings, as for `fedme run`")
    asked = parser.parse_args()
    if asked.weights is None:
        print(json.dumps(watched(asked.words or ["scale-images"])))
        return
    for method in asked.methods:
        print(json.dumps(large(asked.weights, method, asked.words)), flush=True)


if __name__ == "__main__":
    main()
