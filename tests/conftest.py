import importlib.util
import os
import re
import sys
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import settings

from fedme import cli

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
NEED = re.compile(r"needs (?P<what>.+?)(?: \((?P<command>.+)\))?", re.DOTALL)


def pytest_runtest_setup(item):
    """`@pytest.mark.needs("flwr", "ray")` skips a test where one of these packages is missing."""
    wanted = [package for marker in item.iter_markers("needs") for package in marker.args]
    missing = [package for package in dict.fromkeys(wanted) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} ({PACKAGES})")


def pytest_terminal_summary(terminalreporter):
    """One line at the end: how many tests were skipped, and which command would run them."""
    skipped = [(report.longrepr[2], report.when == "collect") for report in terminalreporter.stats.get("skipped", [])]
    if line := skipped_line(skipped):
        terminalreporter.write_line(line)


def skipped_line(skipped):
    """`skipped` are pairs of a reason, such as "needs Chromium (apt-get install chromium)", and whether it skips a file.

    Reasons with the same command are counted together.
    """
    counts, names = defaultdict(Counter), defaultdict(dict)
    for reason, whole_file in skipped:
        reason = reason.removeprefix("Skipped: ")
        need = NEED.fullmatch(reason)
        what, command = (need["what"], need["command"]) if need else (reason, None)
        group = command or (what if need else reason), bool(need)
        counts[group]["test file" if whole_file else "test"] += 1
        names[group] |= dict.fromkeys(what.split(", ") if need else [what])
    parts = []
    for (command, need), count in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])):
        number = " and ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in sorted(count.items()))
        if not need:
            parts.append(f"{number} ({command})")
            continue
        what = ", ".join(sorted(names[command, need], key=str.lower))
        verb = "needs" if count.total() == 1 else "need"
        parts.append(f"{number} {verb} {what}" + (f" ({command})" if command != what else ""))
    return f"Skipped: {'; '.join(parts)}." if parts else ""
