"""`fedme deploy`: init, server, node, submit, status, stop, audit. They run Flower's commands, or print them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.cli.app import Json, Quiet, Style, app, err, literal, out
from fedme.federation import flower
from fedme.results import views
from fedme.results.tables import render

deploy_app = typer.Typer(
    help="Run a federation on real machines with Flower; the data stays at the sites.", no_args_is_help=True
)
app.add_typer(deploy_app, name="deploy")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The operator's folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print Flower's commands without running them.")]
INSECURE = "warning: insecure: no encryption and no authentication. Anyone on the network can read and change all messages."


def _module(name: str) -> Any:
    """Import a module of fedme.deployment, which needs Flower."""
    return flower.load_module(f"deployment.{name}")


def _federation(folder: Path) -> Any:
    """Read the operator's folder; warn if its federation is insecure."""
    federation = _module("operator_folder").Federation.read(folder)
    if federation.settings.insecure:
        _log(INSECURE)
    return federation


def _log(text: str) -> None:
    err.print(literal(text), highlight=False, soft_wrap=True)


@deploy_app.command()
def init(
    folder: Folder,
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT", help="A TOML file with data.name = 'sites'.")
    ] = None,
    sites: Annotated[str, typer.Option(help="Names of sites, separated by commas; may be used again to add sites.")] = "",
    host: Annotated[str | None, typer.Option(help="Address that sites connect to; default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port that sites connect to; the next port is for this machine only.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to listen on, if it differs from --host; 0.0.0.0: all addresses.")
    ] = None,
    min_sites: Annotated[int | None, typer.Option(help="Sites that a run waits for before it starts; default: all.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption and no authentication.")] = False,
) -> None:
    """Create the files of a federation: certificates, keys, the experiment, and a folder per site."""
    names = [name.strip() for name in sites.split(",") if name.strip()]
    options = {"host": host, "port": port, "listen": listen, "min_sites": min_sites or len(names) or None}
    given = {key: value for key, value in options.items() if value is not None}
    settings = _module("operator_folder").Settings(insecure=insecure, **given)
    for name in _module("provisioning").write(folder, experiment, names, settings):
        out.print(f"{folder / name}", highlight=False, soft_wrap=True)
    _federation(folder)
    _log(f"next steps: see {folder / 'README.md'}")


@deploy_app.command()
def server(folder: Folder, dry_run: DryRun = False) -> None:
    """Run the server until Ctrl-C. Programs that end are started again, and runs continue."""
    federation, shell_line = _federation(folder), _module("supervisor").shell_line
    if not dry_run:
        _module("operator").serve(federation, _log)
        return
    print(shell_line(federation.environment()))
    print("# run each in its own terminal, or as a service")
    for command in federation.programs().values():
        print(shell_line(command()))
    print("# when they are running, run once per site")
    for name, key in {} if federation.settings.insecure else federation.keys().items():
        print(shell_line(federation.register(key), federation.registration(name)))


@deploy_app.command()
def node(
    file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's settings.")],
    dry_run: DryRun = False,
    check: Annotated[bool, typer.Option("--check", help="Check settings, model and data, print a summary, and exit.")] = False,
) -> None:
    """Run a site until Ctrl-C. It retries until the server accepts it, and reconnects after every restart."""
    nodes, shell_line = _module("node"), _module("supervisor").shell_line
    site = _module("site_settings").Site.read(file)
    if site.settings.server.insecure:
        _log(INSECURE)
    if dry_run:
        print(shell_line(nodes.environment(site)))
        print(shell_line(nodes.command(site)))
    elif check:
        out.print(nodes.check(site), highlight=False)
    else:
        nodes.run(site, _log)


@deploy_app.command()
def submit(
    experiment: Annotated[
        Path | None,
        typer.Argument(metavar="EXPERIMENT", help="The experiment; default: experiment.toml in the operator's folder."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--federation", help="The operator's folder; default: the folder of the experiment.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last unfinished run.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the run to end.")] = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start a run and wait until it ends. Ctrl-C stops waiting; the run continues."""
    operator, runs, shell_line = _module("operator"), _module("submitted_runs"), _module("supervisor").shell_line
    federation = _federation(folder or (experiment.parent if experiment else Path()))
    file = experiment or federation.folder / "experiment.toml"
    if dry_run:
        run = runs.unfinished(federation) if resume else runs.free_folder(federation, runs.read(federation, file))
        print(shell_line(federation.environment()))
        if not resume:
            print(shell_line(["mkdir", "-p", str(run)]))
            print(shell_line(["cp", str(file.resolve()), str(run / "config.toml")]))
        print(shell_line(federation.run(run.name)))
        return
    run = runs.unfinished(federation) if resume else runs.create(federation, file)
    operator.submit(federation, run)
    _log(f"run directory: {run}")
    if detach:
        return
    try:
        operator.follow(run, (lambda text: None) if quiet else _log)
    except KeyboardInterrupt:
        _log(f"the run continues; `fedme deploy status {federation.folder}` shows its status")
        raise typer.Exit(130) from None
    views.results(run, "table", out, as_json)


@deploy_app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show the status of the server, the sites and the runs."""
    state = _module("operator").status(_module("operator_folder").Federation.read(folder))
    if as_json:
        print(json.dumps(state, indent=2))
        return
    out.print(f"server at {state['address']}: {state['server']}", highlight=False)
    for name, site_status in state["sites"].items():
        out.print(f"site {literal(name)}: {site_status}", highlight=False)
    for name, run in state["runs"].items():
        late = f"; sites without their models: {', '.join(run['without_model'])}" if run["without_model"] else ""
        rounds = f"{run['status']}, {run['rounds']} of {run['of']} rounds"
        out.print(f"run {literal(name)}: {rounds}{literal(late)}", highlight=False)


@deploy_app.command()
def stop(
    folder: Folder, run: Annotated[bool, typer.Option("--run", help="Stop only the run, not the server.")] = False
) -> None:
    """Stop the run and the server. Sites reconnect when the server is started again."""
    for line in _module("operator").stop(_module("operator_folder").Federation.read(folder), run):
        _log(line)


@deploy_app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, or a site's state directory.")],
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show all transfers of a run or of a site, from the audit log that the server and every site keep."""
    log = _module("transfer_log")
    transfers = log.read(folder)
    if as_json:
        print(json.dumps(transfers, indent=2))
        return
    render(f"{len(transfers)} transfers, in {folder / log.NAME}", log.HEADER, log.cells(transfers), style, out)
