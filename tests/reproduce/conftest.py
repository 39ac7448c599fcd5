import sys

import pytest

from fedme import cli


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """Where runs at smoke scale are, shared by all tests: most results share runs."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture
def fedme(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedme", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return call
