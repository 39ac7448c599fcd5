"""Print the Python frames between the start of `fedme run` and the gradient, on the reference path.

    python tools/count_frames.py

Frames of Python's own start-up, of the command line library and of torch are counted apart from ours.
"""

import sys
import tempfile
import traceback
from pathlib import Path

import torch

from fedme.__main__ import main

QUICK = "rounds=1 partition.clients=2 data.limit=60 data.unlabeled=0 models.assign=mlr finetune.epochs=0 engine.path=reference"


def run() -> list[traceback.FrameSummary]:
    """The stack at the first gradient of a small run."""
    stacks: list[traceback.StackSummary] = []
    gradient = torch.autograd.grad

    def recording(*args: object, **kwargs: object) -> object:
        stacks.append(traceback.extract_stack()[:-1])
        return gradient(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["fedme", "run", "digits-fedme", *QUICK.split(), f"output={Path(folder) / 'run'}", "--quiet"]
        torch.autograd.grad = recording  # type: ignore[assignment]
        try:
            main()
        except SystemExit:
            pass
        finally:
            torch.autograd.grad = gradient
    return list(stacks[0])


if __name__ == "__main__":
    frames = [frame for frame in run() if frame.filename != __file__]
    ours = [frame for frame in frames if "/fedme/" in frame.filename.replace("\\", "/")]
    for frame in ours:
        print(f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno} {frame.name}", file=sys.stderr)
    print(f"{len(frames)} frames, {len(ours)} of them in fedme", file=sys.stderr)
