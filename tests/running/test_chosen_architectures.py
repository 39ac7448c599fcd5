"""Architectures that clients choose by training alone: computed once for runs beside each other, with the same results."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedme.config.experiment import load
from fedme.results import records
from fedme.running import assembly, run
from fedme.running.chosen_architectures import NAME, ChosenArchitectures, SharedChoices
from fedme.running.local_training_name import FOLDER
from fedme.running.progress import Display

WORDS = ["rounds=2", "partition.clients=4", "data.limit=200", "models.pool=['mlr','dnn-8']", "models.assign=best-local"]
CHOICE = ChosenArchitectures({"a": "mlr", "b": "dnn-8"}, {"a": {"mlr": 0.5, "dnn-8": None}, "b": {"mlr": 0.25, "dnn-8": 1.0}})


class Silent(Display):
    def __init__(self):
        self.notes, self.labels = [], []

    def note(self, text, always=False):
        self.notes.append(text)

    def start(self, label, total, done=0, by_operation=False):
        self.labels.append(label)

    def advance(self, info=None):
        pass

    def tick(self):
        pass


def do(folder, *words):
    experiment, _ = load("digits-fedme", [*WORDS, "models.selection_rounds=2", *words, f"output={folder}"])
    display = Silent()
    run.start(experiment, display)
    return display, [{k: v for k, v in row.items() if "seconds" not in k} for row in records.read(folder)]


def was_chosen(display):
    return any("choosing" in label for label in display.labels)


def test_runs_that_differ_in_the_method_share_the_choice(tmp_path):
    first, _ = do(tmp_path / "a" / "fedme")
    second, rows = do(tmp_path / "a" / "none", "method.tuning=false")
    alone, alone_rows = do(tmp_path / "b" / "none", "method.tuning=false")
    assert was_chosen(first)
    assert not was_chosen(second)
    assert any("in an earlier run" in note for note in second.notes)
    assert was_chosen(alone)
    assert rows == alone_rows
    selections = [(tmp_path / place / "selection.json").read_text() for place in ("a/fedme", "a/none", "b/none")]
    assert len(set(selections)) == 1


@pytest.mark.parametrize(
    "word", ["seed=1", "models.selection_rounds=3", "models.selection_lr=0.3", "data.val=0.3", "train.batch=5"]
)
def test_other_settings_choose_anew(tmp_path, word):
    do(tmp_path / "first")
    assert was_chosen(do(tmp_path / "second", word)[0])


def test_a_damaged_file_is_replaced(tmp_path):
    _, before = do(tmp_path / "first")
    (kept,) = (tmp_path / FOLDER).glob(f"*/{NAME}")
    text = kept.read_text()
    kept.write_text(text.replace("mlr", "dnn-8", 1))
    display, after = do(tmp_path / "second")
    assert was_chosen(display)
    assert after == before
    assert kept.read_text() == text


def test_a_choice_is_kept_and_read(tmp_path):
    shared = SharedChoices(tmp_path)
    assert shared.get("name", lambda: CHOICE) == CHOICE
    assert shared.get("name", pytest.fail) == CHOICE


def test_a_run_waits_for_another_that_chooses(tmp_path):
    begun, may_end = threading.Event(), threading.Event()
    ticks = []

    def choose():
        begun.set()
        assert may_end.wait(10)
        return CHOICE

    def tick():
        ticks.append(1)
        may_end.set()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(SharedChoices(tmp_path).get, "name", choose)
        assert begun.wait(10)
        assert SharedChoices(tmp_path, tick=tick).get("name", lambda: pytest.fail("it is being made")) == CHOICE
        assert first.result() == CHOICE
    assert ticks


def test_a_folder_that_cannot_be_made_stops_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    assert SharedChoices(tmp_path / "file").get("name", lambda: CHOICE) == CHOICE


def test_a_choice_that_fails_is_left_to_the_next_run(tmp_path):
    with pytest.raises(ZeroDivisionError):
        SharedChoices(tmp_path).get("name", lambda: 1 / 0)
    assert SharedChoices(tmp_path).get("name", lambda: CHOICE) == CHOICE


def test_without_a_folder_nothing_is_kept(tmp_path):
    experiment, _ = load("digits-fedme", [*WORDS, "models.selection_rounds=1"])
    prepared = assembly.prepare(experiment, assembly.gather(experiment), assembly.one_by_one)
    assert set(prepared.selection) == set(prepared.task.members)
    assert json.loads(json.dumps(prepared.selection)) == prepared.selection
    assert not list(tmp_path.iterdir())
