"""Curves as PNG and PDF; needs matplotlib, from the extra `plots`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError
from fedme.reproduction.catalogue import Panel, Result
from fedme.reproduction.findings import Findings, points
from fedme.results.summary import spread

FORMATS = ("png", "pdf")
MISSING = "curves need matplotlib: pip install 'fedme[plots]'"
WIDTH, HEIGHT = 4.2, 3.2  # inches of a panel


def possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: Result, findings: Findings, folder: Path) -> list[Path]:
    """Plot the curves of a result; no files if nothing is finished or the result has no curves."""
    panels = [panel for panel in result.panels if any(series.run in findings.runs for series in panel.series)]
    if result.plot == "rows":
        columns = [column.name for column in result.columns if _over_rows(result, column.name, findings)]
        return _figure(result, findings, columns, folder) if columns else []
    return _figure(result, findings, panels, folder) if panels else []


def _figure(result: Result, findings: Findings, panels: Sequence[Panel | str], folder: Path) -> list[Path]:
    if not possible():
        raise RunError(MISSING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, number)
        if isinstance(panel, Panel):
            _panel(axes, panel, findings)
        else:
            names, values = zip(*_over_rows(result, panel, findings), strict=True)
            axes.plot(names, values, marker="o")
            axes.set(title=panel, ylabel="test accuracy (%)")
        axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in FORMATS:
        path = folder / f"{result.name}-{findings.scale}.{suffix}"
        # Without dates and versions, so that the same runs give identical files.
        metadata: dict[str, Any] = (
            {"Software": None} if suffix == "png" else {"CreationDate": None, "Producer": None, "Creator": None}
        )
        figure.savefig(path, dpi=110, metadata=metadata)
        written.append(path)
    return written


def _panel(axes: Any, panel: Panel, findings: Findings) -> None:
    for number, series in enumerate(panel.series):
        lines = [dict(points(run, series.measure)) for run in findings.runs.get(series.run, {}).values()]
        shared = sorted(set.intersection(*(set(line) for line in lines))) if lines else []
        if shared:
            means = [spread([line[t] for line in lines])[0] for t in shared]
            color = f"C{number}"  # the same in every panel, even if curves are missing
            axes.plot([t + 1 for t in shared], means, label=series.name, linewidth=1.4, color=color)
            if len(lines) > 1:
                low, high = ([pick(line[t] for line in lines) for t in shared] for pick in (min, max))
                axes.fill_between([t + 1 for t in shared], low, high, color=color, alpha=0.15)
    axes.set(title=panel.title, xlabel="round", ylabel=panel.y)
    axes.legend(fontsize="small")


def _over_rows(result: Result, column: str, findings: Findings) -> list[tuple[str, float]]:
    cells = [cell for cell in result.cells if cell.column == column]
    rows = [(cell.row, findings.values(cell.run, cell.measure)) for cell in cells]
    return [(row, spread(list(values.values()))[0]) for row, values in rows if values]
