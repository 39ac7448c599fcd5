"""Reference pages generated from the code: settings, commands and Python names."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer

import fedme
from fedme import networks
from fedme.cli.app import app
from fedme.config.experiment import presets
from fedme.config.setting_help import TABLES, settings_of
from fedme.config.settings import Settings
from fedme.datasets import DATASETS
from fedme.datasets.partitioners import PARTITIONS
from fedme.methods import METHODS


def pages() -> dict[str, str]:
    """The generated pages by path."""
    return {
        "reference/settings.md": settings(),
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "methods/index.md": index(),
    }


def methods() -> list[str]:
    """The names of the methods, in order."""
    return list(METHODS)


def settings() -> str:
    """Every key of an experiment file."""
    tables = ("method", "partition", *TABLES)
    top = [row for row in settings_of(Settings) if row.name not in tables]
    text = "# Settings\n\nEvery key of an experiment's TOML file. An empty default means that the key is not set.\n\n"
    text += f"## Top level\n\n{_table(('key', 'default', 'about'), top)}\n"
    for name, options in TABLES.items():
        text += f"## [{name}]\n\n{_first_line(options)}\n\n{_settings(options)}\n"
    groups: Mapping[str, Mapping[str, type[Any]]] = {"method": METHODS, "data": DATASETS, "partition": PARTITIONS}
    for table, entries in groups.items():
        text += f"## {table}.name\n\n"
        for name, entry in entries.items():
            text += f'### {table}.name = "{name}"\n\n{_first_line(entry)}\n\n{_settings(entry)}\n'
    table = _table(("name", "about", "source", "options"), networks.describe())
    text += f"## Networks\n\nNames for `models.pool` and `models.shared`.\n\n{table}\n"
    return text + f"## Presets\n\n{_table(('name', 'about'), presets().items())}\n"


def commands() -> str:
    """Every command with its arguments and options."""
    text = "# Commands\n\nThe same as `fedme COMMAND --help`.\n\n"
    for name, command in _leaf_commands(typer.main.get_command(app)):
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


def _leaf_commands(command: Any, name: str = "") -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [leaf for key, inner in command.commands.items() for leaf in _leaf_commands(inner, f"{name} {key}".strip())]


def python() -> str:
    """The public names, and the interfaces for extensions."""
    text = "# Python\n\n## Public names\n\nImport them as `fedme.NAME`.\n\n"
    text += "".join(f"::: {fedme._HOMES[name]}.{name}\n\n" for name in fedme.__all__)
    text += "## For user-defined methods and criteria\n\n"
    for name in ("core.method.Method", "core.method.Task", "core.method.Report", "methods.fedme.adoption.Candidate"):
        text += f"::: fedme.{name}\n\n"
    return text + "## Reports\n\n::: fedme.report.write\n\n::: fedme.report.chart_files.save_charts\n"


def index() -> str:
    """All methods in one table."""
    rows = [
        (f"[{name}]({name}.md)", _first_line(m), m.travels, "yes" if m.own_architectures else "no")
        for name, m in METHODS.items()
    ]
    return f"# Methods\n\n{_table(('method', 'idea', 'clients send', 'own architectures'), rows)}\n"


def method(name: str) -> str:
    """The end of a method's page: the deviations from its docstring, and its settings."""
    about = inspect.getdoc(inspect.getmodule(METHODS[name])) or ""
    deviations = about.partition("Deviations:")[2].strip()
    text = f"\n\n## Deviations from the papers\n\n{deviations[:1].upper()}{deviations[1:]}\n\n## Settings\n\n"
    return text + f"Keys of the table `[method]`; training has its own in `[train]`.\n\n{_settings(METHODS[name])}"


def _first_line(entry: type[Any]) -> str:
    return (entry.__doc__ or "").splitlines()[0]


def _settings(entry: type[Any]) -> str:
    rows = settings_of(entry)
    return _table(("key", "default", "about"), rows) if rows else "No additional settings.\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(header)
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    # Escape characters that Markdown would interpret, as in <id>.
    return re.sub(r"([|<>*_])", r"\\\1", text) if "`" not in text and "](" not in text else text.replace("|", "\\|")
