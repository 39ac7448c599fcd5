"""The memory that a run takes: starts `fedme run` with the given words and watches the process and its workers.

    python benchmarks/memory.py [scale-images [KEY=VALUE ...]]

Resident memory is counted as the kernel shares it out (PSS): pages that several processes share count once. Linux only.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEGA = 2**20


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


def main() -> None:
    """Run and watch."""
    words = sys.argv[1:] or ["scale-images"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "fedme", "run", *words, f"output={run}"])
        peak = 0
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # one of them has just ended
                peak = max(peak, sum(resident(pid) for pid in family(process.pid)))
            time.sleep(0.2)
        spent = time.monotonic() - began
        saved = sum(path.stat().st_size for path in run.glob("clients/*/*.safetensors"))
    if process.returncode:
        sys.exit(process.returncode)
    print(json.dumps({"peak_mb": round(peak / MEGA), "models_mb": round(saved / MEGA), "seconds": round(spent, 1)}))


if __name__ == "__main__":
    main()
