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
    transfers = sorted(
        (line for folder in folders for line in _lines(folder / transfer_log.NAME)), key=lambda line: line["time"]
    )
    notes = [row for folder in folders for row in _rows(folder)]
    for name, site in sites.items():
        site |= _traffic((line for line in transfers if line["peer"] == name), reply="received")
        site |= _from_records(row for row in notes if row["client"] == name)
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
    state: dict[str, Any] = _json(site.state / CONNECTION_FILE) if submitted_runs.running(site.state) else {}
    return {
        "site": site.settings.name,
        "server": server.address,
        "fedme": __version__,
        "node": "running" if submitted_runs.running(site.state) else "not running",
        "connected_since": state.get("connected_since"),
        "last_problem": state.get("last_problem"),
        "run": lines[-1]["run"] if lines else None,
        **_traffic(lines, reply="sent"),
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
        "last reply": status["last_reply"] or "none",
        "sent": _bytes(status["sent"]),
        "received": _bytes(status["received"]),
        "privacy spent": f"epsilon {status['epsilon']:.3g}, {limit}",
    }
    return [*own.items(), *rows.items()]


def site_table(status: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The sites, as header and rows."""
    header = ("site", "status", "since", "round", "last reply", "received", "sent", "refused", "epsilon")
    return header, [
        [
            name,
            site["status"],
            site["since"] or "",
            "" if site["round"] is None else str(site["round"]),
            site["last_reply"] or "",
            _bytes(site["received"]),
            _bytes(site["sent"]),
            str(site["refused"]),
            "" if site["epsilon"] is None else f"{site['epsilon']:.3g}",
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
    """The numbers of a status in Prometheus' text format."""
    of_server = "sites" in status
    sites = status["sites"] if of_server else {status["site"]: status}
    up = status["server"] == "up" if of_server else status["node"] == "running"
    connected = {
        name: site["status"] == operator.ONLINE if of_server else bool(site["connected_since"]) for name, site in sites.items()
    }
    families: list[tuple[str, str, str, Mapping[str, float | None]]] = [  # name, type, label, value by label
        ("fedme_up", "gauge", "", {"": up}),
        ("fedme_disk_free_bytes", "gauge", "", {"": status["disk_free"]}),
        ("fedme_certificate_days_left", "gauge", "file", status["certificates"]),
        ("fedme_site_online", "gauge", "site", connected),
        ("fedme_site_received_bytes_total", "counter", "site", _of_each(sites, "received")),
        ("fedme_site_sent_bytes_total", "counter", "site", _of_each(sites, "sent")),
        ("fedme_site_epsilon", "gauge", "site", _of_each(sites, "epsilon")),
    ]
    if of_server:
        families += [
            ("fedme_site_refused_replies_total", "counter", "site", _of_each(sites, "refused")),
            ("fedme_run_rounds", "gauge", "run", _of_each(status["runs"], "rounds")),
        ]
    lines = []
    for name, kind, label, values in families:
        lines.append(f"# TYPE {name} {kind}")
        known = {key: value for key, value in values.items() if value is not None}
        lines += [
            f'{name}{{{label}="{_label(key)}"}} {value:.15g}' if label else f"{name} {value:.15g}"
            for key, value in known.items()
        ]
    return "\n".join(lines) + "\n"


def _of_each(things: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {key: thing[name] for key, thing in things.items()}


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


def _traffic(lines: Iterable[Mapping[str, Any]], reply: str) -> dict[str, Any]:
    """Bytes in both directions, the last round, and the times of the last message and of the last reply, which was `reply`."""
    total: dict[str, Any] = {"received": 0, "sent": 0, "round": None, "last_message": None, "last_reply": None}
    for line in lines:
        total[line["what"]] += line["bytes"]
        total["last_message"] = line["time"]
        if line["what"] == reply:
            total["last_reply"] = line["time"]
        if line["round"] is not None:
            total["round"] = line["round"]
    return total


def _from_records(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How many replies of a site were refused, and what it has spent of its privacy in the last run that counts it."""
    totals: dict[str, Any] = {"refused": 0, "epsilon": None}
    for row in rows:
        totals["refused"] += str(row.get("notes", {}).get("missing", "")).startswith("refused")
        totals["epsilon"] = row.get("epsilon", totals["epsilon"])
    return totals


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in records.read(folder) if "client" in row] if (folder / records.NAME).exists() else []


def _lines(path: Path) -> list[dict[str, Any]]:
    return append_only.lines(path) if path.exists() else []


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
