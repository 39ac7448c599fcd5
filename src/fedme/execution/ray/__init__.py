"""Operations on the processes of a Ray cluster. Only this package and Flower's import Ray.

The environment is set before Ray is imported: no usage statistics. Whoever reaches a Ray process can run code in it, so the
processes that FedMe starts listen on loopback only and ask for a secret that is new in every process of FedMe; Ray reads it
once, and writes none to a file because it is given.
"""

import importlib
import importlib.util
import os
import secrets
from collections.abc import Sequence
from types import ModuleType

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
os.environ.update(ENVIRONMENT)


def keep_ray_private() -> None:
    """Set the environment of Ray processes that are started on this machine. A cluster's own is left as it is."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # every socket on loopback; `_node_ip_address` does not do that
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: on a busy machine a run would wait for its own processes


class EngineError(RuntimeError):
    """An engine in other processes failed, or what runs on it; the message names the client or operation, and the reason."""


def load_module(name: str, extra: str = "ray", packages: Sequence[str] = ("ray",)) -> ModuleType:
    """Import a module of `fedme` that needs packages of an extra; `name` is relative, as in "execution.ray.cluster"."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise EngineError(f"{' and '.join(missing)} not installed; run `pip install 'fedme[{extra}]'`")
    return importlib.import_module(f"fedme.{name}")
