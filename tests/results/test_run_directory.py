"""Run directories of other versions, and the source of user-defined code behind a run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from fedme import __version__
from fedme.config.experiment import load
from fedme.config.identity import digest, source_digests
from fedme.core.atomic_files import RunError
from fedme.core.method import TaskError
from fedme.results import summary
from fedme.results.run_directory import FORMAT, read_environment, require_readable, version_note
from fedme.running import run
from fedme_test_runs import TINY, Killed, Watching, do, identical

NETWORK = """
from torch import nn

def width():
    return {width}

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width()), nn.Linear(width(), classes))

    def forward(self, x):
        return self.layers(x)
"""
METHOD = """
from dataclasses import dataclass
from fedme.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    factor: float = {factor}
"""


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in ("user_nets", "user_method"):
        sys.modules.pop(name, None)


def write(name, text):
    """A module that the next import reads."""
    Path(f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()


def config(*words):
    return load("digits-fedavg", list(words))[0].plain()


def test_sources_are_those_of_user_defined_code():
    assert source_digests(config("models.pool=['mlr']")) == {}
    write("user_nets", NETWORK.format(width=4))
    write("user_method", METHOD.format(factor=1.0))
    table = '[{name = "user_nets:Net"}, "mlr"]'
    both = source_digests(config("method.name=user_method:Mine", f"models.pool={table}"))
    assert both.keys() == {"user_nets", "user_method"}  # FedAvg, the base class, belongs to the library
    write("user_nets", NETWORK.format(width=5))
    now = source_digests(config("method.name=user_method:Mine", f"models.pool={table}"))
    assert now["user_method"] == both["user_method"]
    assert now["user_nets"] != both["user_nets"]
    plain = config("models.pool=['mlr']")
    assert digest(plain, {}) == digest(plain)
    assert digest(plain, now) != digest(plain, both)


def test_a_base_class_in_another_file_counts():
    write("user_nets", NETWORK.format(width=4))
    write("user_method", "import user_nets\n\nclass Wide(user_nets.Net):\n    pass\n")
    assert source_digests(config("models.shared=user_method:Wide")).keys() == {"user_nets", "user_method"}


def test_what_cannot_be_imported_is_left_to_the_run():
    assert source_digests(config("models.shared=nowhere:Net")) == {}


@pytest.mark.parametrize(
    ("module", "before", "after", "words"),
    [
        ("user_nets", NETWORK.format(width=4), NETWORK.format(width=13), ["models.pool=['user_nets:Net']"]),
        ("user_method", METHOD.format(factor=1.0), METHOD.format(factor=22.0), ["method.name=user_method:Mine"]),
    ],
)
def test_a_run_whose_code_changed_is_not_resumed(module, before, after, words, tmp_path):
    write(module, before)
    with pytest.raises(Killed):
        do(tmp_path / "a", *words, "method.name=fedavg", *words, fuse=40)
    write(module, after)
    with pytest.raises(RunError, match=rf"{module}\.py changed after the run began.*restore the file, or start a new run"):
        run.resume(tmp_path / "a", Watching(), imports=True)
    write(module, before)
    run.resume(tmp_path / "a", Watching(), imports=True)
    do(tmp_path / "b", "method.name=fedavg", *words)
    assert identical(tmp_path / "a", tmp_path / "b")
    assert summary.read(tmp_path / "a")["sources"].keys() == {module}
    write(module, after)
    with pytest.raises(RunError, match="changed after the run began"):  # old numbers are not those of the new code
        run.resume(tmp_path / "a", Watching(), imports=True)
    assert summary.verified_config(tmp_path / "a", summary.read(tmp_path / "a"))  # they can still be shown


def test_seeds_of_different_code_are_not_one_family(tmp_path):
    for seed, factor in ((0, 1.0), (1, 1.0), (2, 22.0)):
        write("user_method", METHOD.format(factor=factor))
        do(tmp_path / str(seed), "method.name=user_method:Mine", "method.factor=1.0", f"seed={seed}", "rounds=1")
    lines = summary.compare([tmp_path / "0", tmp_path / "1", tmp_path / "2"])
    assert {line.seeds for line in lines if line.model == "personal"} == {(0, 1), (2,)}


def test_a_sweep_runs_changed_code_again(fedme, tmp_path):
    write("user_nets", NETWORK.format(width=4))
    words = ["sweep", "digits-fedavg", *TINY, "rounds=1", "models.assign=round-robin", "models.pool=['user_nets:Net']"]
    words += ["--over", "train.lr=0.1,0.5", "-q"]
    assert fedme(*words)[0] == 0
    folder = tmp_path / "runs/sweep-digits-fedavg/train.lr=0.1-s0"
    before = (folder / summary.NAME).read_text()
    assert "changed" not in fedme(*words)[2]
    write("user_nets", NETWORK.format(width=13))
    code, _, err = fedme(*words)
    assert code == 0
    assert err.count("user_nets.py changed since the last run, so it is run again") == 2
    assert (folder / summary.NAME).read_text() != before
    assert (folder.with_name(f"{folder.name}.old1") / summary.NAME).read_text() == before
    assert "changed" not in fedme(*words)[2]


def test_an_architecture_that_a_method_resolves_is_resumed(tmp_path):
    write("user_nets", NETWORK.format(width=4))
    write("user_method", OWN_ARCHITECTURE.format(arch='task.resolve("dnn-7", len(task.members[me].labels))'))
    do(tmp_path / "a", "method.name=user_method:Mine")
    with pytest.raises(Killed):
        do(tmp_path / "b", "method.name=user_method:Mine", fuse=40)
    assert "dnn-7" in json.loads((tmp_path / "b/checkpoint.json").read_text())["archs"]
    run.resume(tmp_path / "b", Watching(), imports=True)
    assert identical(tmp_path / "a", tmp_path / "b")


def test_an_architecture_that_a_method_makes_is_refused_when_it_is_saved(tmp_path):
    write("user_nets", NETWORK.format(width=4))
    write("user_method", OWN_ARCHITECTURE.format(arch="Arch(user_nets.Net, classes=10)"))
    wanted = (
        r"method 'user_method:Mine': the state of client 0 holds the architecture 'user_nets:Net.*get it from task\.resolve"
    )
    with pytest.raises(TaskError, match=wanted):
        do(tmp_path / "a", "method.name=user_method:Mine")


def test_a_method_cannot_import_what_the_configuration_does_not_name(tmp_path):
    write("user_nets", NETWORK.format(width=4))
    write("user_method", OWN_ARCHITECTURE.format(arch='task.resolve("user_nets:Net", 10)'))
    with pytest.raises(ValueError, match="allowed only in a local configuration"):
        do(tmp_path / "a", "method.name=user_method:Mine")
    do(tmp_path / "b", "method.name=user_method:Mine", "models.pool=['user_nets:Net']")


OWN_ARCHITECTURE = """
from dataclasses import dataclass
import user_nets
from fedme.core.model import Arch, Model
from fedme.methods.local import Local, State

