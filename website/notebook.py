"""Convert a notebook to a Markdown page: text, code and outputs."""

import json
import re
from pathlib import Path

STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # escape sequences of a terminal


def as_markdown(path: Path) -> str:
    """The cells in order; every output becomes a block."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "image/png" in (data := output.get("data", {})):
                parts.append(f"![output of this cell](data:image/png;base64,{''.join(data['image/png']).strip()})")
                continue
            if "<table" in (page := "".join(data.get("text/html", []))):  # of FedMe and pandas: other HTML is of a notebook
                parts.append(f'<div class="output">{" ".join(STYLE.sub("", page).split())}</div>')
                continue
            text = COLOURS.sub("", "".join(output.get("text") or data.get("text/plain") or []))
            if text.strip() and not text.startswith("<IPython"):  # an object that only a notebook can show
                parts.append(f"```\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
