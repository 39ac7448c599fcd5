"""How often sites are asked for replies: until both the operator's and the experiment's minimum are reached."""

import pytest

from fedme.config.experiment import load
from fedme.core.method import Report, Round
from fedme.deployment import site_engine
from fedme.deployment.operator_folder import Settings
from fedme.deployment.site_engine import SiteEngine
from fedme.deployment.site_settings import agreed_task
from fedme.federation.flower import EngineError
from fedme.federation.round import NoReply, Reply
from fedme_test_support import SITES


class Scripted(SiteEngine):
    """Site "a" replies to the first request, "b" to the second, "c" to the third."""

    def _exchange_once(self, downs, when):
        self.asked = [*getattr(self, "asked", []), "".join(downs)]
        turn = len(self.asked)
        return {c: Reply(down, Report({}), 0.0) if "abc".index(c) < turn else NoReply("not yet") for c, down in downs.items()}

    def _update_sites(self):
        pass


def engine(tmp_path, monkeypatch, settings, *words):
    monkeypatch.setattr(site_engine, "RETRY_DELAY", 0.0)
    experiment, _ = load("digits-fedme", [*SITES, *words])
    task, archs = agreed_task(experiment)
    return Scripted(tmp_path, "run", experiment, task, archs, None, settings, None, lambda text: None)


@pytest.mark.parametrize(
    ("replies", "words", "asked"),
    [
        (1, [], ["abc"]),
        (2, [], ["abc", "bc"]),
        (1, ["faults.quorum=2"], ["abc", "bc"]),
        (3, ["faults.quorum=2"], ["abc", "bc", "c"]),
        (1, ["faults.quorum=0.9"], ["abc", "bc", "c"]),
        (9, [], ["abc", "bc", "c"]),
    ],
)
def test_whichever_wants_more_replies(tmp_path, monkeypatch, replies, words, asked):
    sites = engine(tmp_path, monkeypatch, Settings(min_replies=replies), *words)
    answers = sites.exchange(dict.fromkeys("abc", 1), Round(0, 3))
    assert sites.asked == asked
    assert [client for client, answer in answers.items() if isinstance(answer, Reply)] == list("abc"[: len(asked)])


def test_a_robust_average_waits_for_five_whatever_the_operator_says(tmp_path, monkeypatch):
    words = ["method.name=fedavg", "models.pool=['mlr']", "defence.average=median"]
    sites = engine(tmp_path, monkeypatch, Settings(min_replies=1, min_sites=1, patience=1e-9), *words)
    with pytest.raises(EngineError, match="for sites, but 0 of 5 are connected"):
        sites.current_task()


def test_patience_ends(tmp_path, monkeypatch):
    sites = engine(tmp_path, monkeypatch, Settings(min_replies=3, patience=1e-9))
    with pytest.raises(EngineError, match="round 0: only 1 of 3 needed replies"):
        sites.exchange(dict.fromkeys("abc", 1), Round(0, 3))
