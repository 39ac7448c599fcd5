"""Clusters of models with similar outputs: k-means over the outputs of every model for the same unlabeled inputs."""

import warnings
from collections.abc import Mapping
from typing import Literal

import numpy as np
from torch import Tensor

from fedme.core.data import ClientId, Split
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import Computation, in_parallel, predict
from fedme.core.task_types import task_loss


def clustered(
    models: Mapping[ClientId, Model], unlabeled: Split | None, clusters: int, on: Literal["logits", "softmax"], key: Key
) -> Computation[dict[ClientId, int]]:
    """The cluster of every client's model. Without unlabeled data, or with one cluster, all are in cluster 0."""
    if clusters == 1 or unlabeled is None or not models:
        return dict.fromkeys(models, 0)
    outputs = yield from in_parallel([predict(model, unlabeled) for model in models.values()])
    outputs = [task_loss(unlabeled.y).mean(logits) for logits in outputs] if on == "softmax" else outputs
    return dict(zip(models, similar(outputs, clusters, key), strict=True))


def similar(outputs: list[Tensor], clusters: int, key: Key) -> list[int]:
    """The cluster of each model. Lloyd's algorithm from distinct random models; an empty cluster is re-seeded far away."""
    from sklearn.cluster import KMeans  # slow to import, so only where it is needed
    from sklearn.exceptions import ConvergenceWarning

    points = np.stack([output.flatten().double().numpy() for output in outputs])
    # Diverged models have no meaningful distance: zeros keep them together and the others apart.
    points = np.nan_to_num(points, nan=0.0, posinf=0.0, neginf=0.0)
    clusters = min(clusters, len(points))
    if clusters == 1:
        return [0] * len(points)
    kmeans = KMeans(clusters, init="random", n_init=1, max_iter=300, tol=0, random_state=key.integer() % 2**32)
    with warnings.catch_warnings():
        # Equal models (a model adopted by several clients) may leave fewer distinct points than clusters: that is fine.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return [int(label) for label in kmeans.fit(points).labels_]
