"""Hooks of mkdocs: navigation, generated reference pages, and equations that need no script."""

import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference
from notebook import as_markdown

# Pages in order. Missing pages are skipped; pages not named here come last.
SECTIONS: dict[str, list[str]] = {
    "Start": ["index", "start", "concepts", "tour"],
    "How to": [
        "experiments",
        "python",
        "own-data",
        "site-tables",
        "own-models",
        "use-models",
        "verdict",
        "privacy",
        "report",
        "logging",
        "sweep",
        "add-a-method",
        "reproduction",
        "cluster",
        "deploy",
        "migrate",
    ],
    "Questions": ["faq"],
    "Methods": [f"methods/{name}" for name in ("index", *reference.methods())],
    "Reference": ["reference/settings", "reference/commands", "reference/python"],
    "Inside": ["architecture", "threat-model", "reliability", "performance", "errata"],
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, then build the navigation."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    notebook = Path(config.docs_dir) / "tour.ipynb"
    if notebook.exists():
        files.append(File.generated(config, "tour.md", content=as_markdown(notebook)))
        files.remove(next(file for file in files if file.src_uri == "tour.ipynb"))
    config.nav = navigation([file.src_uri for file in files.documentation_pages()])
    return files


def navigation(existing: list[str]) -> list[dict[str, Any]]:
    """The sections with the pages that exist."""
    sections = {title: [f"{page}.md" for page in pages if f"{page}.md" in existing] for title, pages in SECTIONS.items()}
    named = {page for pages in sections.values() for page in pages}
    sections["More"] = sorted(page for page in existing if page not in named)
    return [{title: pages} for title, pages in sections.items() if pages]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert titles of code blocks to mkdocs' syntax, replace links to files outside the site by names, add generated text."""
    markdown = re.sub(r"^(```\w+) title=(\S+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:README|CONTRIBUTING|CHANGELOG|LICENSE|benchmarks)[^)]*\)", r"`\1`", markdown)
    name = page.file.src_uri.removeprefix("methods/").removesuffix(".md")
    if page.file.src_uri.startswith("methods/") and name != "index":
        markdown += reference.method(name)
    return markdown


EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Convert equations to MathML, which browsers render natively."""

    def mathml(match: "re.Match[str]") -> str:
        latex = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return convert(latex, display="block" if match[1] == "div" else "inline")

    return EQUATION.sub(mathml, html)
