"""The systemd unit of docs/deploy.md: systemd reads it, and a program that ends is always started again."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deploy.md"
UNIT = re.search(r"^```ini title=fedme-node.service\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
START_LIMIT = 5, 10.0  # systemd gives up after so many starts within so many seconds (DefaultStartLimitBurst, ...IntervalSec)


def test_a_site_is_started_again_however_often_it_ends():
    parser = configparser.ConfigParser()
    parser.optionxform = str
    parser.read_string(UNIT)
    service = parser["Service"]
    starts, seconds = START_LIMIT
    assert service["Restart"] == "always"
    assert (starts - 1) * float(service["RestartSec"]) > seconds
    assert service["ReadWritePaths"] == service["WorkingDirectory"]
    assert service["User"] != "root"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    file = tmp_path / "fedme-node.service"
    file.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
