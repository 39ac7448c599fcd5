"""The status of a federation, as its operator or one of its sites sees it: plain values for `--json`, a page and Prometheus."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedme import __version__
from fedme.config.experiment import load
from fedme.deployment import append_only, attempts, expiry, operator, submitted_runs, transfer_log
from fedme.deployment.expiry import days_left
from fedme.deployment.node_supervisor import CONNECTION_FILE
from fedme.deployment.operator_folder import Federation
from fedme.deployment.privacy_account import PrivacyAccount
from fedme.deployment.site_settings import Site
from fedme.results import records, summary


def of_server(federation: Federation) -> dict[str, Any]:
    """What the operator can know: the server, its sites and its runs."""
    known = operator.sites_of_flower(federation)
    sites: dict[str, dict[str, Any]] = {name: {"status": "not registered", "since": None} for name in federation.keys()}  # noqa: SIM118
    sites |= known or {}
    if known is None:
        sites = {name: {"status": "unknown: the server is down", "since": None} for name in sites}
    runs = {folder.name: _run(folder) for folder in submitted_runs.all_runs(federation)}
    folders = [federation.runs / name for name in runs]
    for name, site in sites.items():
        site |= _traffic(line for folder in folders for line in _lines(folder / transfer_log.NAME) if line["peer"] == name)
        site["refused"] = sum(_refused(folder, name) for folder in folders)
    return {
        "server": "down" if known is None else "up",
        "address": federation.address,
        "fedme": __version__,
        "disk_free": shutil.disk_usage(federation.folder).free,
        "certificates": {name: days_left(federation.server / name) for name in ("server.crt", "ca.crt")},
        "sites": sites,
        "runs": runs,
    }


def of_site(site: Site) -> dict[str, Any]:
    """What a site can know without asking the server."""
    server, account = site.settings.server, PrivacyAccount.of(site)
    lines = _lines(site.records / transfer_log.NAME)
    rounds = [line["round"] for line in lines if line["round"] is not None]
    state: dict[str, Any] = _json(site.state / CONNECTION_FILE) if submitted_runs.running(site.state) else {}
    return {
        "site": site.settings.name,
        "server": server.address,
        "fedme": __version__,
        "node": "running" if submitted_runs.running(site.state) else "not running",
        "connected_since": state.get("connected_since"),
        "last_problem": state.get("last_problem"),
        "run": lines[-1]["run"] if lines else None,
        "round": rounds[-1] if rounds else None,
        **_traffic(lines),
        "epsilon": account.epsilon(),
        "epsilon_limit": account.limit,
        "disk_free": shutil.disk_usage(site.folder).free,
        "certificates": {"ca.crt": None if server.insecure else days_left(site.path(server.certificate))},
    }


def warnings(status: Mapping[str, Any]) -> list[str]:
    """What needs attention soon."""
    return expiry.warnings(status["certificates"], expiry.RENEW if "sites" in status else expiry.ASK)


def facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is not about single sites and runs, as names and texts."""
    days = ", ".join(f"{name}: {left} days left" for name, left in status["certificates"].items() if left is not None)
    rows = {"FedMe": status["fedme"], "free disk": _bytes(status["disk_free"]), "certificates": days or "none (insecure)"}
    if "sites" in status:
        return [("server", status["server"]), *rows.items()]
    limit = "no limit" if status["epsilon_limit"] is None else f"limit {status['epsilon_limit']:g}"
    own = {
        "node": status["node"],
        "connected": f"since {status['connected_since']}" if status["connected_since"] else "no",
        "last problem": status["last_problem"] or "none",
        "last run": f"{status['run']}, round {status['round']}" if status["run"] is not None else "none",
        "last message": status["last_message"] or "none",
        "sent": _bytes(status["sent"]),
        "received": _bytes(status["received"]),
        "privacy spent": f"epsilon {status['epsilon']:.3g}, {limit}",
    }
    return [*own.items(), *rows.items()]


def site_table(status: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The sites, as header and rows."""
    header = ("site", "status", "since", "last message", "received", "sent", "refused replies")
    return header, [
        [
            name,
            site["status"],
            site["since"] or "",
            site["last_message"] or "",
            _bytes(site["received"]),
            _bytes(site["sent"]),
            str(site["refused"]),
        ]
        for name, site in status["sites"].items()
    ]


def run_table(status: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The runs, as header and rows."""
    header = ("run", "status", "rounds", "sites without their models", "last failure")
    return header, [
        [name, run["status"], f"{run['rounds']} of {run['of']}", ", ".join(run["without_model"]), run["failure"] or ""]
        for name, run in status["runs"].items()
    ]


def _bytes(count: int) -> str:
    unit, size = next((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= size or size == 1e3)
    return f"{count / size:.1f} {unit}"


def prometheus(status: Mapping[str, Any]) -> str:
    """The numbers of a server's status in Prometheus' text format."""
    lines = ["# TYPE fedme_up gauge", f"fedme_up {int(status['server'] == 'up')}"]
    lines += ["# TYPE fedme_disk_free_bytes gauge", f"fedme_disk_free_bytes {status['disk_free']}"]
    for name, kind in (("received", "counter"), ("sent", "counter"), ("refused", "counter")):
        metric = "fedme_site_refused_replies_total" if name == "refused" else f"fedme_site_{name}_bytes_total"
        lines.append(f"# TYPE {metric} {kind}")
        lines += [f'{metric}{{site="{_label(site)}"}} {values[name]}' for site, values in status["sites"].items()]
    lines.append("# TYPE fedme_site_online gauge")
    online = operator.ONLINE
    lines += [f'fedme_site_online{{site="{_label(s)}"}} {int(v["status"] == online)}' for s, v in status["sites"].items()]
    lines.append("# TYPE fedme_run_rounds gauge")
    lines += [f'fedme_run_rounds{{run="{_label(run)}"}} {values["rounds"]}' for run, values in status["runs"].items()]
    lines.append("# TYPE fedme_certificate_days_left gauge")
    days = {name: left for name, left in status["certificates"].items() if left is not None}
    lines += [f'fedme_certificate_days_left{{file="{name}"}} {left}' for name, left in days.items()]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _run(folder: Path) -> dict[str, Any]:
    failure, done = attempts.failure(folder), submitted_runs.done(folder)
    status = "running" if submitted_runs.running(folder) else "done" if done else "waiting"
    return {
        "status": "stopped" if status == "waiting" and (failure is None or failure.final) else status,
        "rounds": submitted_runs.rounds_done(folder),
        "of": load(folder / summary.CONFIG)[0].settings.rounds,
        "without_model": submitted_runs.without_model(folder),
        "failure": failure.reason if failure is not None else None,
    }


def _traffic(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes in both directions, and the time of the last message."""
    total: dict[str, Any] = {"received": 0, "sent": 0, "last_message": None}
    for line in lines:
        total[line["what"]] = total.get(line["what"], 0) + line["bytes"]
        total["last_message"] = line["time"]
    return total


def _refused(folder: Path, site: str) -> int:
    if not (folder / records.NAME).exists():
        return 0
    notes = (row.get("notes", {}) for row in records.read(folder) if row.get("client") == site)
    return sum(str(note.get("missing", "")).startswith("refused") for note in notes)


def _lines(path: Path) -> list[dict[str, Any]]:
    return append_only.lines(path) if path.exists() else []


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
