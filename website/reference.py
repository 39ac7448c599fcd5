"""Reference pages generated from the code: settings, commands and Python names."""

import inspect
from collections.abc import Mapping
from typing import Any

import method_pages
import typer
from markdown_tables import first_line, settings_table, table

import fedme
from fedme import networks
from fedme.api.learner import EXPERIMENT
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
        "reference/methods.md": learners(),
        "methods/index.md": method_pages.index(),
    }


def settings() -> str:
    """Every key of an experiment file."""
    tables = ("method", "partition", *TABLES)
    top = [row for row in settings_of(Settings) if row.name not in tables]
    text = "# Settings\n\nEvery key of an experiment's TOML file. An empty default means that the key is not set.\n\n"
    text += f"## Top level\n\n{table(('key', 'default', 'about'), top)}\n"
    for name, options in TABLES.items():
        text += f"## [{name}] {{#{name}}}\n\n{first_line(options)}\n\n{settings_table(options)}\n"
    groups: Mapping[str, Mapping[str, type[Any]]] = {
        "method": METHODS,
        "data": DATASETS,
        "partition": PARTITIONS,
    }
    for key, entries in groups.items():
        text += f"## {key}.name\n\n"
        for name, entry in entries.items():
            text += f'### {key}.name = "{name}"\n\n{first_line(entry)}\n\n{settings_table(entry)}\n'
    built_in = table(("name", "about", "source", "options"), networks.describe())
    text += f"## Networks\n\nNames for `models.pool` and `models.shared`.\n\n{built_in}\n"
    return text + f"## Presets\n\n{table(('name', 'about'), presets().items())}\n"


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
        text += table(("argument", "about"), rows) + "\n" if rows else ""
    return text


def _leaf_commands(command: Any, name: str = "") -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [leaf for key, inner in command.commands.items() for leaf in _leaf_commands(inner, f"{name} {key}".strip())]


# Public names by what they are for. Names that are not here, and are no methods, come last.
GROUPS: dict[str, tuple[str, ...]] = {
    "Train and compare": ("Client", "Learner", "learner", "compare", "Callback"),
    "Results and models": ("Result", "Comparison", "Personal", "load_run", "load_model"),
    "Networks": ("Arch", "Model", "register"),
    "Methods of your own": ("Method", "Key"),
}
EXTENSIONS = ("core.method.Task", "core.method.Report", "core.method.Plan", "methods.fedme.adoption.Candidate")
INHERITED = "    options:\n      inherited_members: true\n"


def python() -> str:
    """The public names, and the interfaces for extensions."""
    methods = {method.__name__ for method in METHODS.values()}
    named = {name for names in GROUPS.values() for name in names}
    others = tuple(name for name in fedme.__all__ if name not in methods | named)
    text = (
        "# Python\n\nImport the package and use these names as `fedme.NAME`. The methods (`fedme.FedMe`, `fedme.FedAvg`, ...) "
        "have [a separate page](methods.md).\n\n"
    )
    for title, names in (GROUPS | ({"More": others} if others else {})).items():
        text += f"## {title}\n\n" + "".join(f"::: fedme.{name}\n{INHERITED}\n" for name in names)
    text += "## Values that methods use\n\n"
    text += "".join(f"::: fedme.{name}\n\n" for name in EXTENSIONS)
    return text + "## Reports\n\n::: fedme.report.write\n\n::: fedme.report.chart_files.save_charts\n"


def learners() -> str:
    """The methods in Python: signatures and settings."""
    text = (
        "# Methods in Python\n\nEvery method is a class with `fit`. Settings are keywords: those of the method, listed here, "
        'and the [settings of an experiment](settings.md) (`rounds=30`, tables as dictionaries: `train={"lr": 0.05}`). '
        "All methods inherit [`fit`](python.md#fedme.Learner.fit) and the other members of "
        "[`fedme.Learner`](python.md#fedme.Learner).\n\n"
    )
    for name in METHODS:
        method = METHODS[name]
        learner = getattr(fedme, method.__name__)
        signature = inspect.signature(learner)
        own = [p for p in signature.parameters.values() if p.name not in EXPERIMENT]
        given = [*(f"{p.name}={p.default!r}" for p in own), "**experiment"]
        call = ", ".join(given) if len(given) < 4 else "".join(f"\n    {word}," for word in given) + "\n"
        text += f"## fedme.{method.__name__} {{#fedme.{method.__name__}}}\n\n{first_line(method)} "
        text += f"[Equations, advice and an example](../methods/{name}.md).\n\n"
        text += f"```text\nfedme.{method.__name__}({call})\n```\n\n{settings_table(method)}\n"
    return text + f"## Settings of every method\n\n{table(('keyword', 'default', 'about'), _experiment_rows())}\n"


def _experiment_rows() -> list[tuple[str, str, str]]:
    """The settings of an experiment that are keywords of every method; tables link to their keys."""
    rows = {row.name: row for row in settings_of(Settings)}
    return [
        (f"`{name}`", "{}", f"a dictionary, the table [`[{name}]`](settings.md#{name})")
        if name in TABLES
        else (f"`{name}`", rows[name].default, rows[name].about)
        for name in EXPERIMENT
        if name in rows or name in TABLES
    ]
