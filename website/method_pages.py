"""Pages of the methods, made from their docstrings and from what they say about themselves.

A new method has a page without further work. `docs/methods/NAME.md` may add equations, advice and an example to it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from markdown_tables import escaped, first_line, settings_table, table

from fedme.methods import METHODS

OF_PAPERS = ("fedme", "fml", "pfml")  # the methods of this library's papers


# What an experiment may ask for, and why a method refuses it, by the method's description of itself. Tests try every cell.
OPTIONS: dict[str, Callable[[type[Any]], str]] = {
    "clients of several architectures": lambda m: "" if m.own_architectures else "it has one architecture",
    "`[privacy]`": lambda m: m.not_private,
    "`method.shared`": lambda m: "" if "shared" in {field.name for field in fields(m)} else m.not_by_name,
    "`train.optimizer`": lambda m: "it defines its own step" if m.own_step else "",
    "regression, several labels": lambda m: "it is for classes" if m.classes_only else "",
    "`fedme join`": lambda m: m.nothing_to_offer,
    "`fedme audit`": lambda m: m.nothing_to_audit,
    "`fedme deploy`": lambda m: "it pools the samples" if m.pooled else "",
}


def index() -> str:
    """All methods in one table, what works with which, and questions that help to choose."""
    rows = [
        (f"[{name}]({name}.md)", first_line(METHODS[name]), METHODS[name].travels, _yes(METHODS[name].own_architectures))
        for name in METHODS
    ]
    methods = table(("method", "idea", "clients share", "own architectures"), rows)
    return f"# All methods\n\n{methods}\n{options()}\n{chooser()}"


def options() -> str:
    """Which options work with which method. Those that work with all are in the text."""
    rows = [(f"[{name}]({name}.md)", *(_yes(not why(METHODS[name])) for why in OPTIONS.values())) for name in METHODS]
    text = (
        "\n## What works with which method\n\nRounds with some of the clients, missing replies, fine-tuning, resuming, "
        "reports, worker processes and Flower's simulation work with all methods. An option that does not work with a method "
        "is refused by name before anything is computed.\n\n"
    )
    return text + table(("method", *OPTIONS), rows)


def chooser() -> str:
    """Questions about a federation, and the methods that fit each answer, from the methods' descriptions of themselves."""
    questions: dict[str, Callable[[type[Any]], str]] = {
        "One architecture or several?": lambda m: (
            "clients may differ in architecture" if m.own_architectures else "one for all"
        ),
        "Are there public or unlabeled samples?": lambda m: f"needs {m.needs}" if m.needs else "needs clients' samples only",
        "What may be sent?": lambda m: m.travels,
        "Must the server be trusted with more than `[privacy]` bounds?": lambda m: (
            f"yes, and `[privacy]` is refused: {m.not_private}"
            if m.not_private
            else "yes: it gets all samples"
            if m.pooled
            else f"only with {'; '.join(m().disclosures())}; `privacy.epsilon` bounds the rest"
            if m().disclosures()
            else "no: `privacy.epsilon` bounds what models reveal"
        ),
        "Are other tasks than classification possible?": lambda m: "classification only" if m.classes_only else "all",
        "Can an unseen client use the result?": lambda m: (
            f"no: {m.nothing_to_offer}" if m.nothing_to_offer else "yes, by `fedme join`"
        ),
    }
    text = (
        "\n## Which one fits?\n\nAnswer the questions one after another; the methods that are left fit. Compare them with "
        "`local`, and with `fedavg` and fine-tuning: these two are hard to beat. The [threat model](../threat-model.md) says "
        "who sees what.\n\n"
    )
    for question, answer in questions.items():
        groups: dict[str, list[str]] = {}
        for name in METHODS:
            groups.setdefault(answer(METHODS[name]), []).append(f"[{name}]({name}.md)")
        text += f"### {question}\n\n{table(('answer', 'methods'), ((a, ', '.join(names)) for a, names in groups.items()))}\n"
    return text


