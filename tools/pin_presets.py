"""Write tests/config/presets.json, the resolved configuration of every preset; run it when a change of one is intended.

python tools/pin_presets.py
"""

import json
from pathlib import Path

from fedme.config.experiment import load, presets


def main() -> None:
    """Write the file."""
    path = Path(__file__).parents[1] / "tests/config/presets.json"
    lines = [f"{json.dumps(name)}: {json.dumps(load(name)[0].plain(), sort_keys=True)}" for name in presets()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
