"""A report: one self-contained HTML file with the results of one or several runs, in text and charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError, write_text
from fedme.report import (
    client_view,
    cluster_view,
    curve_view,
    exchange_view,
    html,
    joining_view,
    label_view,
    lineage_view,
    privacy_view,
    setup_view,
    summary_text,
)
from fedme.report.run_data import Family, families, shown


def write(folders: Sequence[Path], target: Path) -> None:
    """Write the report of one or several runs. Runs that differ only in their seed become one line with a band."""
    text = html.render(story(families(folders)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror}") from error


def story(families: Sequence[Family]) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    runs = [(index, run) for index, family in enumerate(shown(families)) for run in family.runs]
    return {
        "title": families[0].label if len(families) == 1 else f"{len(families)} experiments",
        "families": [{"label": family.label, "method": family.method} for family in families],
        "summary": summary_text.view(families),
        "curves": curve_view.view(families),
        "runs": [
            {
                "family": family,
                "seed": run.result["seed"],
                "folder": str(run.folder),
                "clients": list(run.clients),
                "rounds": len(run.rounds),
                **client_view.view(run, [other for _, other in runs]),
                "joining": joining_view.view(families[family], run),
                "labels": label_view.view(run),
                "exchange": exchange_view.view(run),
                "lineage": lineage_view.view(run),
                "clusters": cluster_view.view(run),
                "privacy": privacy_view.view(run),
            }
            for family, run in runs
        ],
        "setup": setup_view.view(families),
    }
