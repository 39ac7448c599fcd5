"""Privacy audits: audit."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.auditing.run_audit import EVERYBODY, audit
from fedme.cli import completion
from fedme.cli.app import Imports, Json, Quiet, Style, app, err, examples, next_step, out, quoted
from fedme.results.tables import render
from fedme.running.progress import Display


@app.command("audit", epilog=examples("fedme audit runs/first", "fedme audit runs/first --clients --shadows 32"))
def audit_command(
    folder: Annotated[Path, typer.Argument(help="The directory of a finished run.", autocompletion=completion.runs)],
    clients: Annotated[bool, typer.Option("--clients", "-c", help="Print results per client, too.")] = False,
    shadows: Annotated[int, typer.Option(help="Shadow models per architecture, an even number.", min=2)] = 16,
    imports: Imports = False,
    style: Style = "table",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack the models that clients share: infer which samples they were trained on (membership inference)."""
    with Display(err, quiet) as display:
        result = audit(folder, display, shadows + shadows % 2, imports)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    rows = [_cells(row) for row in result["rows"] if clients or row["client"] == EVERYBODY]
    header = ["client", "seen by", "model", "attack", "AUC", "95 %", "TPR at 1 %", "95 %", "members", "others"]
    render(f"membership inference on the models that clients share, in {folder}", header, rows, style, out)
    if style == "table":
        out.print(
            "AUC 0.5 is guessing, 1 is certainty. TPR at 1 %: fraction of members detected at a false positive rate of 1 %."
        )
    next_step(
        f"`fedme report {quoted(folder)}` shows it beside the results; [privacy] in the experiment bounds what models tell"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    names = [row["client"], row["seen by"], row["model"], row["attack"]]
    auc = [f"{row['auc']:.3f}", f"{row['auc_low']:.3f} to {row['auc_high']:.3f}"]
    rate = [f"{100 * row['found']:.1f} %", f"{100 * row['found_low']:.1f} to {100 * row['found_high']:.1f}"]
    return [*names, *auc, *rate, str(row["members"]), str(row["others"])]
