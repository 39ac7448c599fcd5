"""Write what peers read: the samples, who has which, and the weights to begin with, exactly as our own side has them."""

import json
import sys
from pathlib import Path

import numpy as np
from session import Session

from fedme.core.data import Arrays, Scaling
from fedme.datasets import Federation


def save_data(federation: Federation, path: Path) -> None:
    """Samples as they are kept in memory, how they are scaled, and the rows of every client and of the test part."""
    source = federation.dataset.source
    if not isinstance(source, Arrays):
        raise TypeError(f"{federation.dataset.name}: samples that are not held as arrays cannot be exported")
    scaling = source.scaling or Scaling()
    rows = [data.train.rows.numpy() for data in federation.clients.values()]
    np.savez(
        path,
        x=source.x.numpy(),
        y=source.labels.numpy(),
        rows=np.concatenate(rows),
        sizes=[len(each) for each in rows],
        test=np.concatenate([data.test.rows.numpy() for data in federation.clients.values()]),
        factor=scaling.factor,
        mean=scaling.mean.numpy(),
        std=scaling.std.numpy(),
        shape=federation.dataset.schema.shape,
    )


def save_weights(session: Session, path: Path) -> None:
    """The global model before the first round."""
    model = session.method.deliver(session.task, session.server, next(iter(session.task.members))).model
    np.savez(path, **{f"w{index}": value.numpy() for index, value in enumerate(model.params.values())})


def main() -> None:
    """Do the job on the command line: a configuration and two paths."""
    job = json.loads(sys.argv[1])
    with Session.of(job["config"]) as session:
        save_data(session.federation, Path(job["data"]))
        save_weights(session, Path(job["weights"]))


if __name__ == "__main__":
    main()
