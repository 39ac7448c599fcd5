"""The configuration and the environment of every run."""

import json
from collections.abc import Sequence
from typing import Any

from fedme.report.run_data import Family
from fedme.results.summary import flattened


def view(families: Sequence[Family]) -> dict[str, Any]:
    """Every setting of every family except seed and output, which differ between its runs; every run's environment."""
    tables = [flattened(family.runs[0].config) for family in families]
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key not in ("seed", "output")]
    differing = {key for family in families for key in family.differs} | {"method.name"}
    return {
        "settings": [[key, *(_text(table[key]) if key in table else "" for table in tables)] for key in keys],
        "differing": [key for key in keys if key in differing and len(families) > 1],
        "environments": [
            {key: _text(value) for key, value in flattened(run.environment).items()}
            for family in families
            for run in family.runs
        ],
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
