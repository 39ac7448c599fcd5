"""A server that asks a site for more than was agreed, and somebody whose files are opened.

These attacks call the site's message handlers directly: what arrives there does not depend on how it was sent.
"""

import contextlib
import logging
import shutil
import subprocess
import sys
import tomllib

import tomli_w

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Model
from fedme.deployment import site_app
from fedme.deployment.privacy_account import PrivacyAccount
from fedme.deployment.site_settings import Site
from fedme.federation.flower.message_content import MessageContent
from fedme.methods.shared_model import SharedModel
from fedme_attacks.federation import Loopback
from fedme_attacks.frame import attack
from fedme_test_deployment import Deployment

EPSILON = 2.0


def private_site(federation: Loopback, name: str) -> Site:
    """A site that agreed to two rounds of FedAvg with a privacy budget."""
    logging.getLogger("fedme.site").setLevel(logging.CRITICAL)  # its refusals are in the table
    deployment = Deployment(federation.scratch(name), "a")
    deployment.agree(method={"name": "fedavg"}, models={"pool": ["mlr"]}, rounds=2, privacy={"epsilon": EPSILON})
    return Site.read(deployment.site("a") / "site.toml")


def ask(site: Site, run: str, t: int, total: int = 2) -> None:
    """A request of the server for a round, as the client app gets it."""
    task, _ = site.task()
    content = MessageContent.of(run=run, when=Round(t, total), down=SharedModel(Model.init(task.shared, Key(0))))
    site_app.train(content, {"site": str(site.folder / "site.toml")})


def refusal(site: Site, run: str, t: int, total: int = 2) -> str:
    """The same, which must be refused: the error that the server gets."""
    try:
        ask(site, run, t, total)
    except site_app.SiteError as error:
        return str(error)
    raise AssertionError(f"the site answered round {t} of {total} of run '{run}'")


@attack(by="server", promise="all runs together spend at most the site's epsilon; a run beyond it is refused before it starts")
def new_runs_to_spend_a_privacy_budget_again(federation: Loopback) -> str:
    """The server names the runs, and even the site's state is lost: the account counts on."""
    site = private_site(federation, "budget")
    for t in (0, 1):
        ask(site, "run-0", t)
    spent = PrivacyAccount.of(site).epsilon()
    reasons = set()
    for number in range(1, 20):
        shutil.rmtree(site.state)
        reasons.add(refusal(site, f"run-{number}", 0))
        with contextlib.suppress(site_app.SiteError):
            site_app.handshake(
                MessageContent.of(run=f"run-{number}", config=site.experiment.plain()), {"site": str(site.folder / "site.toml")}
            )
            raise AssertionError("the site shook hands for a run that it cannot pay for")
    assert len(reasons) == 1, reasons
    assert PrivacyAccount.of(site).epsilon() == spent <= EPSILON
    return f"epsilon stays at {spent:.3f} of {EPSILON:g}; 19 more runs refused: {reasons.pop()}"


@attack(by="server", promise="a site answers only for rounds of the experiment that it agreed to")
def a_round_that_was_not_agreed(federation: Loopback) -> str:
    """Round 10^9 of an experiment of two rounds, and others."""
    site = private_site(federation, "rounds")
    texts = [refusal(site, "run", t, total) for t, total in ((10**9, 10**9 + 1), (2, 2), (1, 3), (-1, 2))]
    assert not PrivacyAccount.of(site).lines()
    return f"refused: {texts[0]}"


@attack(by="file", promise="opening a run directory imports nothing that it names, unless --imports says so")
def a_run_directory_that_names_a_module(federation: Loopback) -> str:
    """Every command that opens a run, with a module beside it that writes a file."""
    folder = federation.scratch("imports")
    marker, run = folder / "imported", folder / "run"

    def fedme(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "fedme", *words], cwd=folder, capture_output=True, text=True, check=False)
        return " ".join((done.stdout + done.stderr).split())

    fedme("run", "digits-fedme", "rounds=1", "partition.clients=2", "method.clusters=1", 'models.pool=["mlr"]', f"output={run}")
    (folder / "hostile_module.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    config = tomllib.loads((run / "config.toml").read_text())
    config["models"]["pool"] = ["hostile_module:Net"]
    (run / "config.toml").write_text(tomli_w.dumps(config))
    said = ""
    for command in ("resume", "audit", "report", "show"):
        said = fedme(command, str(run)) if command == "resume" else (fedme(command, str(run)) and said)
        assert not marker.exists(), f"fedme {command} imported the module"
    assert "names code: hostile_module:Net" in said, said
    fedme("resume", str(run), "--imports")
    assert marker.exists(), "the module is imported when the user asks; otherwise this attack proves nothing"
    return "not imported by resume, audit, report and show; `fedme resume` names the module and --imports"
