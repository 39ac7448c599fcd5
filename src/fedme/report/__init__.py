"""A report: one HTML file, without a network, that tells and shows what one run or several came to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedme.experiment.files import RunError, write_text
from fedme.report import clients, clusters, curves, exchange, labels, lineage, page, privacy, setup, words
from fedme.report.runs import Family, families


def write(folders: Sequence[Path], target: Path) -> None:
    """Write the report of one or several runs; those that differ only in their seed are one line with a band."""
    text = page.render(story(families(folders)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror}") from error


def story(families: Sequence[Family]) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    runs = [run for family in families for run in family.runs]
    owners = [index for index, family in enumerate(families) for _ in family.runs]
    title = families[0].label if len(families) == 1 else f"{len(families)} experiments"
    return {
        "title": title,
        "families": [{"label": family.label, "method": family.method} for family in families],
        "words": words.view(families),
        "curves": curves.view(families),
        "runs": [
            {
                "family": owner,
                "seed": run.result["seed"],
                "folder": str(run.folder),
                "clients": list(run.clients),
                "rounds": len(run.rounds),
                **clients.view(run, runs),
                "labels": labels.view(run),
                "exchange": exchange.view(run),
                "lineage": lineage.view(run),
                "clusters": clusters.view(run),
                "privacy": privacy.view(run),
            }
            for owner, run in zip(owners, runs, strict=True)
        ],
        "setup": setup.view(families),
    }
