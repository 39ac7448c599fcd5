"""Hooks of mkdocs: navigation, generated pages, and equations that need no script."""

import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import method_pages
import reference
from notebook import as_markdown

from fedme.methods import METHODS
from fedme.reproduction.catalogue import PAPERS

WEBSITE = Path(__file__).parent
ROOT = WEBSITE.parent
# Pages in order. Missing pages are skipped; pages not named here come last. A section of one page is that page.
SECTIONS: dict[str, list[str]] = {
    "Home": ["index"],
    "Get started": ["start", "tutorial-compare", "tutorial-sites", "tutorial-method", "tour", "concepts"],
    "Examples": ["gallery"],
    "How to": [
        "experiments",
        "python",
        "own-data",
        "own-models",
        "use-models",
        "verdict",
        "report",
        "sweep",
        "logging",
        "devices",
        "cluster",
        "privacy",
        "deploy",
        "add-a-method",
        "migrate",
    ],
    "Methods": [f"methods/{name}" for name in ("index", *METHODS)],
    "Reference": ["reference/settings", "reference/commands", "reference/python", "reference/methods"],
    "Explanations": ["architecture", "threat-model", "errata"],
    "Measurements": [
        *("reproduction", *(f"reproduction/{paper}" for paper in PAPERS)),
        *("site-tables", "method-comparison", "performance", "reliability"),
    ],
    "About": ["faq", "glossary", "cite", "changelog", "contributing", "security"],
}
# Pages made of files at the top of the repository.
REPOSITORY_FILES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
ASSETS = {
    "assets/iframe-worker.js": "iframe-worker.js",
    "assets/extra.css": "extra.css",
    "assets/accessibility.js": "accessibility.js",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, then build the navigation."""
    generated = reference.pages() | {"cite.md": citations()}
    for page, name in REPOSITORY_FILES.items():
        generated[page] = (ROOT / name).read_text(encoding="utf-8")
    existing = {file.src_uri for file in files}
    generated |= {f"methods/{name}.md": "" for name in METHODS if f"methods/{name}.md" not in existing}
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    for name, source in ASSETS.items():
        files.append(File.generated(config, name, content=(WEBSITE / source).read_text(encoding="utf-8")))
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
    return [{title: pages[0] if len(pages) == 1 else pages} for title, pages in sections.items() if pages]


def citations() -> str:
    """How to cite the methods."""
    return (
        "# Citation\n\nIf you publish results that you computed with FedMe, cite the papers of the methods that you used, and "
        "give the version of the library (`fedme --version`), because details of a method may change between versions. The "
        "[deviations](methods/index.md) of a method from its paper are on its page.\n\n## Papers of the methods\n\n"
        f"{method_pages.papers()}\n## BibTeX\n\n```text\n{method_pages.bibtex()}\n```\n"
    )


LINK_OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)*(?:README|CONTRIBUTING|CHANGELOG|SECURITY|LICENSE|benchmarks|docker)[^)]*\)"
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert titles of code blocks to mkdocs' syntax, replace links to files outside the site, add generated text."""
    markdown = re.sub(r"^(```\w+) title=(\S+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)
    if page.file.src_uri in REPOSITORY_FILES:
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    for target, source in REPOSITORY_FILES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{source}\)", f"]({target})", markdown)
    markdown = LINK_OUTSIDE.sub(r"`\1`", markdown)
    name = page.file.src_uri.removeprefix("methods/").removesuffix(".md")
    if page.file.src_uri.startswith("methods/") and name != "index":
        return method_pages.page(METHODS[name], markdown)
    return markdown


EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Convert equations to MathML, which browsers render natively."""

    def mathml(match: "re.Match[str]") -> str:
        latex = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        if match[1] == "span":
            return convert(latex)
        return f'<div class="equation">{convert(latex, display="block")}</div>'

    return EQUATION.sub(mathml, html)
