"""The last line of a test run: what was skipped, and the command that changes it."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("fedme_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(spec)


def line(*skipped):
    if not hasattr(conftest, "skipped_line"):
        spec.loader.exec_module(conftest)
    return conftest.skipped_line(skipped)


def test_nothing_skipped_says_nothing():
    assert line() == ""


def test_reasons_are_counted_by_the_command_that_changes_them():
    chromium = ("Skipped: needs Chromium (apt-get install chromium)", False)
    flower = ("Skipped: test_a.py needs flwr (pip install x)", True)
    other = ("Skipped: test_b.py needs flwr (pip install x)", True)
    packages = ("Skipped: needs mlflow, flwr (pip install x)", False)
    cuda = ("Skipped: needs CUDA", False)
    assert line(*[chromium] * 12, flower, other, packages, cuda, cuda) == (
        "Skipped: 12 tests need Chromium (apt-get install chromium); 1 test and 2 test files need flwr, mlflow (pip install x)"
        "; 2 tests need CUDA."
    )


def test_one_of_a_kind_and_a_reason_of_another_form():
    assert line(("Skipped: needs CUDA", False)) == "Skipped: 1 test needs CUDA."
    assert line(("Skipped: the moon is not full", False)) == "Skipped: 1 test (the moon is not full)."
