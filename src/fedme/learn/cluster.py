"""Groups of models with similar outputs: k-means over what each model answers to the same unlabeled inputs."""

import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from fedme.core.key import Key


def similar(outputs: list[Tensor], clusters: int, key: Key) -> list[int]:
    """The cluster of each model. Lloyd's algorithm from distinct random models; an empty cluster is re-seeded far away."""
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