@dataclass(frozen=True)
class Mine(Local):
    def init_client(self, task, me, data, key):
        return State(Model.init({arch}, key.at("client", me), task.dtype), {{}})
        yield
"""


def old_form(folder, *changes):
    """The directory as an earlier version wrote it."""
    do(folder, "rounds=1")
    text = (folder / "config.toml").read_text()
    for new, old in changes:
        assert new in text
        text = text.replace(new, old)
    (folder / "config.toml").write_text(text)
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(
        json.dumps({k: v for k, v in about.items() if k not in ("format", "sources", "check")})
    )


@pytest.mark.parametrize(
    ("change", "renamed"),
    [
        (("lr_decay = ", "decay = "), "setting 'train.decay' is now 'train.lr_decay'"),
        (("lr_decay_at = ", "decay_at = "), "setting 'train.decay_at' is now 'train.lr_decay_at'"),
        (('path = "auto"', 'path = "alone"'), "'alone' of setting 'engine.path' is now 'reference'"),
        (('kind = "sign-flip"', 'kind = "not-a-number"'), "'not-a-number' of setting 'attack.kind' is now 'non-finite'"),
        (("[finetune]", "[privacy]\nnoise = 1.0\n[finetune]"), "setting 'privacy.noise' is now 'privacy.noise_multiplier'"),
    ],
)
def test_a_run_of_an_earlier_version_is_named_as_such(change, renamed, tmp_path, fedme):
    old_form(Path("x"), change)
    wanted = f"x: written by an earlier version of FedMe ({renamed}); run the experiment again, or use that version"
    for words in (["show", "x"], ["show", "x", "--clients"], ["resume", "x"], ["report", "x"], ["compare", "x"]):
        code, _, err = fedme(*words)
        assert code == 2
        assert " ".join(err.split()).endswith(wanted), words
    Path("x/summary.json").unlink()
    assert wanted in " ".join(fedme("show", "x")[2].split())


def test_a_run_of_a_later_version_is_named_as_such(tmp_path):
    do(tmp_path / "a", "rounds=1")
    about = read_environment(tmp_path / "a")
    assert about["format"] == FORMAT
    require_readable(tmp_path / "a")
    (tmp_path / "a/environment.json").write_text(json.dumps(about | {"format": FORMAT + 1}))
    with pytest.raises(RunError, match="another version of FedMe .format 3"):
        summary.read(tmp_path / "a")


def test_a_run_begun_with_another_version_says_so_in_one_line(tmp_path, fedme):
    with pytest.raises(Killed):
        do(tmp_path / "a", fuse=30)
    about = {k: v for k, v in json.loads((tmp_path / "a/environment.json").read_text()).items() if k != "check"}
    assert "was begun with" not in version_note(tmp_path / "a")
    (tmp_path / "a/environment.json").write_text(json.dumps(about | {"fedme": "0.0.9\x1b[2J"}))
    code, _, err = fedme("resume", tmp_path / "a")
    assert code == 0
    said = [line for line in err.splitlines() if "was begun with FedMe" in line]
    assert len(said) == 1
    assert "0.0.9" in said[0]
    assert f"continues with {__version__}" in said[0]
    assert "\x1b" not in said[0]