def page(method: type[Any], extra: str = "") -> str:
    """The page of a method. `extra` has further sections, which stand in place of the docstring's description."""
    title, idea, description, deviations = docstring_parts(inspect.getdoc(inspect.getmodule(method)) or "")
    extra = extra[extra.index("## ") :] if "## " in extra else ""  # a title and an introduction would be repeated
    parts = [f"# {title or method.__name__}", idea or first_line(method)]
    if paper := vars(method).get("paper"):
        parts.append(f"**Paper:** {linked(paper)}.")
    parts.append(facts(method))
    parts.append(extra or f"## How it works\n\n{escaped(description or first_line(method))}")
    if "## Example" not in extra:
        parts.append(f"## Example\n\n```\n{example(method)}\n```")
    parts.append(f"## Deviations from the paper\n\n{deviations or 'None are listed.'}")
    parts.append(
        f"## Settings\n\nKeys of the table `[method]`; keywords of [`fedme.{method.__name__}`](../reference/methods.md#fedme."
        f"{method.__name__}) in Python. Local training has its own table, [`[train]`](../reference/settings.md#train).\n\n"
        f"{settings_table(method)}"
    )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def docstring_parts(text: str) -> tuple[str, str, str, str]:
    """Name, idea, description and deviations, from the docstring of a method's module."""
    head, _, deviations = text.partition("Deviations:")
    first, _, description = head.strip().partition("\n\n")
    name, _, idea = " ".join(first.split()).partition(": ")
    if not idea:
        name, idea = "", name
    deviations = " ".join(deviations.split())
    return name, idea[:1].upper() + idea[1:], description.strip(), deviations[:1].upper() + deviations[1:]


def facts(method: type[Any]) -> str:
    """What the method says about itself, as a table."""
    refused = {option: why(method) for option, why in OPTIONS.items() if option != "clients of several architectures"}
    rows = [
        ("Clients share", escaped(method.travels)),
        ("Architectures", "every client may have its own" if method.own_architectures else "one for all clients"),
        ("Samples", f"needs {method.needs}" if method.needs else "those of the clients"),
        *((option, f"no: {escaped(why)}" if why else "yes") for option, why in refused.items()),
    ]
    if disclosed := method().disclosures():
        rows.append(("Revealed besides models", escaped("; ".join(disclosed))))
    return f"| question | answer |\n|---|---|\n{''.join(f'| **{name}** | {value} |' + chr(10) for name, value in rows)}"


def example(method: type[Any]) -> str:
    """A command that runs the method."""
    preset = "digits-fedme" if method.own_architectures else "digits-fedavg"
    return f"fedme run {preset} rounds=2 method.name={method.name()} output=runs/{method.name()}"


def papers() -> str:
    """The papers of all methods, once each, with the methods that follow them."""
    cited: dict[str, list[str]] = {}
    for name in METHODS:
        if paper := vars(METHODS[name]).get("paper"):
            cited.setdefault(paper, []).append(f"[{name}](methods/{name}.md)")
    return "".join(f"* {', '.join(names)}: {linked(paper)}.\n" for paper, names in cited.items())


def linked(paper: str) -> str:
    """The citation with a link to arXiv."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def bibtex() -> str:
    """BibTeX entries of the three methods of this library's papers."""
    return "\n\n".join(_entry(name, METHODS[name].paper) for name in OF_PAPERS)


def _entry(name: str, paper: str) -> str:
    authors, title, rest = re.fullmatch(r'(.*), "(.*)"(.*)', paper).groups()  # type: ignore[union-attr]
    names = re.split(r", | and ", authors)
    fields: Mapping[str, str | None] = {
        "author": " and ".join(names),
        "title": f"{{{title}}}",
        "journal": match[1] if (match := re.search(r"(Frontiers[\w &]*?) \d{4}", rest)) else None,
        "year": match[0] if (match := re.search(r"\b20\d\d\b(?!\.)", rest)) else None,
        "eprint": match[1] if (match := re.search(r"arXiv:(\S+)", rest)) else None,
        "archivePrefix": "arXiv" if "arXiv" in rest else None,
    }
    body = "".join(f"  {key} = {{{value}}},\n" for key, value in fields.items() if value).replace("&", r"\&")
    return f"@{'article' if fields['journal'] else 'misc'}{{{name},\n{body}}}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
