"""A site runs FedMe's own app and nothing else, and only with a Flower whose insides are known."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from types import SimpleNamespace

import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedme import __version__
from fedme.deployment import flower_site_internals as internals
from fedme.deployment.bundle import APP_ID, bundle, bundle_hash, write_app
from fedme.deployment.node import command, environment
from fedme.deployment.operator_folder import Settings
from fedme.deployment.provisioning import write
from fedme.deployment.site_settings import Site


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_the_bundle_is_the_one_that_flower_builds_from_the_app(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "other place"):
        write_app(folder)
        assert build_fab_from_disk(folder) == bundle()
    assert hashlib.sha256(bundle()).hexdigest() == bundle_hash()
    with zipfile.ZipFile(io.BytesIO(bundle())) as file:
        assert file.namelist() == ["pyproject.toml", ".info/CONTENT"]
        assert f'version = "{__version__}"' in file.read("pyproject.toml").decode()


def test_the_bundle_depends_on_the_version_only(monkeypatch):
    # Written down once: another system, time, folder or library must give the same bytes.
    assert bundle_hash("0.1.0") == "65445db5a0b4486cb7e034cc3ca1e3dd8bc3abd7449b1c674001fe8b57818210"
    monkeypatch.setattr(sys, "platform", "win32")
    assert bundle_hash("0.1.0") == "65445db5a0b4486cb7e034cc3ca1e3dd8bc3abd7449b1c674001fe8b57818210"
    assert bundle_hash("0.1.0") != bundle_hash("0.1.1")


@pytest.mark.parametrize("program", internals.READ)
def test_the_code_of_flower_that_is_relied_on_is_the_one_that_was_read(program):
    """If this fails, Flower has changed: read these functions again, then correct the module and its hashes."""
    internals.require_known_flower(program)


def test_a_flower_that_differs_is_refused(monkeypatch):
    read = internals.READ["client"]["flwr.supernode.runtime.run_clientapp"]
    monkeypatch.setitem(read, "run_clientapp", "0" * 64)
    with pytest.raises(internals.UnknownFlowerError, match=r"differs in flwr.supernode.runtime.run_clientapp.run_clientapp"):
        internals.require_known_flower("client")
    monkeypatch.setitem(read, "gone", "0" * 64)
    with pytest.raises(internals.UnknownFlowerError, match=r"run_clientapp.gone"):
        internals.require_known_flower("client")


def run_info(**changed):
    run = Run.create_empty(5)
    given = {"fab_id": APP_ID, "fab_version": __version__, "fab_hash": bundle_hash(), **changed}
    for name, value in given.items():
        setattr(run, name, value)
    return run


def test_a_run_of_the_installed_version_is_accepted():
    assert internals.refusal(run_info()) is None


@pytest.mark.parametrize("kind", [kind for kind in TaskType if kind != TaskType.SERVER_APP] + ["", "new-kind"])
def test_a_run_of_another_kind_is_refused(kind):
    assert "runs client apps of FedMe only" in internals.refusal(run_info(primary_task_type=str(kind)))


def test_another_bundle_is_refused_and_both_versions_are_named():
    text = internals.refusal(run_info(fab_version="9.9.9", fab_hash=bundle_hash("9.9.9")))
    assert (
        f"its own FedMe {__version__}, but the server sent fedme/fedme-run 9.9.9 with SHA-256 {bundle_hash('9.9.9')[:16]}"
        in text
    )
    for changed in ({"fab_hash": bundle_hash()[:8]}, {"fab_hash": bundle_hash().upper()}, {"fab_id": "x/fedme-run"}):
        assert internals.refusal(run_info(**changed))
    text = internals.refusal(run_info(fab_version="\x1b[31m<b>" + "x" * 10**6))
    assert "(unreadable)" in text
    assert len(text) < 300
    assert text.isprintable()


class Supernode(SimpleNamespace):
    """Flower's module: what would be called, and what was inserted."""

    def __init__(self):
        super().__init__(pulled=[], replies=[], log=lambda *_: None)

    def _pull_and_store_message(self, **given):
        message, _ = given["receive"]()
        self.pulled.append((message, given["get_run"](5), given["get_fab"]("any", 5), given["trusted_entities"]))
        return 5

    def _insert_message(self, reply, state, store):
        self.replies.append(reply)


def deliver(run, known=None):
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__.update(_run_id=5, _message_id="m", _src_node_id=1)
    asked, supernode = [], Supernode()

    def get_run(run_id):
        asked.append(run_id)
        return run if len(asked) == 1 else run_info(primary_task_type=TaskType.AGENT_APP)  # another answer the second time

    def get_fab(*_):
        raise AssertionError("the server's bundle was requested")

    state = SimpleNamespace(get_run=lambda run_id: known)
    pull = internals.only_own_app(supernode, received := threading.Event())
    given = {"receive": lambda: (message, None), "get_run": get_run, "get_fab": get_fab, "trusted_entities": None}
    result = pull(state=state, object_store=None, **given)
    assert received.is_set() == bool(supernode.pulled)
    return result, supernode, asked


