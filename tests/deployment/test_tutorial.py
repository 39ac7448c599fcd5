"""Run the tutorial of docs/deploy.md as written, in a shell."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script() -> str:
    lines = ["set -e"]
    for language, title, text in BLOCK.findall(PAGE.read_text()):
        if language in ("toml", "python"):
            lines.append(f"cat > {shlex.quote(title)} <<'THE END'\n{text}THE END")
        lines += [f"python {shlex.quote(title)}"] if language == "python" else [text] if language == "sh" else []
    return "\n".join([*lines, "kill $(jobs -p) || true", "wait || true"])


@pytest.mark.deploy
def test_three_sites_on_one_laptop(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (tmp_path / "output").open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script()], cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code = shell.wait(1500)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGTERM)
    text = (tmp_path / "output").read_text()
    assert code == 0, text
    run = tmp_path / "federation" / "runs" / "digits"
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2
    assert "south: connected to 127.0.0.1:19443" in text
    assert "node: running" in text
    for name in ("north", "south", "east"):
        (card,) = (tmp_path / "federation" / "sites" / name).glob("state/runs/*/clients/*/model.json")
        assert json.loads(card.read_text())["client"] == name


def test_every_command_of_the_tutorial_is_ours():
    commands = [line for language, _, text in BLOCK.findall(PAGE.read_text()) if language == "sh" for line in text.splitlines()]
    assert len(commands) > 8
    assert all(line.startswith(("fedme ", "for site in north south east; do fedme ")) for line in commands)


def test_the_tutorial_has_seven_commands():
    text = PAGE.read_text()
    tutorial = text[text.index("## Three sites on one laptop") : text.index("What is there now:")]
    commands = [line for language, _, block in BLOCK.findall(tutorial) if language == "sh" for line in block.splitlines()]
    assert len(commands) + 1 == 7  # and `python data.py`
