"""One experiment with many settings: sweep."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedme.cli.app import (
    FileArgument,
    Json,
    NoWait,
    OnRay,
    Overrides,
    Quiet,
    Rounds,
    ShardOption,
    Style,
    all_runs,
    app,
    err,
    examples,
    next_step,
    out,
    print_note,
    print_plans,
    source,
)
from fedme.config.experiment import DEMO
from fedme.core.atomic_files import RunError
from fedme.core.processors import processors
from fedme.results.tables import render
from fedme.results.views import spread_text
from fedme.running import sweep as sweeps
from fedme.running.progress import Display
from fedme.running.ray_jobs import on_ray
from fedme.running.run_queue import Batch
from fedme.running.shards import parse_shard


@app.command(
    epilog=examples(
        "fedme sweep digits-fedme --over train.lr=0.01,0.05,0.1 --seeds 3",
        "fedme sweep my.toml --over method.name=fedavg,fedme --jobs 2",
    )
)
def sweep(
    file: FileArgument = None,
    overrides: Overrides = None,
    rounds: Rounds = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V,...", help="A key and its values; repeat the option for several keys.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Combine first values with first values, and so on, instead of all combinations.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The parent of the run directories; runs/sweep-NAME by default.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel runs.")] = 1,
    model: Annotated[sweeps.Decisive, typer.Option(help="Models whose validation results decide.")] = "personal",
    shard: ShardOption = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the runs, and run nothing.")] = False,
    ray: OnRay = None,
    no_wait: NoWait = False,
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every combination of the values of some keys with every seed. Repeat the command to continue a sweep."""
    name, words = source(file, overrides, rounds=rounds)
    root = output if output is not None else Path("runs") / f"sweep-{Path(name or DEMO).stem}"
    overs = [sweeps.swept_key(word) for word in over or []]
    points = sweeps.points(name, words, overs, range(seeds), root, together)
    plans = [run for number in range(seeds) for run in (point.runs[number] for point in points)]
    share = parse_shard(shard)
    if show_list:
        return print_plans(plans, share, style, as_json)
    with Display(err, quiet) as display:
        launch = on_ray(ray) if ray is not None else None
        outcomes = Batch(display, min(jobs, processors()), wait=not no_wait, launch=launch).run(share.of(plans))
    scored = sweeps.scores(points, model)
    measure = scored[0].measure
    metric = ("" if measure.key == "accuracy" else f" {measure.title}") + (" %" if measure.percent else "")
    keys = [over.key for over in overs]
    header = [*keys, f"validation{metric}", f"test{metric}", "seeds", ""]
    rows = [
        [
            *score.point.values,
            spread_text(measure, score.validation) if score.validation else "",
            spread_text(measure, score.test) if score.test else "",
            str(len(score.test)),
            "best by validation" if score.best else "",
        ]
        for score in scored
    ]
    if as_json:
        plain = [
            {
                "settings": dict(zip(keys, score.point.values, strict=True)),
                "validation": score.validation,
                "test": score.test,
                "best": score.best,
                "complete": score.complete,
                "runs": [str(run.folder) for run in score.point.runs],
            }
            for score in scored
        ]
        print(json.dumps(plain, indent=2))
    else:
        kind = "fine-tuned" if model == "finetuned" else model
        render(f"{kind} models after the last round, mean over clients, in {root}", header, rows, style, out)
    if failed := [outcome for outcome in outcomes if outcome.error]:
        raise RunError(f"{len(failed)} of {len(outcomes)} runs failed; the first, {failed[0].planned.name}: {failed[0].error}")
    if incomplete := sum(not score.complete for score in scored):
        print_note(f"{incomplete} of {len(scored)} settings have unfinished runs, and are not compared with the others yet")
    elif not any(score.best for score in scored):
        print_note("no settings selected: there is no validation data (data.val), and test data must not select")
    runs = all_runs([run.folder for run in plans])
    next_step(f"`fedme compare {runs}` compares the runs, `fedme report {runs}` draws them")
