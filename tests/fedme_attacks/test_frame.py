import json
import socket
import ssl
import sys
import types

import pytest
from rich.console import Console

from fedme.deployment import provisioning
from fedme.deployment.operator_folder import Settings
from fedme_attacks import frame
from fedme_attacks.__main__ import main
from fedme_attacks.federation import Loopback
from fedme_attacks.hostile_proxy import HostileProxy


@pytest.fixture
def part(monkeypatch):
    """A module of attacks: one that fails to harm, one that succeeds, one that breaks down."""
    module = types.ModuleType("fedme_attacks.trial")

    @frame.attack(by="server", promise="nothing happens")
    def a_harmless_one(federation):
        return "refused | by name"

    @frame.attack(by="site", promise="nothing happens")
    def a_harmful_one(federation):
        assert not federation.scratch("harm").exists(), "it wrote a folder"
        return "refused"

    @frame.attack(by="outsider", promise="nothing happens")
    def one_that_breaks_down(federation):
        raise ConnectionError("nobody there")

    module.first, module.second, module.third = a_harmless_one, a_harmful_one, one_that_breaks_down
    monkeypatch.setitem(sys.modules, "fedme_attacks.trial", module)
    return "trial"


def test_every_listed_part_has_attacks_with_different_names():
    found = [attack for part in frame.PARTS for attack in frame.attacks(part)]
    assert all(frame.attacks(part) for part in frame.PARTS)
    assert len({attack.name for attack in found}) == len(found)


def test_the_table_says_what_happened_and_what_was_broken(part, tmp_path, capsys):
    with Loopback(tmp_path) as federation:
        table = frame.results([part], federation, Console(quiet=True), tmp_path / "out")
    assert [row["held"] for row in table["rows"]] == [True, False, False]
    assert frame.failed(table) == ["a harmful one", "one that breaks down"]
    text = (tmp_path / "out" / "attacks.md").read_text()
    assert "| a harmless one | server | nothing happens | refused \\| by name | yes |" in text
    assert "| one that breaks down | outsider | nothing happens | ConnectionError: nobody there | **no** |" in text
    assert json.loads((tmp_path / "out" / "attacks.json").read_text()) == table


def test_an_empty_table_has_not_held(tmp_path):
    with Loopback(tmp_path) as federation:
        assert frame.failed(frame.results([], federation, Console(quiet=True)))


def test_the_exit_code_says_whether_a_promise_was_broken(part, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(frame, "PARTS", (part,))
    monkeypatch.setattr(sys, "argv", ["attacks", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == "broken: a harmful one\nbroken: one that breaks down"


def test_a_part_nobody_knows_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attacks", "nonsense"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "no part is called nonsense" in capsys.readouterr().err


def test_the_lying_server_starts(tmp_path):
    provisioning.write(tmp_path / "federation", None, ["a"], Settings())
    with HostileProxy("127.0.0.1:1", tmp_path / "federation" / "server", {}) as proxy:
        trust = ssl.create_default_context(cafile=tmp_path / "federation" / "server" / "ca.crt")
        with socket.create_connection(("127.0.0.1", proxy.port)) as line, trust.wrap_socket(line, server_hostname="127.0.0.1"):
            assert proxy.requests == []
