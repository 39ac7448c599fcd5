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
    first_screen,
    gain_view,
    html,
    label_view,
    lineage_view,
    naming,
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
    compared = [gain_view.comparisons(family, families) for family in families]
    views = [
        {
            "family": family,
            "seed": run.result["seed"],
            "folder": str(run.folder),
            "clients": list(run.clients),
            "rounds": len(run.rounds),
            **client_view.view(run, [other for _, other in runs]),
            "labels": label_view.view(run),
            "exchange": exchange_view.view(run),
            "lineage": lineage_view.view(run),
            "clusters": cluster_view.view(run),
            "privacy": privacy_view.view(run),
        }
        for family, run in runs
    ]
    return {
        "title": naming.title(families),
        "notes": first_screen.notes(families),
        "families": [
            {
                "label": family.label,
                "method": naming.method(family.method),
                **first_screen.view(family, one),
                "gain": gain_view.view(family, one),
            }
            for family, one in zip(families, compared, strict=True)
        ],
        "summary": summary_text.view(families, compared),
        "curves": curve_view.view(families),
        "runs": views,
        "first": _first(families, views),
        "setup": setup_view.view(families),
    }


def _first(families: Sequence[Family], views: Sequence[dict[str, Any]]) -> int:
    """The run to open on: one with an exchange of models, else one that sent anything, else the first."""
    exchanging = [index for index, run in enumerate(views) if run["exchange"]]
    joined = [index for index, run in enumerate(views) if not families[run["family"]].runs[0].isolated]
    return [*exchanging, *joined, 0][0]