@pytest.fixture
def identity():
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # Flower's programs set these at their start


def test_the_node_uses_its_own_bundle_and_asks_once(identity):
    run = run_info()
    result, supernode, asked = deliver(run)
    assert (result, asked, supernode.replies) == (5, [5], [])
    ((_, used, fab, _),) = supernode.pulled
    assert used is run
    assert (fab.hash_str, fab.content) == (bundle_hash(), bundle())


def test_a_refused_run_gets_an_error_reply_before_anything_is_fetched(identity):
    result, supernode, _ = deliver(run_info(fab_hash="0" * 64))
    assert (result, supernode.pulled) == (5, [])
    (reply,) = supernode.replies
    assert reply.error.code == 7
    assert "but the server sent" in reply.error.reason


def test_the_executor_starts_client_apps_only(monkeypatch):
    started = []
    monkeypatch.setattr(internals, "_start_program", lambda words, secret: started.append((words, secret)))
    executor = internals.ClientAppExecutor(threading.Event())
    assert executor.get_eligible_capacity(set(TaskType)) == ({TaskType.CLIENT_APP}, set())
    for kind in TaskType:
        spec = SimpleNamespace(task_type=kind, token="t", runtime_api_address="127.0.0.1:1")
        assert (executor.launch(spec).status == "accepted") == (kind == TaskType.CLIENT_APP)
    assert [words[0] for words, _ in started] == ["client"]


def test_the_executor_asks_for_tasks_when_there_is_a_message_and_now_and_then(monkeypatch):
    received = threading.Event()
    executor = internals.ClientAppExecutor(received)
    monkeypatch.setattr(internals, "LONGEST_REST", 60.0)
    received.set()
    executor.reconcile()
    assert not received.is_set()
    monkeypatch.setattr(internals, "LONGEST_REST", 0.01)
    executor.reconcile()


def test_programs_are_started_by_the_interpreter_and_secrets_are_not_on_the_command_line(monkeypatch):
    started = []
    popen = subprocess.Popen

    def spy(words, **options):
        started.append(words)
        return popen([sys.executable, "-c", "import sys; print(sys.stdin.read())"], stdout=subprocess.PIPE, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    monkeypatch.setenv("PATH", "/nowhere")
    process = internals._start_program(["client"], "the-secret")
    assert process.stdout.read() == b"the-secret\n"
    process.wait()
    process.stdout.close()
    (words,) = started
    assert words[0] == sys.executable
    assert os.path.isabs(words[0])
    assert not any("the-secret" in word for word in words)


def test_a_node_has_neither_pytorch_nor_a_database_in_memory():
    code = (
        "import sys, fedme.deployment.flower_site_internals as internals\n"
        "internals.leave_out_database()\n"
        "internals.require_known_flower('node')\n"
        "import flwr.supernode.main\n"
        "print({'torch', 'sqlalchemy', 'alembic'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_node_ends_when_one_of_its_threads_fails():
    # Flower's heartbeat ended for good after an answer it did not expect, and the site waited for messages for ever.
    code = (
        "import threading, time, fedme.deployment.flower_site_internals as internals\n"
        "internals.end_with_any_thread()\n"
        "threading.Thread(target=lambda: {}['heartbeat'], daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert "KeyError: 'heartbeat'" in ended.stderr


def test_unpacked_apps_of_earlier_starts_are_deleted(tmp_path, monkeypatch):
    (tmp_path / "apps" / "fedme.fedme-run.1.0.0.12345678" / "fedme").mkdir(parents=True)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for module in ("flwr.supernode.cli.flower_supernode", "flwr.supernode.start_client_internal"):
        stub = SimpleNamespace(
            _parse_supernode_lifespan_config=None,
            start_client_internal=None,
            _pull_and_store_message=lambda **_: None,
            flower_supernode=lambda: None,
        )
        monkeypatch.setitem(sys.modules, module, stub)
    internals.node()
    assert not (tmp_path / "apps").exists()


def test_a_site_starts_this_program(tmp_path):
    write(tmp_path, None, ["a"], Settings())
    site = Site.read(tmp_path / "sites" / "a" / "site.toml")
    assert command(site)[:4] == [sys.executable, "-m", "fedme.deployment.flower_site_internals", "node"]
    assert environment(site)["FLWR_HOME"] == str(site.state / "flwr")
