"""A name for everything that decides what clients can learn alone; runs with the same name share what was computed.

Training alone does not depend on the method. So its results are kept in a folder beside the run directories: the models of
`local_baseline`, and the architectures that "best-local" chooses (`chosen_architectures`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from fedme.artifacts import local_models
from fedme.config.experiment import Experiment
from fedme.config.identity import source_digests
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.model import Arch
from fedme.datasets.federated_dataset import Federation
from fedme.learning.training_settings import Training

FOLDER = ".local"  # beside run directories


def local_training_name(
    experiment: Experiment,
    federation: Federation,
    candidates: Mapping[ClientId, Sequence[Arch]],
    rounds: Mapping[ClientId, int],
    training: Training,
) -> str:
    """The name for these samples, architectures, training settings and seed."""
    settings = experiment.settings
    networks = {arch.name: _fingerprint(arch) for archs in candidates.values() for arch in archs}
    deciding = {
        "seed": settings.seed,
        "train": {key: value for key, value in asdict(training).items() if key != "cohort"},
        "update_bn": settings.models.update_bn,
        "dtype": settings.engine.dtype,
        "sources": source_digests(experiment.plain() | {"method": {}}),
        "networks": networks,
        "candidates": {client: [arch.name for arch in archs] for client, archs in candidates.items()},
        "rounds": dict(rounds),
        "samples": {
            client: [local_models.split_fingerprint(split) for split in (data.train, data.val, data.test)]
            for client, data in federation.clients.items()
            if client in candidates
        },
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


def _fingerprint(arch: Arch) -> str:
    """Of the network and its first weights: two networks given as objects may have the same name."""
    module = arch.build(Key(0))
    digest = hashlib.sha256(str(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.detach().double().numpy().tobytes())
    return digest.hexdigest()
