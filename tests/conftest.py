import importlib.util
import os
import re
import sys
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import settings

# Workers of pytest-xdist inherit the size of a terminal, which readline puts into the environment. Tests are to see one width.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)

from fedme import cli  # noqa: E402  (it looks at the width)

# The same examples every time, so that a red run can be repeated; FEDME_EXPLORE=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("exploring", deadline=None)
settings.load_profile("exploring" if os.environ.get("FEDME_EXPLORE") else "repeatable")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread only costs time."""
    torch.set_num_threads(1)


@pytest.fixture
def fedme(monkeypatch, capsys):
    """Give a command as a person would: its exit code, what it printed, and what it said beside."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedme", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return call


PACKAGES = "pip install -c constraints.txt -e '.[dev-full]'"
# Files that cannot be imported without a package that the extra `dev` does not have.
FILES = {
    "deployment/*.py": "flwr",
    "fedme_attacks/*.py": "flwr",
    "federation/test_flower_*.py": "flwr",
    "execution/test_ray_*.py": "ray",
    "running/test_ray_*.py": "ray",
    "fedme_reliability/test_fuzz.py": "flwr",
    "fedme_reliability/test_privacy.py": "dp_accounting",
    "learning/test_accountant.py": "dp_accounting",
    "results/test_loggers.py": "mlflow",
    "test_site.py": "mkdocs",
}
NEED = re.compile(r"(?:\S+\.py )?needs (?P<what>.+?)(?: \((?P<command>.+)\))?", re.DOTALL)


def installed(package):
    """Whether a package can be imported; a folder of tests may have the same name, as `datasets`."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class NotImportable(pytest.Module):
    """A file of tests that is skipped for lack of a package."""

    def collect(self):
        # xdist counts equal reasons of different files once: the name of the file keeps them apart.
        pytest.skip(f"{self.path.name} needs {self.package} ({PACKAGES})", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip files whose package is missing."""
    for pattern, package in FILES.items():
        if module_path.match(f"tests/{pattern}") and not installed(package):
            module = NotImportable.from_parent(parent, path=module_path)
            module.package = package
            return module
    return None


def pytest_runtest_setup(item):
    """`@pytest.mark.needs("flwr", "ray")` skips a test where one of these packages is missing."""
    wanted = [package for marker in item.iter_markers("needs") for package in marker.args]
    if missing := [package for package in dict.fromkeys(wanted) if not installed(package)]:
        pytest.skip(f"needs {', '.join(missing)} ({PACKAGES})")


def pytest_terminal_summary(terminalreporter):
    """One line at the end: how many tests were skipped, and which command would run them."""
    skipped = [(report.longrepr[2], report.when == "collect") for report in terminalreporter.stats.get("skipped", [])]
    if line := skipped_line(skipped):
        terminalreporter.write_line(line)


def skipped_line(skipped):
    """What was skipped, grouped by the command that would change it.

    `skipped` has pairs of a reason, such as "needs Chromium (apt-get install chromium)", and whether it skips a whole file.
    """
    counts, names = defaultdict(Counter), defaultdict(set)
    for text, whole_file in skipped:
        reason = text.removeprefix("Skipped: ")
        need = NEED.fullmatch(reason)
        what, command = need.group("what", "command") if need else ("", reason)
        group = command or what
        counts[group]["test file" if whole_file else "test"] += 1
        names[group].update(what.split(", ") if command else [what])
    parts = []
    for group, count in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])):
        number = " and ".join(f"{n} {noun}{'s' if n > 1 else ''}" for noun, n in sorted(count.items()))
        what = ", ".join(sorted(names[group], key=str.lower))
        verb = "needs" if count.total() == 1 else "need"
        parts.append(number + (f" {verb} {what}" if what else "") + (f" ({group})" if group != what else ""))
    return f"Skipped: {'; '.join(parts)}." if parts else ""
