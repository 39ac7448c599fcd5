"""The Dockerfile, line by line: what it copies is here, what it installs installs, and what it starts starts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = [line for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def arguments(instruction):
    return [line.removeprefix(instruction + " ") for line in LINES if line.startswith(instruction + " ")]


def test_every_line_is_a_known_instruction():
    assert {line.split()[0] for line in LINES} == {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    (image,) = arguments("FROM")
    assert re.fullmatch(r"python:3\.11-slim", image)  # what pyproject.toml asks for
    assert PROJECT["requires-python"] == ">=3.11"


def test_what_is_copied_is_in_the_repository():
    for words in map(str.split, arguments("COPY")):
        assert words[-1].startswith("/fedme/")
        assert all((ROOT / name).exists() for name in words[:-1])


def test_what_is_copied_is_sent_to_the_builder_and_nothing_else():
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    assert sorted(sent) == sorted(name for words in map(str.split, arguments("COPY")) for name in words[:-1])


def test_the_commands_in_its_head_exist(fedme):
    head = [line.removeprefix("#").strip() for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines()]
    started = [line.split(" fedme ")[1].split() for line in head if line.startswith("docker run")]
    assert started == [["server", "."], ["node", "site.toml"]]
    (submit,) = [line.split(" server fedme ")[1].split() for line in head if line.startswith("docker exec")]
    for words in (["deploy", words[0]] for words in started):
        assert fedme(*words, "--help")[0] == 0
    assert fedme(*submit[:2], "--help")[0] == 0


def test_the_extras_exist_and_it_does_not_run_as_root():
    (install,) = [run for run in arguments("RUN") if run.startswith("pip")]
    extras = re.search(r"/fedme\[(.*)\]", install)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert LINES.index("USER fedme") < LINES.index('ENTRYPOINT ["fedme", "deploy"]')
    assert any("useradd" in run for run in arguments("RUN"))


@pytest.mark.slow
def test_the_copied_files_install_and_start(tmp_path):
    source = tmp_path / "fedme"
    source.mkdir()
    for words in map(str.split, arguments("COPY")):
        for name in words[:-1]:
            ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            (
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
                if (ROOT / name).is_dir()
                else shutil.copy(ROOT / name, source)
            )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "installed"), str(source)]
    subprocess.run(pip, check=True, timeout=600)
    (entry,), (command,) = map(arguments, ("ENTRYPOINT", "CMD"))
    words = json.loads(entry)[1:] + json.loads(command)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    for given in (words, ["list", "presets"], ["data", "show", "digits-fedme"]):
        done = subprocess.run(
            [sys.executable, "-m", "fedme", *given], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    where = subprocess.run(
        [sys.executable, "-c", "import fedme; print(fedme.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(tmp_path / "installed"))
