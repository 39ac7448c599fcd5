"""Real federations: init, server, node, submit, status, stop, audit. Each wraps Flower's commands and can print them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from fedme.cli.app import Json, Quiet, Style, app, err, literal, out
from fedme.federation import flower
from fedme.results import views
from fedme.results.tables import render

deploy_app = typer.Typer(help="Real machines, data stays where it is: a federation on Flower.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The operator's folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print Flower's commands and do nothing.")]
INSECURE = "insecure: no encryption and no authentication. Whoever is on the way can read and change everything."


def _part(name: str) -> ModuleType:
    """A module of fedme.deployment, if Flower is installed."""
    flower.part("requests")
    from importlib import import_module

    return import_module(f"fedme.deployment.{name}")


def _say(text: str) -> None:
    err.print(literal(text), highlight=False, soft_wrap=True)


@deploy_app.command()
def init(
    folder: Folder,
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT", help="A TOML file with data.name = 'sites'.")
    ] = None,
    sites: Annotated[str, typer.Option(help="Names of sites, with commas; again later to add some.")] = "",
    host: Annotated[str | None, typer.Option(help="The address that sites connect to; this machine by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; the next one is for this machine alone.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="Where to listen for sites, if not at --host: 0.0.0.0 is everywhere.")
    ] = None,
    min_sites: Annotated[int | None, typer.Option(help="A run begins when so many are there; all by default.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption, no keys.")] = False,
) -> None:
    """Write everything a federation needs: certificates, keys, the experiment, a folder for every site."""
    kit, federation = _part("provisioning"), _part("operator_folder")
    names = [name.strip() for name in sites.split(",") if name.strip()]
    asked = {"host": host, "port": port, "listen": listen, "min_sites": min_sites or len(names) or None}
    settings = federation.Settings(insecure=insecure, **{key: value for key, value in asked.items() if value is not None})
    for name in kit.write(folder, experiment, names, settings):
        out.print(f"{folder / name}", highlight=False, soft_wrap=True)
    if federation.Federation.read(folder).settings.insecure:
        _say(f"warning: {INSECURE}")
    _say(f"{folder / 'README.md'} says what to do next")


@deploy_app.command()
def server(folder: Folder, dry_run: DryRun = False) -> None:
    """Run the server until Ctrl-C. What ends unasked is started again; a run goes on."""
    operate = _part("operator")
    federation = _part("operator_folder").Federation.read(folder)
    if federation.settings.insecure:
        _say(f"warning: {INSECURE}")
    if dry_run:
        keys = {} if federation.settings.insecure else federation.keys()
        shown = _part("supervisor").shown
        print(shown(federation.environment()))
        print("# in terminals of their own, or as services")
        for command in (federation.superlink(), federation.superexec(), federation.gate()):
            print(shown(command))
        print("# when they run, once for every site")
        for name, key in keys.items():
            print(shown(federation.register(key), federation.registered(name)))
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
    site = _part("site_settings").Site.read(file)
    if site.settings.server.insecure:
        _say(f"warning: {INSECURE}")
    if dry_run:
        print(_part("supervisor").shown(nodes.programs(site)))
        print(_part("supervisor").shown(nodes.command(site)))
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
    operate, runs = _part("operator"), _part("submitted_runs")
    federation = _part("operator_folder").Federation.read(folder or (experiment.parent if experiment else Path()))
    if federation.settings.insecure:
        _say(f"warning: {INSECURE}")
    file = experiment or federation.folder / "experiment.toml"
    if dry_run:
        folder = runs.unfinished(federation) if resume else runs.free(federation, runs.read(federation, file))
        shown = _part("supervisor").shown
        print(shown(federation.environment()))
        if not resume:
            print(shown(["mkdir", "-p", str(folder)]))
            print(shown(["cp", str(file.resolve()), str(folder / "config.toml")]))
        print(shown(federation.run(folder.name)))
        return
    run = runs.unfinished(federation) if resume else runs.new(federation, file)
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
    found = _part("operator").status(_part("operator_folder").Federation.read(folder))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    out.print(f"server at {found['address']}: {found['server']}", highlight=False)
    for name, word in found["sites"].items():
        out.print(f"site {literal(name)}: {word}", highlight=False)
    for name, run in found["runs"].items():
        owed = f"; without their models: {', '.join(run['without_model'])}" if run["without_model"] else ""
        out.print(
            f"run {literal(name)}: {run['status']}, {run['rounds']} of {run['of']} rounds{literal(owed)}", highlight=False
        )


@deploy_app.command()
def stop(folder: Folder, run: Annotated[bool, typer.Option("--run", help="Only the run; the server stays.")] = False) -> None:
    """Stop the run and the server. Sites wait for the server to come back."""
    for line in _part("operator").stop(_part("operator_folder").Federation.read(folder), run):
        _say(line)


@deploy_app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, or a site's state.")],
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show what went where: a line for every transfer, from the log that the server and every site keep."""
    log = _part("transfer_log")
    found = log.read(folder)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    render(f"{len(found)} transfers, in {folder / log.NAME}", log.HEADER, log.cells(found), style, out)
