"""Identity of runs: a hash of all settings that affect the results."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedme.core.typed import build
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.robust_aggregation import Defence

# Tables added later. With default values they do not change the hash, so that older results stay valid.
LATER: dict[str, type[Any]] = {"faults": Faults, "defence": Defence, "attack": Attack}


def digest(config: Mapping[str, Any]) -> str:
    """A SHA-256 hash of the settings in a configuration that affect the results."""
    relevant = {key: value for key, value in config.items() if key not in ("output", "name", "checkpoint_every", "log")}
    for table, options in LATER.items():
        if table in relevant and build(options, relevant[table], table) == options():
            del relevant[table]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
