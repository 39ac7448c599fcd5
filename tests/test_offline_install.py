"""A site without a package index: FedMe from a folder of wheels, as docs/deploy.md says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedme_test_deployment import Deployment

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_site_installs_from_a_folder_of_wheels(tmp_path):
    source, wheels, site = tmp_path / "fedme", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "-w", str(wheels), "-c", "constraints.txt", ".[flower]"]
    made = subprocess.run(pip, cwd=source, capture_output=True, text=True, timeout=1800)
    if "No matching distribution found" in made.stderr:
        pytest.skip("needs a package index")
    assert made.returncode == 0, made.stderr

    # At the site: another environment, no index, no settings of pip.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "venv", site / "venv"], check=True, timeout=600)
    install = ["pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), "fedme[flower]"]
    subprocess.run([site / "venv/bin/python", "-m", *install], check=True, env=environment, timeout=1800)
    deployment = Deployment(tmp_path, "a")
    command = [site / "venv/bin/fedme", "deploy", "node", deployment.site("a") / "site.toml", "--check"]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a: mlr, ")
    where = [site / "venv/bin/python", "-c", "import fedme.deployment.flower_site_internals as here; print(here.__file__)"]
    found = subprocess.run(where, env=environment, cwd=site, capture_output=True, text=True, check=True, timeout=600)
    assert found.stdout.startswith(str(site))
