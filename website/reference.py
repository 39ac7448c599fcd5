"""Reference pages made from the code: settings from the dataclasses, commands from the command line, names from docstrings."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer

import fedme
from fedme import networks
from fedme.cli.app import app
from fedme.config.experiment import presets
from fedme.config.setting_help import settings_of
from fedme.config.settings import EngineOptions, FinetuneOptions, ModelOptions, PrivacyOptions, Settings
from fedme.datasets import DATASETS
from fedme.datasets.federated_dataset import DataOptions
from fedme.datasets.partitioners import PARTITIONS
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.local_training import Training
from fedme.learning.robust_aggregation import Defence
from fedme.methods import METHODS

TABLES = {
    "data": DataOptions,
    "models": ModelOptions,
    "train": Training,
    "finetune": FinetuneOptions,
    "privacy": PrivacyOptions,
    "engine": EngineOptions,
    "faults": Faults,
    "defence": Defence,
    "attack": Attack,
}


def pages() -> dict[str, str]:
    """The generated pages by their places."""
    return {
        "reference/settings.md": settings(),
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "methods/index.md": index(),
    }


def methods() -> list[str]:
    """The names of the methods, in their order."""
    return list(METHODS)


def settings() -> str:
    """Every key of an experiment's file."""
    tables = ("method", "partition", *TABLES)
    top = [row for row in settings_of(Settings) if row.name not in tables]
    text = "# Settings\n\nEvery key of an experiment's TOML file, from the code itself. An empty default means: not set.\n\n"
    text += f"## Top level\n\n{_table(('key', 'default', 'about'), top)}\n"
    for name, kind in TABLES.items():
        text += f"## [{name}]\n\n{_first(kind)}\n\n{_table(('key', 'default', 'about'), settings_of(kind))}\n"
    groups: Mapping[str, Mapping[str, type[Any]]] = {"method": METHODS, "data": DATASETS, "partition": PARTITIONS}
    for table, known in groups.items():
        text += f"## {table}.name\n\n"
        for name, kind in known.items():
            rows = settings_of(kind)
            body = _table(("key", "default", "about"), rows) if rows else "No settings of its own.\n"
            text += f'### {table}.name = "{name}"\n\n{_first(kind)}\n\n{body}\n'
    table = _table(("name", "about", "source", "options"), networks.describe())
    text += f"## Networks\n\nNames for `models.pool` and `models.shared`.\n\n{table}\n"
    return text + f"## Presets\n\n{_table(('name', 'about'), presets().items())}\n"


def commands() -> str:
    """Every command with its arguments and options."""
    text = "# Commands\n\n`fedme COMMAND --help` says the same.\n\n"
    for name, command in _flat(typer.main.get_command(app)):
        text += f"## fedme {name}\n\n{(command.help or '').strip()}\n\n"
        rows = []
        for param in command.params:
            option = param.param_type_name == "option"
            if option and "--help" in param.opts:
                continue
            shown = ", ".join(param.opts) if option else (param.metavar or (param.name or "").upper())
            rows.append((f"`{shown}`", getattr(param, "help", "") or ""))
        text += _table(("argument", "about"), rows) + "\n" if rows else ""
    return text


def _flat(command: Any, at: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, inner in getattr(command, "commands", {}).items():
        whole = f"{at} {name}".strip()
        found += _flat(inner, whole) if hasattr(inner, "commands") else [(whole, inner)]
    return found


def python() -> str:
    """The public names, and the seams that extensions use."""
    text = "# Python\n\n## Public names\n\nAs `fedme.NAME`.\n\n"
    text += "".join(f"::: {fedme._HOMES[name]}.{name}\n\n" for name in fedme.__all__)
    text += "## For methods and criteria of one's own\n\n"
    for name in ("core.method.Method", "core.method.Task", "core.method.Report", "methods.fedme.adoption.Candidate"):
        text += f"::: fedme.{name}\n\n"
    return text + "## Reports\n\n::: fedme.report.write\n\n::: fedme.report.chart_files.save_charts\n"


def index() -> str:
    """All methods in one table."""
    rows = [(f"[{name}]({name}.md)", _first(kind), "yes" if kind.own_architectures else "no") for name, kind in METHODS.items()]
    return f"# Methods\n\n{_table(('method', 'idea', 'own architectures'), rows)}\n"


def method(name: str) -> str:
    """What every method's page ends with: deviations as its file tells them, and its settings."""
    kind = METHODS[name]
    about = inspect.getdoc(inspect.getmodule(kind)) or ""
    deviations = about.partition("Deviations:")[2].strip()
    text = f"\n\n## Deviations from the papers\n\n{deviations[:1].upper()}{deviations[1:]}\n"
    rows = settings_of(kind)
    table = _table(("key", "default", "about"), rows) if rows else "None of its own.\n"
    return text + f"\n## Settings\n\nOf the table `[method]`; those of training are in `[train]`.\n\n{table}"


def _first(kind: type[Any]) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(header)
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    # Names such as {0 = 1} or <id> are to be read, not interpreted.
    return re.sub(r"([|<>*_])", r"\\\1", text) if "`" not in text and "](" not in text else text.replace("|", "\\|")
