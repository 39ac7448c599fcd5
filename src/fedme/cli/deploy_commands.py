"""`fedme deploy`: init, server, submit, status, stop, remove; node, budget, leave; audit. They run Flower's programs."""

import getpass
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.cli.app import Commands, Json, Quiet, Style, app, err, examples, literal, next_step, out, quoted
from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import finite
from fedme.federation import flower
from fedme.results import verdicts, views
from fedme.results.tables import print_prose, render
from fedme.running.progress import Display

deploy_app = typer.Typer(
    cls=Commands,
    epilog=examples("fedme deploy init federation experiment.toml --sites a,b,c", "fedme deploy server federation"),
    help="Run a federation on real machines with Flower; the data stays at the sites.",
    no_args_is_help=True,
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
    print_prose([text], err)


@deploy_app.command(
    epilog=examples(
        "fedme deploy init federation my.toml --sites a,b,c --host fl.example.org",
        "fedme deploy init federation --sites d",
    )
)
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
    if (folder / _module("operator_folder").NAME).exists():
        _keep_settings(folder, {key: given[key] for key in ("host", "port", "listen") if key in given}, min_sites)
    settings = _module("operator_folder").Settings(insecure=insecure, **given)
    for name in _module("provisioning").write(folder, experiment, names, settings):
        out.print(f"{folder / name}", highlight=False, soft_wrap=True)
    _federation(folder)
    _log(f"next steps: see {folder / 'README.md'}")


def _keep_settings(folder: Path, given: dict[str, Any], min_sites: int | None) -> None:
    """Refuse settings that differ from those of an existing federation: the sites have them, and the certificate."""
    federation = _module("operator_folder").Federation.read(folder)
    wanted = given | ({} if min_sites is None else {"min_sites": min_sites})
    for name, value in wanted.items():
        if (present := getattr(federation.settings, name)) != value:
            file = folder / _module("operator_folder").NAME
            raise ConfigError(f"{file}: {name} is {present!r} already, got {value!r}; edit the file, or leave the option out")


@deploy_app.command(epilog=examples("fedme deploy server federation", "fedme deploy server federation --dry-run"))
def server(folder: Folder, dry_run: DryRun = False) -> None:
    """Run the server until Ctrl-C. Programs that end are started again, and runs continue."""
    federation, shell_line = _federation(folder), _module("supervisor").shell_line
    if not dry_run:
        _module("server").serve(federation, _log)
        return
    print(shell_line(federation.environment()))
    print("# run each in its own terminal, or as a service")
    for command in federation.programs().values():
        print(shell_line(command()))
    print("# when they are running, run once per site")
    for name, key in {} if federation.settings.insecure else federation.keys().items():
        print(shell_line(federation.register(key), federation.registration(name)))


@deploy_app.command(epilog=examples("fedme deploy node site.toml --check", "fedme deploy node site.toml"))
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
        print(shell_line(_module("node_supervisor").with_free_port(nodes.command(site))))
    elif check:
        out.print(nodes.check(site), highlight=False)
        next_step(f"`fedme deploy node {quoted(file)}` runs the site")
    else:
        nodes.run(site, _log)


@deploy_app.command(epilog=examples("fedme deploy verdict site.toml", "fedme deploy verdict site.toml --json"))
def verdict(
    file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's settings.")],
    run: Annotated[str | None, typer.Option("--run", help="The name of a run; default: the newest finished one.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Does joining help this site? Run at the site: it trains alone on its own samples and compares; nothing is sent."""
    site_verdict = _module("site_verdict")
    with Display(err, quiet) as display:
        folder, judged = site_verdict.judge(_module("site_settings").Site.read(file), run, display)
    if as_json:
        print(json.dumps(finite(verdicts.plain(judged) | {"folder": str(folder)}), indent=2))
        return
    measure = judged.measure
    lines = [
        f"{judged.client}, {judged.samples} test samples: {measure.title} {measure.text(judged.value)} with the federation, "
        f"{measure.text(judged.local)} alone ({judged.local_arch}), {measure.text(judged.constant)} with a constant answer.",
        f"Verdict: {judged.decision}. {judged.words()}.",
        f"The site {site_verdict.choice_of(folder)}.",
        *verdicts.alarms([judged]),
    ]
    print_prose(lines, out)
    next_step(f"`fedme evaluate {quoted(folder)} --details` evaluates the site's model")


@deploy_app.command(
    epilog=examples("fedme deploy submit federation/experiment.toml", "fedme deploy submit --federation federation --resume")
)
def submit(
    experiment: Annotated[
        Path | None,
        typer.Argument(metavar="EXPERIMENT", help="The experiment; default: experiment.toml in the operator's folder."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--federation", help="The operator's folder; default: the folder of the experiment.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last run that was stopped or given up.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the run to end.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a server that is not there yet.")] = 300.0,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start a run and wait until it ends. Ctrl-C stops waiting; the run continues.

    The same command again follows the same run: a second run of an experiment starts when the first is done.
    """
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
    run = operator.submit(federation, runs.unfinished(federation) if resume else runs.read(federation, file), wait, _log)
    _log(f"run directory: {run}")
    if detach:
        next_step(f"`fedme deploy status {quoted(federation.folder)}` shows its progress")
        return
    try:
        operator.follow(federation, run, (lambda text: None) if quiet else _log)
    except KeyboardInterrupt:
        _log(f"the run continues; `fedme deploy status {federation.folder}` shows its status")
        raise typer.Exit(130) from None
    views.results(run, "table", out, as_json)
    next_step(f"`fedme report {quoted(run)}` draws it; every site asks `fedme deploy verdict site.toml` whether it gained")


@deploy_app.command(epilog=examples("fedme deploy status federation", "fedme deploy status federation --serve 8080"))
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The operator's folder, or a site's folder or site.toml.")],
    serve: Annotated[
        int | None, typer.Option(metavar="PORT", help="Show it as a page on this machine, with JSON and Prometheus metrics.")
    ] = None,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show the status of a federation to its operator, or that of a site to the site."""
    statuses, compute = _module("status"), _status_of(folder)
    if serve is not None:
        with _module("status_page").server(compute, serve) as page:
            _log(f"http://127.0.0.1:{page.server_address[1]}/ shows the status, /metrics is for Prometheus; Ctrl-C stops")
            try:
                page.serve_forever()
            except KeyboardInterrupt:
                return
    state = compute()
    if as_json:
        print(json.dumps(state, indent=2))
        return
    for name, text in statuses.facts(state):
        out.print(f"{name}: {literal(text)}", highlight=False)
    for text in statuses.warnings(state):
        _log(f"warning: {text}")
    if "sites" in state:
        for title, (header, rows) in {"sites": statuses.site_table(state), "runs": statuses.run_table(state)}.items():
            render(title, header, rows, style, out)
    next_step(f"`fedme deploy status {quoted(folder)} --serve 8080` shows it as a page that stays current")


def _status_of(folder: Path) -> Callable[[], dict[str, Any]]:
    """What computes the status of an operator's folder or of a site."""
    statuses, settings = _module("status"), _module("site_settings")
    if folder.name == settings.NAME or (folder / settings.NAME).exists():
        site = settings.Site.read(folder if folder.name == settings.NAME else folder / settings.NAME)
        return lambda: statuses.of_site(site)
    federation = _module("operator_folder").Federation.read(folder)
    return lambda: statuses.of_server(federation)


@deploy_app.command(epilog=examples("fedme deploy renew federation", "fedme deploy renew ."))
def renew(folder: Folder) -> None:
    """Issue the server's certificates again, for three more years. A running server uses them at once; runs continue."""
    for name in _module("provisioning").renew(_module("operator_folder").Federation.read(folder)):
        out.print(f"{folder / name}", highlight=False, soft_wrap=True)
    _log("send the new ca.crt to every site before the old one expires; a site reads it when its node starts")


@deploy_app.command(epilog=examples("fedme deploy stop federation", "fedme deploy stop federation --run"))
def stop(
    folder: Folder, run: Annotated[bool, typer.Option("--run", help="Stop only the run, not the server.")] = False
) -> None:
    """Stop the run and the server. Sites reconnect when the server is started again."""
    for line in _module("operator").stop(_module("operator_folder").Federation.read(folder), run):
        _log(line)
    next_step(f"`fedme deploy server {quoted(folder)}` starts it again, `fedme deploy submit --resume` continues a stopped run")


@deploy_app.command(epilog=examples("fedme deploy audit federation/runs/hospitals", "fedme deploy audit site --format csv"))
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, or a site's folder.")],
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show all transfers of a run, or everything that a site has sent and received in all runs."""
    log, sites = _module("transfer_log"), _module("site_settings")
    if (folder / sites.NAME).exists():
        folder = sites.Site.read(folder / sites.NAME).records
    transfers = log.read(folder)
    if as_json:
        print(json.dumps(transfers, indent=2))
        return
    render(f"{len(transfers)} transfers, in {folder / log.NAME}", log.HEADER, log.cells(transfers), style, out)
    next_step("`--format csv` gives them to other programs")


@deploy_app.command(
    epilog=examples("fedme deploy budget site.toml", 'fedme deploy budget site.toml --new-data --reason "samples of 2027"')
)
def budget(
    file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's settings.")],
    new_data: Annotated[
        bool, typer.Option("--new-data", help="Open another account, because all training samples are new; asks first.")
    ] = False,
    reason: Annotated[str, typer.Option(help="With --new-data: what is new; it is logged.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --new-data: do not ask.")] = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show what this site has spent of its privacy, over all runs and servers."""
    site = _module("site_settings").Site.read(file)
    account = _module("privacy_account").PrivacyAccount.of(site)
    if new_data:
        question = (
            f"The account of {site.settings.name} is at epsilon {account.epsilon():.3g}. A new one is right only if no "
            "training sample that was used before is used again. Open a new account?"
        )
        if not yes:
            typer.confirm(question, abort=True, err=True)
        account.open_another(getpass.getuser(), reason)
        _log(f"opened a new account in {account.path}; the lines of the old one remain")
        return
    runs, closed = account.runs(), account.closed()
    state = {"epsilon": account.epsilon(), "limit": account.limit, "delta": account.delta, "runs": runs, "closed": closed}
    if as_json:
        print(json.dumps(state, indent=2))
        return
    limit = "no limit" if account.limit is None else f"limit {account.limit:g}"
    title = f"epsilon {state['epsilon']:.3g}, {limit}, delta {account.delta:g}, in {account.path}"
    header = ("run", "server", "first", "last", "answers", "epsilon")
    cells = [[*(str(run[name]) for name in header[:-1]), f"{run['epsilon']:.3g}"] for run in runs]
    render(title, header, cells, style, out)
    for line in closed:
        _log(f"{line['time']}: {line['by']} opened a new account at epsilon {line['closed_at']:.3g}: {line['new_data']}")
    next_step("[privacy] in site.toml sets a limit, above which the site refuses runs")


@deploy_app.command(
    epilog=examples("fedme deploy leave site.toml", 'fedme deploy leave site.toml --reason "the study is over"')
)
def leave(
    file: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's settings.")],
    reason: Annotated[str, typer.Option(help="Why; it is logged at the site.")] = "",
) -> None:
    """Leave the federation, at the site: stop the node and refuse every request. What was sent before is not undone."""
    _log(_module("node").leave(_module("site_settings").Site.read(file), reason))
    next_step("ask the operator for `fedme deploy remove`, so that the server refuses the key too")


@deploy_app.command(epilog=examples("fedme deploy remove federation hospital-a", "fedme deploy remove . hospital-a"))
def remove(folder: Folder, name: Annotated[str, typer.Argument(help="The site's name.")]) -> None:
    """Remove a site, at the server: its key is refused from now on. What it has contributed is not undone."""
    _log(_module("operator").remove(_module("operator_folder").Federation.read(folder), name))
    next_step(f"`fedme deploy status {quoted(folder)}` lists the sites that remain")
