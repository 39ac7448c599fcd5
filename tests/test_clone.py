"""The README's commands in a used clone: leftovers, a space in the path, an ordinary user, no compiler, no browser."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src", "tests", "benchmarks", "website", "tools")
# What the demo, the documentation and earlier builds leave in a clone; none of it is in the repository.
LEFTOVERS = {
    "runs/digits-fedme/config.toml": "damaged",
    "runs/__init__.py": "import sys\nimport os\n",
    "site/index.html": "<title>old</title>",
    "site/__init__.py": "",
    "build/lib/fedme/__init__.py": "raise RuntimeError('an old build is imported')\n",
    "dist/fedme-0.0.1.tar.gz": "",
    ".pytest_cache/v/cache/lastfailed": "{}",
}
# All that make, pip and the tests may find on PATH: neither a compiler nor a browser.
COMMANDS = (
    *("sh", "bash", "env", "make", "git", "ps"),
    *("cat", "chmod", "cp", "date", "dirname", "echo", "false", "grep", "head", "id", "ln", "ls", "mkdir", "mktemp", "mv"),
    *("readlink", "rm", "rmdir", "sed", "sleep", "sort", "tail", "tee", "touch", "tr", "true", "uname", "wc"),
)
ORDINARY = 65534  # nobody


def copied(folder: Path) -> Path:
    """A copy of what is in the repository, changed files and new ones too, with leftovers."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs a git clone")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name, text in LEFTOVERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def imported_names():
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                continue  # environments of benchmarks
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from (alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module.split(".")[0]


def test_folders_in_the_root_do_not_change_what_the_linter_says(tmp_path):
    # A folder of the name of an imported module made ruff take that module for one of ours, and sort its import elsewhere.
    clone = copied(tmp_path / "a clone")
    for name in {"runs", "site", "build", *imported_names()} - {"tests", "benchmarks"}:
        (clone / name).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", *SOURCES]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pinned_packages_accept_the_oldest_python():
    # A pin that needs a later 3.11 made pip search through all versions of other packages for many minutes.
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().split()}
    needs = {
        found.name: python
        for found in distributions()
        if canonicalize_name(found.name) in pinned and (python := found.metadata.get("Requires-Python"))
    }
    assert len(needs) > 20
    assert not {name: python for name, python in needs.items() if not SpecifierSet(python).contains("3.11.0")}


def as_user():
    """Arguments of subprocess that give up root, if the tests run as root."""
    return {"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if os.geteuid() == 0 else {}


def interpreter() -> Path:
    """A Python that the ordinary user can start; that of root may be in root's home."""
    suitable = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    for candidate in (
        os.path.realpath(sys.executable),
        *(shutil.which(name, path=os.defpath) for name in ("python3", "python3.12")),
    ):
        try:
            if (
                candidate
                and subprocess.run([candidate, "-c", suitable], cwd="/", capture_output=True, **as_user()).returncode == 0
            ):
                return Path(candidate)
        except PermissionError:
            continue
    pytest.skip("needs a Python 3.11 with venv that an ordinary user can start")


def pip_settings() -> dict[str, str]:
    """The configuration of pip of the present user, as variables: another user cannot read its file."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.startswith(("global.", "install.")):
            settings["PIP_" + key.partition(".")[2].upper().replace("-", "_")] = ast.literal_eval(value)
    return settings | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def pip_cache() -> Path | None:
    """The wheels that pip has downloaded before, if there are any."""
    asked = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True)
    folder = Path(asked.stdout.strip())
    return folder if asked.returncode == 0 and folder.is_dir() else None


@pytest.fixture
def used_clone():
    """A directory with a space in its name that belongs to an ordinary user, and the environment of that user."""
    place = Path(tempfile.mkdtemp(prefix="fedme used clone "))
    try:
        clone = copied(place / "my clone")
        commands, home, temporary = (place / name for name in ("commands", "home", "tmp"))
        for folder in (commands, home, temporary):
            folder.mkdir()
        for name in COMMANDS:
            if found := shutil.which(name):
                (commands / name).symlink_to(found)
        (commands / "python3").symlink_to(interpreter())
        if cache := pip_cache():
            shutil.copytree(cache, home / ".cache" / "pip")
        place.chmod(0o755)
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, ORDINARY, ORDINARY, follow_symlinks=False)
        variables = {
            "PATH": commands,
            "HOME": home,
            "TMPDIR": temporary,
            "LANG": "C.UTF-8",
            "USER": "nobody",
            "LOGNAME": "nobody",
        }
        yield clone, {name: str(value) for name, value in variables.items()} | pip_settings()
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
def test_the_commands_of_the_readme_in_a_used_clone(used_clone, capsys):
    clone, variables = used_clone
    runs = []
    for command in ("demo", "test", "demo", "test"):
        start = time.monotonic()
        log = clone.parent / f"{len(runs)}-{command}.log"
        with log.open("w") as file:
            done = subprocess.run(
                ["make", command], cwd=clone, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **as_user()
            )
        with capsys.disabled():
            print(f"\nused clone: make {command}: {time.monotonic() - start:.0f} s", end="", flush=True)
        text = log.read_text(errors="replace")
        assert done.returncode == 0, f"make {command}, after {runs}:\n{text[-20000:]}"
        runs.append(command)
        if command == "test":
            skipped = next(line for line in text.splitlines() if line.startswith("Skipped: "))
            needs = skipped.split(";")
            assert any("Chromium" in need and "(apt-get install chromium)" in need for need in needs), skipped
            assert any("compiled code" in need and "(apt-get install g++ && make clean" in need for need in needs), skipped
        else:
            assert "Gained: " in text
            assert "Next: " in text
    assert json.loads((clone / "runs" / "digits-fedme-3" / "summary.json").read_text())["method"] == "fedme"
