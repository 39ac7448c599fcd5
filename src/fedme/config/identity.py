"""What makes two runs the same: a fingerprint of everything in a configuration that decides the results."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedme.core.typed import build
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.robust_aggregation import Defence

# Tables that came later: as by default they change no fingerprint, so that old results stay valid.
LATER: dict[str, type[Any]] = {"faults": Faults, "defence": Defence, "attack": Attack}


def digest(config: Mapping[str, Any]) -> str:
    """A fingerprint of everything in a configuration that decides the results."""
    deciding = {key: value for key, value in config.items() if key not in ("output", "name", "checkpoint_every", "log")}
    for table, kind in LATER.items():
        if table in deciding and build(kind, deciding[table], table) == kind():
            del deciding[table]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
