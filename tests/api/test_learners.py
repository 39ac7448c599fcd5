"""The learners: typed, documented, and the same for a user's method."""

import inspect
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedme
from fedme.config.experiment import ConfigError
from fedme_test_user_method import Soup

ROOT = Path(__file__).parents[2]


def clients(count=3):
    draw = torch.Generator().manual_seed(1)
    return [
        fedme.Client(f"c{i}", train=(torch.randn(30, 5, generator=draw), torch.arange(30) % 3), model=None)
        for i in range(count)
    ]


def test_public_names_are_listed_and_documented():
    assert set(dir(fedme)) == {*fedme.__all__, "__version__"}
    assert str(fedme.FedMe) == "<class 'fedme.FedMe'>"
    parameters = inspect.signature(fedme.FedMe).parameters
    assert parameters["clusters"].default == 1
    assert parameters["rounds"].default == 30
    assert "adopts the guest model if it is better" in fedme.FedMe.__doc__
    assert repr(fedme.FedMe(rounds=3, clusters=2)) == "FedMe(rounds=3, clusters=2)"


def test_the_stubs_are_those_of_the_dataclasses():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import write_api_stubs
    finally:
        sys.path.pop(0)
    assert write_api_stubs.STUB.read_text() == write_api_stubs.stub(), "run `python tools/write_api_stubs.py`"


def test_an_editor_knows_the_settings(tmp_path):
    program = tmp_path / "program.py"
    calls = ["clusters=2, rounds=3", "clusters='two'", "clustr=2"]
    program.write_text("".join(["import fedme\n", *(f"fedme.FedMe({call})\n" for call in calls)]))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )
    lines = [line for line in checked.stdout.splitlines() if line.startswith(str(program)) and "error" in line]
    assert [line.split(":")[1] for line in lines] == ["3", "4"], checked.stdout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedme.FedMe(30), r"FedMe\(30, ...\): settings are keywords, for example FedMe\(rounds=30\)"),
        (lambda: fedme.FedMe(lr=0.1), r"FedMe\(lr=...\): no such setting; it is in a table: train={\'lr\': ...}"),
        (
            lambda: fedme.FedMD(shared=["head."]),
            r"models={'shared': ...}; weights that travel cannot be named: no weights travel",
        ),
        (lambda: fedme.FedMe(clustr=2), r"FedMe\(clustr=...\): no such setting; did you mean \'clusters\'\?"),
        (
            lambda: fedme.learner("fedme"),
            r"learner\(\'fedme\'\): expected a class .*; the learner of .* is fedme.FedMe$",
        ),
        (lambda: fedme.learner("soup"), r"learner\(\'soup\'\): expected a class that implements a method$"),
        (lambda: fedme.learner(Soup)(pepper=1), r"Soup\(pepper=...\): no such setting"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_class_of_a_program_is_a_method_like_any_other(tmp_path):
    learner = fedme.learner(Soup)(rounds=2, salt=0.25, models={"pool": ["mlr"]})
    result = learner.fit(clients(), output=tmp_path / "run", quiet=True)
    assert set(result) == {"c0", "c1", "c2"}
    assert result.experiment.method == Soup(salt=0.25, train=result.experiment.train)

    @dataclass(frozen=True)
    class Inner(Soup):
        """Defined inside a function."""

        pepper: float = 0.1

    inner = fedme.learner(Inner)(rounds=1, pepper=0.2).fit(clients(), quiet=True)
    assert inner.experiment.method.pepper == 0.2
    assert inner.join(fedme.Client("new", train=clients()[0].train)).predict(torch.randn(4, 5)) is not None


def test_a_function_may_be_a_setting():
    learner = fedme.FedMe(adopt=lambda candidate: candidate.score.loss)
    assert callable(learner.settings["method"]["adopt"])
    with pytest.raises(ConfigError, match="method.adopt: returns a str"):
        fedme.FedMe(adopt=lambda candidate: "cheap")
