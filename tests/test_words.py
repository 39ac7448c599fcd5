"""The words of the field: home-made names stay out of identifiers, and home-made phrases out of messages and prose."""

import ast
import re
from pathlib import Path

import pytest

import fedme

ROOT = Path(fedme.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What was used here, and what the field says.
NAMES = {
    "slope": "gradient, derivative",
    "slopes": "gradients",
    "speed": "momentum buffer",
    "speeds": "momentum buffers",
    "shares": "weights (of a mean)",
    "alone": "reference",
    "owned": "in-place",
    "batched": "dispatcher",
    "Batched": "Dispatcher",
    "parcel": "serialise",
    "Fetch": "a name that says what is fetched",
    "arrivals": "reply validation",
    "conduct": "offences",
    "Conduct": "OffenceRecord",
    "muster": "current_task",
    "away": "unavailable",
    "assess": "evaluate",
    "Assessment": "Evaluation",
    "look": "predict, evaluate, inspect",
    "hostile": "malicious",
    "Hostile": "MaliciousClients",
    "newcomer": "unseen client",
    "newcomers": "unseen clients",
    "hello": "handshake",
    "Hello": "Handshake",
    "keeper": "supervisor",
    "Keeper": "Supervisor",
    "gate": "reverse proxy",
    "kit": "provisioning",
    "MENDABLE": "USER_ERRORS",
    "Rule": "LocalOptimizer",
    "Here": "a name that says what the thing is",
    "Over": "a name that says what the thing is",
    "Seen": "a name that says what the thing is",
    "Spot": "a name that says what the thing is",
    "Lane": "a name that says what the thing is",
    "Hand": "a name that says what the thing is",
    "Room": "a name that says what the thing is",
    "Front": "a name that says what the thing is",
    "Told": "a name that says what the thing is",
    "Known": "a name that says what the thing is",
    "Trouble": "a name that says what the thing is",
    "Kept": "a name that says what the thing is",
    "Kind": "task type, layer type, ...",
    "KINDS": "task types, layer types, ...",
    "found": "a name that says what was found",
    "each": "a name that says what the item is",
    "mine": "a name that says what it is",
    "whole": "a name that says what it is",
}
EXCEPTIONS = {("membership_inference.py", "found")}  # a key of audit.json
PHRASES = [
    r"numbers? to predict",
    r"must not be negative",
    r"number which is none",
    r"numbers? that (is|are) none",
    r"of one's own",
    r"as if it had never been",
    r"its rule is another one",
    r"must be a whole number",
    r"(?i)\b(slopes?|hostile|muster|parcels?|keeper|conduct|mendable)\b",
    r"`shares`",
    r"\b(loss|class|variable|second|seconds) a (sample|label|target|round|client)\b",
    r", not \{",
]


def identifiers(tree: ast.AST) -> set[tuple[str, int]]:
    """Every name that the file defines: functions, classes, arguments, variables, attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            names.add((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add((node.attr, node.lineno))
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_those_of_the_field(path):
    wrong = sorted((line, name, NAMES[name]) for name, line in identifiers(ast.parse(path.read_text())) if name in NAMES)
    wrong = [item for item in wrong if (path.name, item[1]) not in EXCEPTIONS]
    assert not wrong, f"{path}: {wrong[:5]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_and_prose_are_plain(path):
    text = path.read_text()
    assert not [phrase for phrase in PHRASES if re.search(phrase, text)], path
