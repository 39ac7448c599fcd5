"""The Flower app of an installed FedMe: its version and two import paths, no code.

A site runs no other app. Server and site build the same bytes: they depend on FedMe's version and on nothing else, so that
their SHA-256 tells whether both have the same version.
"""

import hashlib
import io
import zipfile
from pathlib import Path

from fedme import __version__

APP_ID = "fedme/fedme-run"  # publisher and name
PYPROJECT = "pyproject.toml"
DATE = (2024, 10, 1, 0, 0, 0)  # that Flower gives every file of a bundle
UNIX = 3  # the system that Flower's server runs on


def pyproject(version: str = __version__) -> str:
    """The only file of the app, in the form that Flower writes it into a bundle."""
    return f"""\
[project]
name = "fedme-run"
version = "{version}"
description = "Starts the installed FedMe; this app contains no code"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedme"

[tool.flwr.app.components]
serverapp = "fedme.deployment.server_app:app"
clientapp = "fedme.deployment.site_app:app"

[tool.flwr.app.config]
run = ""
"""


def write_app(folder: Path) -> None:
    """Write the app, from which `flwr run` builds the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PYPROJECT).write_text(pyproject(), encoding="utf-8")


def bundle(version: str = __version__) -> bytes:
    """The bundle that `flwr run` builds from the app."""
    content = pyproject(version).encode()
    manifest = f"{PYPROJECT},{hashlib.sha256(content).hexdigest()},{len(content) * 8}"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in ((PYPROJECT, content), (".info/CONTENT", manifest.encode())):
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system = UNIX
            file.writestr(entry, text)
    return archive.getvalue()


def bundle_hash(version: str = __version__) -> str:
    """The SHA-256 of the bundle, as Flower writes it."""
    return hashlib.sha256(bundle(version)).hexdigest()
