"""What a person sees of the command line: help with examples, completion, next steps, tables of one style, clean pipes."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from fedme.cli import app
from fedme.cli.app import all_runs, next_step, quoted, source
from fedme.config.experiment import ConfigError, presets
from fedme.methods import METHODS
from fedme.running.progress import Display

QUICK = ["partition.clients=3", "partition.name=iid", "data.limit=90", "models.pool=['mlr']", "models.assign=mlr"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(fedme):
    code, _, err = fedme("run", "digits-fedavg", *QUICK, "--rounds", 2, "--seed", 3, "--output", "runs/first", "-q")
    assert code == 0, err
    return Path("runs/first")


def commands(command=None, path=("fedme",)):
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", {})
    for name, child in inner.items():
        yield from commands(child, (*path, name))
    if not inner:
        yield path, command


def in_terminal(*words, columns=80):
    """Run a command in a terminal: everything that it shows."""
    here, there = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedme", *map(str, words)], stdin=there, stdout=there, stderr=there, env=environment
    )
    os.close(there)
    shown = b""
    while True:
        try:
            piece = os.read(here, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    process.wait(60)
    os.close(here)
    return process.returncode, shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("path", "command"), [pytest.param(p, c, id=" ".join(p[1:])) for p, c in commands()])
def test_every_command_has_two_examples_that_are_valid(path, command):
    lines = [line.replace("\\[", "[") for line in command.epilog.split("\n\n")]
    assert lines[0] == "Examples:"
    assert len(lines) >= 3
    for line in lines[1:]:
        words = shlex.split(line.split(" > ")[0])
        assert tuple(words[: len(path)]) == path, line
        assert len(line) < 80, "it would be wrapped"
        command.make_context(path[-1], words[len(path) :])  # raises for options that do not exist


def test_help_fits_a_narrow_terminal_and_shows_the_examples(fedme, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for path, _ in commands():
        code, out, _ = fedme(*path[1:], "-h")
        assert code == 0
        assert "Examples:" in out
        assert max(map(len, out.splitlines())) <= 80, path


def test_options_that_people_look_for(fedme, trained):
    text = (trained / "config.toml").read_text()
    assert "rounds = 2" in text
    assert "seed = 3" in text
    code, out, _ = fedme("config", "digits-fedavg", "--rounds", 7, "--seed", 5, "--output", "x")
    assert code == 0
    assert all(line in out for line in ("rounds = 7", "seed = 5", 'output = "x"'))
    code, _, err = fedme("run", "digits-fedavg", "rounds=3", "--rounds", 4)
    assert code == 2
    assert "rounds is given twice, as rounds= and as --rounds" in err


@pytest.mark.parametrize("key", ["rounds", "seed", "output"])
def test_an_option_is_the_setting_of_its_name(key):
    assert source("digits-fedme", ["train.lr=1"], **{key: 3}) == ("digits-fedme", ["train.lr=1", f"{key}=3"])
    assert source("train.lr=1", None, **{key: None}) == (None, ["train.lr=1"])
    with pytest.raises(ConfigError, match="given twice"):
        source(None, [f"{key}=1"], **{key: 3})


def test_resume_gives_more_rounds(fedme, trained):
    code, _, err = fedme("resume", trained)
    assert code == 0
    assert "already finished; `fedme resume runs/first rounds=N` gives it more rounds" in err
    assert fedme("resume", trained, "rounds=3", "-q")[0] == 0
    assert '"rounds": 3' in (trained / "summary.json").read_text()
    assert fedme("resume", trained, "--rounds", 4, "-q")[0] == 0
    for words, message in [
        (["rounds=2"], "can only become more"),
        (["rounds=many"], "rounds: must be an integer, got 'many'"),
        (["train.lr=1"], "train.lr: cannot change when"),
        (["rounds=5", "--rounds", 6], "given twice"),
    ]:
        code, _, err = fedme("resume", trained, *words)
        assert code == 2
        assert message in err


def test_a_wrong_command_gets_one_suggestion(fedme):
    for words in (("shwo", "x"), ("data", "shwo"), ("deploy", "inti", "x")):
        code, _, err = fedme(*words)
        assert code == 2
        assert err.count("Did you mean") == 1


def test_runs_elsewhere_are_suggested(fedme, trained):
    for words in (
        ("show", "first"),
        ("resume", "first"),
        ("watch", "first"),
        ("predict", "frist", "x.csv", "-c", "0"),
        ("report", "first"),
    ):
        code, _, err = fedme(*words)
        assert code == 2
        assert "did you mean runs/first?" in err, words
    assert "it holds 1: first; name one, as in runs/first" in fedme("show", "runs")[2]


def test_all_runs_of_a_folder_are_listed(fedme):
    for number in range(12):
        (Path("runs") / f"r{number:02}").mkdir(parents=True)
        (Path("runs") / f"r{number:02}" / "config.toml").write_text("")
    err = " ".join(fedme("show", "runs")[2].split())
    assert "it holds 12: r00, r01" in err
    assert "r11" in err


def test_unknown_networks_are_refused_before_data_is_loaded(fedme):
    code, _, err = fedme("run", "shakespeare-fedme", "models.pool=['cnn-9']")
    assert code == 2
    assert "models.pool: unknown architecture 'cnn-9'" in err
    assert "loading" not in err


def test_tables_have_one_style(fedme, trained):
    """A rule of one line below the header, and no frames."""
    for words in (
        ("data", "show", "digits-fedme", "--first", "3"),
        ("show", trained),
        ("show", trained, "--clients"),
        ("compare", trained),
        ("list", "methods"),
        ("list", "settings", "train"),
        ("evaluate", trained, "-c", "0"),
        ("reproduce", "--list"),
    ):
        code, out, _ = fedme(*words)
        assert code == 0
        assert re.search(r"^ ?─{20,}", out, re.MULTILINE), words
        assert not set(out) & set("┏┓┃┡│╭╮"), words


def test_data_show_counts_all_samples(fedme):
    out = fedme("data", "show", "digits-fedme", "partition.clients=5", "--first", "2")[1]
    lines = [line.split() for line in out.splitlines()]
    total = next(line for line in lines if line[:1] == ["all"])
    assert sum(map(int, total[1:4])) == 1797 - 200
    assert sum(map(int, total[4:])) == 1797 - 200
    assert "... 3 more" in out
    assert "5 clients, 200 unlabeled" in out


def test_pipes_stay_clean(fedme, trained):
    for words in (
        ("show", trained),
        ("compare", trained),
        ("config", "digits-fedme"),
        ("list", "presets"),
        ("report", trained, "-q"),
    ):
        _, out, err = fedme(*words)
        assert "Next:" not in out + err
    code, shown = in_terminal("show", trained)
    assert code == 0
    *_, last, rest = shown.rstrip().splitlines()
    assert last.startswith("Next: `fedme show runs/first --clients`")
    assert rest == "`fedme report runs/first` draws it"


def test_the_next_step_after_training_alone_is_no_verdict(fedme):
    fedme("run", "digits-fedavg", "method.name=local", *QUICK, "rounds=1", "output=runs/alone", "-q")
    assert in_terminal("show", "runs/alone", "--clients")[1].rstrip().endswith("Next: `fedme report runs/alone` draws them")
    out = fedme("show", "runs/alone")[1]
    assert "Nothing was sent;" in out


@pytest.mark.parametrize(("what", "name"), [("presets", "digits-fedme"), ("models", "cnn-small")])
def test_list_shows_one(fedme, what, name):
    assert [row["name"] for row in json.loads(fedme("list", what, name, "--json")[1])] == [name]
    assert [row["name"] for row in json.loads(fedme("list", "models", "dnn-64", "--json")[1])] == ["dnn-<hidden>"]
    code, _, err = fedme("list", what, f"{name}x")
    assert code == 2
    assert f"there is no '{name}x' among the {what}; did you mean '{name}'?" in err


def test_paragraphs_of_help_are_not_broken_within_a_sentence():
    """Only the first paragraph is wrapped again in a terminal; other lines stay as they are in the source."""

    for path, command in commands():
        _, *more = (command.help or "").split("\n\n")
        for line in "\n".join(more).splitlines():
            assert line.endswith("."), path


def test_the_next_step_is_on_a_terminal(monkeypatch):
    file = io.StringIO()
    module = sys.modules["fedme.cli.app"]  # the name means the application, too
    monkeypatch.setattr(module, "err", Console(file=file, force_terminal=True, width=80, color_system=None))
    next_step("`fedme show x`")
    assert file.getvalue().strip() == "Next: `fedme show x`"


def test_errors_are_wrapped_between_words():
    code, shown = in_terminal("run", "digits-fedme", 'models.pool=["cnn-9"]')
    lines = shown.rstrip().splitlines()
    assert code == 2
    assert lines[0].startswith("error: ")
    assert max(map(len, lines)) <= 80
    assert "unknown architecture 'cnn-9'" in " ".join(lines)


def test_a_list_says_how_to_use_what_it_explains():
    assert in_terminal("list", "methods", "fedavg")[1].endswith(
        "\nNext: `fedme run digits-fedme method.name=fedavg` tries it\n"
    )
    assert "Next: `fedme list methods NAME` explains its settings" in in_terminal("list", "methods")[1]


def test_the_next_step_names_a_directory_of_many_runs(tmp_path):
    folders = [tmp_path / f"run-{i}" for i in range(4)]
    for folder in folders:
        folder.mkdir()
    assert all_runs(folders) == f"{quoted(tmp_path)}/*"
    assert all_runs(folders[:3]) == " ".join(map(quoted, folders[:3]))
    (tmp_path / "other").mkdir()
    assert all_runs(folders) == " ".join(map(quoted, folders))


def test_every_command_says_what_is_next():
    """In its source: a call of `next_step`, directly or by `after_run`; long-running programs and help excepted."""
    import inspect

    excepted = {"demo", "deploy server", "deploy init", "deploy renew"}  # they say it themselves, or run until Ctrl-C
    for path, command in commands():
        code = inspect.getsource(inspect.unwrap(command.callback))
        assert " ".join(path[1:]) in excepted or "next_step(" in code or "after_run(" in code, path


def completed(*words, incomplete="", shell="complete_zsh"):
    """What a shell offers, by the protocol that it uses."""
    line = shlex.join(["fedme", *map(str, words)]) + f" {incomplete}"
    environment = {**os.environ, "_FEDME_COMPLETE": shell, "_TYPER_COMPLETE_ARGS": line}
    if shell == "complete_bash":
        parts = re.split(r"(=)|\s+", line)
        parts = [part for part in parts if part] + ([""] if line.endswith(" ") else [])
        environment |= {"COMP_WORDS": " ".join(parts), "COMP_CWORD": str(len(parts) - 1)}
    program = "import sys; sys.argv[0] = 'fedme'; from fedme.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout


def offers(*words, incomplete=""):
    """The same without a process."""
    from click.shell_completion import ShellComplete

    command = typer.main.get_command(app)
    return [item.value for item in ShellComplete(command, {}, "fedme", "_X").get_completions(list(map(str, words)), incomplete)]


def test_completion_of_presets_settings_and_methods(fedme, trained):
    assert set(presets()) <= set(offers("run"))
    assert offers("run", incomplete="digits-l") == ["digits-local"]
    assert "train.lr=" in offers("run", "digits-fedme", incomplete="train.")
    assert "method.clusters=" in offers("run", "digits-fedme", incomplete="method.")
    assert "method.mu=" in offers("run", "digits-fedme", "method.name=fedprox", incomplete="method.")
    assert set(offers("run", "digits-fedme", incomplete="method.name=fedm")) == {"method.name=fedme", "method.name=fedmd"}
    assert offers("run", "digits-fedme", incomplete="train.optimizer=") == [
        f"train.optimizer={x}" for x in ("sgd", "adam", "adamw")
    ]
    assert offers("run", "digits-fedme", incomplete="finetune.when=a") == ["finetune.when=always"]
    assert set(offers("list", "methods")) == set(METHODS)
    assert "train" in offers("list", "settings")
    assert offers("show") == ["runs/first"]
    assert offers("show", incomplete="runs/f") == ["runs/first"]
    assert offers("predict", trained, "x.csv", "--client") == ["0", "1", "2"]
    assert "pfml-table1" in offers("reproduce")
    Path("mine.toml").write_text('[method]\nname = "no_such_module:Method"\n')
    assert "mine.toml" in offers("run")
    assert "train.lr=" in offers("run", "mine.toml", incomplete="train.")  # nothing is imported


def test_completion_in_shells():
    assert '"digits-local"' in completed("run", incomplete="digits-l")
    values = completed("run", "digits-fedme", incomplete="method.name=fedpr", shell="complete_bash").split()
    assert set(values) == {"fedprox", "fedproto"}
    assert "train.lr=" in completed("run", "digits-fedme", incomplete="train.l", shell="complete_bash").split()


def test_ctrl_c_before_the_first_round_names_the_directory(fedme, monkeypatch):
    words = [*QUICK[:3], "models.pool=['mlr','dnn-8']", "models.assign=best-local", "models.selection_rounds=1", "rounds=2"]
    with monkeypatch.context() as patch:
        patch.setattr(Display, "tick", lambda self: os.kill(os.getpid(), signal.SIGINT))
        code, _, err = fedme("run", "digits-fedme", *words, "output=runs/a b")
    assert code == 130
    assert "stopped before the first round; `fedme resume 'runs/a b'` starts it again" in err
    assert fedme("resume", "runs/a b", "-q")[0] == 0


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_names_a_command_that_continues_a_run_with_own_networks(fedme, monkeypatch, begun):
    words = [*QUICK[:3], "models.pool=['mlr','fedme_test_user_networks:Normed']", "rounds=9"]
    words += ["models.assign=best-local", "models.selection_rounds=1"]

    def tick(display):
        if not begun or Path("runs/own/metrics.jsonl").exists():
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "tick", tick)
        code, _, err = fedme("run", "digits-fedme", *words, "output=runs/own")
    assert code == 130
    assert ("stopped before the first round" not in err) == begun
    assert "`fedme resume runs/own --imports`" in err
    assert fedme("resume", "runs/own", "--imports", "-q")[0] == 0


@pytest.mark.parametrize(("count", "text"), [(1, "and 1 operation of the next"), (2, "and 2 operations of the next")])
def test_progress_counts_operations(count, text):
    file = io.StringIO()
    display = Display(Console(file=file))
    display.start("round", 8, 6)
    display.inside, display.last_line = count - 1, -1e9
    display.tick()
    assert f"round 6/8 {text}" in file.getvalue()
