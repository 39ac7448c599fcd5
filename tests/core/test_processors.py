"""Processors that are somebody else's do not count."""

import os
import subprocess
import sys

import pytest

from fedme.core.processors import processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_only_those_that_may_be_used():
    assert processors() == len(os.sched_getaffinity(0)) <= os.cpu_count()
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from fedme.core.processors import processors; print(processors())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "1\n"
