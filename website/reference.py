"""Reference pages generated from the code: settings, commands and Python names."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
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
    table = _table(("method", "idea", "clients send", "own architectures"), rows)
    return f"# Methods\n\n{table}\n{options()}\n{chooser()}"


# What an experiment may ask for, and why a method refuses it, by the method's description of itself. Tests try every cell.
OPTIONS: dict[str, Callable[[type[Any]], str]] = {
    "clients of several architectures": lambda m: "" if m.own_architectures else "it has one architecture",
    "`[privacy]`": lambda m: m.not_private,
    "`train.optimizer`": lambda m: "it defines its own step" if m.own_step else "",
    "regression, several labels": lambda m: "it is for classes" if m.classes_only else "",
    "`fedme join`": lambda m: m.nothing_to_offer,
    "`fedme audit`": lambda m: m.nothing_to_audit,
    "`fedme deploy`": lambda m: "it pools the samples" if m.pooled else "",
}


def options() -> str:
    """Which options work with which method. Those that work with all are in the text."""
    rows = [(f"[{name}]({name}.md)", *("no" if why(m) else "yes" for why in OPTIONS.values())) for name, m in METHODS.items()]
    text = (
        "\n## What works with which method\n\nRounds with a part of the clients, missing replies, fine-tuning, resuming, "
        "reports, worker processes and Flower's simulation work with all. What does not work is refused by name before "
        "anything is computed.\n\n"
    )
    return text + _table(("method", *OPTIONS), rows)


def chooser() -> str:
    """Questions about a federation, and the methods that fit each answer, from the methods' descriptions of themselves."""
    questions: dict[str, Callable[[type[Any]], str]] = {
        "One architecture or several?": lambda m: (
            "clients may differ in architecture" if m.own_architectures else "one for all"
        ),
        "Are there public or unlabeled samples?": lambda m: f"needs {m.needs}" if m.needs else "needs clients' samples only",
        "What may travel?": lambda m: m.travels,
        "Must the server be trusted with more than `[privacy]` bounds?": lambda m: (
            f"yes, and `[privacy]` is refused: {m.not_private}"
            if m.not_private
            else "yes: it gets all samples"
            if m.pooled
            else f"only with {'; '.join(m().disclosures())}; `privacy.epsilon` bounds the rest"
            if m().disclosures()
            else "no: `privacy.epsilon` bounds what models tell"
        ),
        "Are other tasks than classification possible?": lambda m: "classification only" if m.classes_only else "all",
        "Can an unseen client use the result?": lambda m: (
            f"no: {m.nothing_to_offer}" if m.nothing_to_offer else "yes, by `fedme join`"
        ),
    }
    text = (
        "\n## Which one fits?\n\nAnswer the questions one after another; what is left over fits. Compare it with `local` and "
    )
    text += (
        "with `fedavg` and fine-tuning: they are hard to beat. The [threat model](../threat-model.md) says who sees what.\n\n"
    )
    for question, answer in questions.items():
        groups: dict[str, list[str]] = {}
        for name, m in METHODS.items():
            groups.setdefault(answer(m), []).append(f"[{name}]({name}.md)")
        text += f"### {question}\n\n{_table(('answer', 'methods'), ((a, ', '.join(names)) for a, names in groups.items()))}\n"
    return text


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
