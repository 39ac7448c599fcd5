"""Real federations: init, server, node, submit, status, stop. Each wraps Flower's own commands, and prints them on request."""

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from fedme.cli.app import Json, Quiet, app, err, literal, out
from fedme.engines import flower
from fedme.experiment import views

deploy_app = typer.Typer(help="Real machines, data stays where it is: a federation on Flower.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The operator's folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print Flower's commands and do nothing.")]
INSECURE = "insecure: no encryption and no authentication. Whoever reaches the port can read everything and run code."


def _part(name: str) -> ModuleType:
    """A module of fedme.deploy, if Flower is installed."""
    flower.part("link")
    from importlib import import_module

    return import_module(f"fedme.deploy.{name}")


def _say(text: str) -> None:
    err.print(literal(text), highlight=False, soft_wrap=True)


@deploy_app.command()
def init(
    folder: Folder,
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT", help="A TOML file with data.name = 'sites'.")
    ] = None,
    sites: Annotated[str, typer.Option(help="Names of sites, with commas; again later to add some.")] = "",
    host: Annotated[str | None, typer.Option(help="The address to listen on; this machine alone by default.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on.")] = None,
    min_sites: Annotated[int | None, typer.Option(help="A run begins when so many are there; all by default.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption, no keys.")] = False,
) -> None:
    """Write everything a federation needs: certificates, keys, the experiment, a folder for every site."""
    kit, federation = _part("kit"), _part("federation")
    names = [name.strip() for name in sites.split(",") if name.strip()]
    asked = {"host": host, "port": port, "min_sites": min_sites or len(names) or None}
    settings = federation.Settings(insecure=insecure, **{key: value for key, value in asked.items() if value is not None})
    for name in kit.write(folder, experiment, names, settings):
        out.print(f"{folder / name}", highlight=False, soft_wrap=True)
    if federation.Federation.read(folder).settings.insecure:
        _say(f"warning: {INSECURE}")


@deploy_app.command()
def server(folder: Folder, dry_run: DryRun = False) -> None:
    """Run the server until Ctrl-C. What ends unasked is started again; a run goes on."""
    operate = _part("operate")
    federation = _part("federation").Federation.read(folder)
    if federation.settings.insecure:
        _say(f"warning: {INSECURE}")
    if dry_run:
        register = [federation.flwr("supernode", "register", str(key), "fedme") for key in federation.keys().values()]
        commands = [federation.superlink(), federation.superexec(), *([] if federation.settings.insecure else register)]
        print(_part("keeper").shown(federation.environment(), commands))
        return
    operate.serve(federation, _say)


@deploy_app.command()
def node(
    file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's file.")],
    dry_run: DryRun = False,
    check: Annotated[bool, typer.Option("--check", help="Read everything, say what was found, and end.")] = False,
) -> None:
    """Run a site's node until Ctrl-C. It tries until the server accepts it, and survives restarts of either side."""
    nodes = _part("node")
    site = _part("site").Site.read(file)
    if site.settings.server.insecure:
        _say(f"warning: {INSECURE}")
    if dry_run:
        print(_part("keeper").shown(_part("federation").environment(site.state / "flwr"), [nodes.command(site)]))
    elif check:
        out.print(nodes.check(site), highlight=False)
    else:
        nodes.run(site, _say)


@deploy_app.command()
def submit(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT", help="The experiment; the folder's by default.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--federation", help="The operator's folder; the experiment's by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run that is not done.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start a run and wait for its end. Ctrl-C stops waiting; the run goes on."""
    operate = _part("operate")
    federation = _part("federation").Federation.read(folder or (experiment.parent if experiment else Path()))
    if dry_run:
        words = ["run", str(federation.server / "app"), operate.CONNECTION, "--run-config", 'run="NAME"']
        print(_part("keeper").shown(federation.environment(), [federation.flwr(*words)]))
        return
    run = (
        operate.unfinished(federation)
        if resume
        else operate.new_run(federation, experiment or federation.folder / "experiment.toml")
    )
    operate.submit(federation, run)
    _say(f"run directory: {run}")
    if detach:
        return
    try:
        operate.follow(run, (lambda text: None) if quiet else _say)
    except KeyboardInterrupt:
        _say(f"the run goes on without being watched; `fedme deploy status {federation.folder}` looks at it")
        raise typer.Exit(130) from None
    views.results(run, "table", out, as_json)


@deploy_app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show the server, the sites and the runs."""
    found = _part("operate").status(_part("federation").Federation.read(folder))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    out.print(f"server at {found['address']}: {found['server']}", highlight=False)
    for name, word in found["sites"].items():
        out.print(f"site {literal(name)}: {word}", highlight=False)
    for name, run in found["runs"].items():
        out.print(f"run {literal(name)}: {run['status']}, {run['rounds']} of {run['of']} rounds", highlight=False)


@deploy_app.command()
def stop(folder: Folder, run: Annotated[bool, typer.Option("--run", help="Only the run; the server stays.")] = False) -> None:
    """Stop the run and the server. Sites wait for the server to come back."""
    for line in _part("operate").stop(_part("federation").Federation.read(folder), run):
        _say(line)
