"""What mkdocs needs besides the pages: the navigation, the generated reference, and equations that need no script."""

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

# Pages in their order. Those that are not there (yet) are left out, those not named here come last.
SECTIONS: dict[str, list[str]] = {
    "Start": ["index", "start", "concepts", "tour"],
    "How to": [
        "experiments",
        "python",
        "own-data",
        "own-models",
        "use-models",
        "report",
        "logging",
        "sweep",
        "add-a-method",
        "reproduction",
        "deploy",
        "migrate",
    ],
    "Questions": ["faq"],
    "Methods": [f"methods/{name}" for name in ("index", *reference.methods())],
    "Reference": ["reference/settings", "reference/commands", "reference/python"],
    "Inside": ["architecture", "reliability", "performance"],
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, then lay out the navigation over all that is there."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    notebook = Path(config.docs_dir) / "tour.ipynb"
    if notebook.exists():
        files.append(File.generated(config, "tour.md", content=as_markdown(notebook)))
        files.remove(next(file for file in files if file.src_uri == "tour.ipynb"))
    config.nav = navigation([file.src_uri for file in files.documentation_pages()])
    return files


def navigation(there: list[str]) -> list[dict[str, Any]]:
    """The sections with the pages that exist."""
    found = [{title: [f"{page}.md" for page in pages if f"{page}.md" in there]} for title, pages in SECTIONS.items()]
    named = {page for section in found for pages in section.values() for page in pages}
    rest = sorted(page for page in there if page not in named)
    found += [{"More": rest}] if rest else []
    return [section for section in found if any(section.values())]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Titles of code blocks in mkdocs' own spelling, links to files outside the site as their names, and what is generated."""
    markdown = re.sub(r"^(```\w+) title=(\S+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:README|CONTRIBUTING|CHANGELOG|LICENSE|benchmarks)[^)]*\)", r"`\1`", markdown)
    name = page.file.src_uri.removeprefix("methods/").removesuffix(".md")
    if page.file.src_uri.startswith("methods/") and name != "index":
        markdown += reference.method(name)
    return markdown


EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Equations as MathML, which browsers draw themselves."""

    def drawn(match: "re.Match[str]") -> str:
        latex = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return convert(latex, display="block" if match[1] == "div" else "inline")

    return EQUATION.sub(drawn, html)
