"""A notebook as a page: its text, its code and what the code printed."""

import json
import re
from pathlib import Path

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal


def as_markdown(path: Path) -> str:
    """The cells in their order; what was printed stands in blocks of its own."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "image/png" in (data := output.get("data", {})):
                parts.append(f"![what this cell draws](data:image/png;base64,{''.join(data['image/png']).strip()})")
                continue
            text = COLOURS.sub("", "".join(output.get("text") or data.get("text/plain") or []))
            if text.strip() and not text.startswith("<IPython"):  # an object that only a notebook shows
                parts.append(f"```\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
