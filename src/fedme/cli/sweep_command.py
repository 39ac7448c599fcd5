"""One experiment with many settings: sweep."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedme.cli.app import FileArgument, Json, Overrides, Quiet, Style, app, err, out, source
from fedme.config.experiment import DEMO
from fedme.core.atomic_files import RunError
from fedme.core.processors import processors
from fedme.results.tables import render
from fedme.results.views import spread_text
from fedme.running import sweep as sweeps
from fedme.running.progress import Display
from fedme.running.run_queue import Batch


@app.command()
def sweep(
    file: FileArgument = None,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V,...", help="A key and its values; may be repeated.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="First values with first values, not every combination.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, ...")] = 1,
    output: Annotated[Path | None, typer.Option(help="Where the run directories are; runs/sweep-NAME by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    model: Annotated[Literal["personal", "global"], typer.Option(help="Whose results on validation data choose.")] = "personal",
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try settings: every combination of the values of some keys, times seeds. The same command again goes on."""
    name, words = source(file, overrides)
    root = output if output is not None else Path("runs") / f"sweep-{Path(name or DEMO).stem}"
    overs = [sweeps.swept_key(word) for word in over or []]
    found = sweeps.points(name, words, overs, range(seeds), root, together)
    plans = [run for number in range(seeds) for run in (point.runs[number] for point in found)]
    with Display(err, quiet) as display:
        outcomes = Batch(display, min(jobs, processors())).run(plans)
    scored = sweeps.scores(found, model)
    measure = scored[0].measure
    what = "" if measure.key == "accuracy" else f"{measure.title} "
    sign = " %" if measure.percent else ""
    header = [*(each.key for each in overs), f"validation {what}".strip() + sign, f"test {what}".strip() + sign, "seeds", ""]
    rows = [
        [
            *each.point.values,
            spread_text(measure, each.validation) if each.validation else "",
            spread_text(measure, each.test) if each.test else "",
            str(len(each.test)),
            "best by validation" if each.best else "",
        ]
        for each in scored
    ]
    if as_json:
        keys = [each.key for each in overs]
        plain = [
            {
                "settings": dict(zip(keys, each.point.values, strict=True)),
                "validation": each.validation,
                "test": each.test,
                "best": each.best,
                "runs": [str(run.folder) for run in each.point.runs],
            }
            for each in scored
        ]
        print(json.dumps(plain, indent=2))
    else:
        render(f"{model} models after the last round, mean over clients, in {root}", header, rows, style, out)
    if failed := [each for each in outcomes if each.error]:
        raise RunError(f"{len(failed)} of {len(plans)} runs failed; the first, {failed[0].planned.name}: {failed[0].error}")
    if not any(each.best for each in scored):
        err.print("note: without validation data (data.val) nothing can be chosen: test data must not choose")
