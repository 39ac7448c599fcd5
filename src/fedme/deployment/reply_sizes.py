"""The largest legal reply of an experiment, computed before a site is asked for one."""

import functools
from typing import Any

from torch import Tensor

from fedme.core import tree
from fedme.core.method import Task
from fedme.core.model import Arch, template
from fedme.federation.flower.reply_limits import ReplyLimit

HEADER = 256  # bytes before the numbers of an array
SPARE = 16  # arrays beyond those of models: outputs, and what a method adds


def largest_reply(task: Task, down: Any) -> ReplyLimit:
    """The limit of the reply to `down`: twice what was sent, two of the largest model, and outputs on the public samples."""
    tensors = [leaf for _, leaf in tree.leaves(down) if isinstance(leaf, Tensor)]
    models = [_size(arch) for arch in {task.shared, *(member.arch for member in task.members.values())}]
    arrays = 2 * len(tensors) + 2 * max(count for count, _ in models) + SPARE
    outputs = 2 * task.public * max(len(task.schema.classes), 1) * 8
    return ReplyLimit(2 * tree.nbytes(tensors) + 2 * max(size for _, size in models) + outputs + HEADER * arrays, arrays)


@functools.lru_cache(maxsize=256)
def _size(arch: Arch) -> tuple[int, int]:
    """The number of arrays of a model, and their bytes in float64 at most."""
    weights = template(arch, training=False).state_dict().values()
    return len(weights), sum(weight.numel() * 8 for weight in weights)
