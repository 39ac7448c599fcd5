"""A notebook as a page: its text, its code and what the code printed."""

import json
from pathlib import Path


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
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain") or [])
            if text.strip():
                parts.append(f"```\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
