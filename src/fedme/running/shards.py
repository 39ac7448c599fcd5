"""A share of many runs for one of several machines, and the list of runs for the job array of a cluster."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import is_locked
from fedme.results import summary
from fedme.running.run_queue import Planned, finished

State = Literal["finished", "in use", "begun", "new"]


@dataclass(frozen=True)
class Shard:
    """Share number `index`, from 1, of `count`: every `count`-th run. The shares have no run in common and miss none."""

    index: int = 1
    count: int = 1

    def of(self, plans: Sequence[Planned]) -> list[Planned]:
        """The runs of this share."""
        return list(plans[self.index - 1 :: self.count])


def parse_shard(text: str | None) -> Shard:
    """Read "i/n"; None is everything."""
    if text is None:
        return Shard()
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard '{text}': must look like i/n with i from 1 to n, for example 1/4 for the first of four")
    return Shard(int(match[1]), int(match[2]))


def state(planned: Planned) -> State:
    """How far a run is. Another experiment in its directory is an error."""
    if is_locked(planned.folder):
        return "in use"
    if finished(planned):
        return "finished"
    return "begun" if (planned.folder / summary.CONFIG).exists() else "new"
