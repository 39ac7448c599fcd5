"""Resume runs: after a kill, a restart of the machine or an outage, the server starts the next attempt by itself.

It also starts the delivery of models to sites that were away at the end of a run, when one of them is connected again.
"""

import time
from collections.abc import Callable
from pathlib import Path

from fedme.core.atomic_files import RunError
from fedme.deployment import attempts, operator, submitted_runs
from fedme.deployment.operator_folder import Federation

POLL_INTERVAL = 2.0  # seconds between two looks at the runs' folders
QUESTION_INTERVAL = 20.0  # seconds between two questions to Flower, which start a process each
FIRST_DELAY, MAX_DELAY = 2.0, 300.0  # seconds before a run that failed is tried again; the delay doubles every time


class Resumer:
    """Starts the next attempt of every run that ended before it was done. Called again and again."""

    def __init__(self, federation: Federation, log: Callable[[str], None]) -> None:
        self.federation, self.log = federation, log
        self.next_look = self.next_question = 0.0
        self.delays: dict[Path, float] = {}
        self.not_before: dict[Path, float] = {}

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self.next_look:
            return
        for folder in submitted_runs.all_runs(self.federation):
            at_work = submitted_runs.running(folder) or attempts.being_started(folder)
            if not at_work and now >= self.not_before.get(folder, 0.0):
                try:
                    self._continue_if_needed(folder)
                except (RunError, OSError) as error:  # Flower's server is starting, or the disk is full
                    self.log(f"{folder.name}: {error}; trying again")
        self.next_look = time.monotonic() + POLL_INTERVAL

    def _continue_if_needed(self, folder: Path) -> None:
        if submitted_runs.done(folder):
            if self._late_site_is_back(folder):
                self._continue(folder, "a site that was away at the end is back")
        elif self._ended(folder):
            self._continue(folder, "its server app ended before it was done")

    def _ended(self, folder: Path) -> bool:
        """Whether an attempt was made and ended, and another one makes sense."""
        attempt, failure = attempts.attempt(folder), attempts.failure(folder)
        if attempt is None or (failure is not None and failure.final):
            return False
        if failure is not None and failure.kind == "error" and attempt.fruitless + 1 >= attempts.MAX_FRUITLESS:
            attempts.record_failure(folder, failure.reason, "given up")
            self.log(
                f"{folder.name}: gave up after {attempts.MAX_FRUITLESS} attempts without a further round: {failure.reason}; "
                f"{operator.resume_hint(folder)}"
            )
            return False
        return attempts.started(folder) or failure is not None or self._forgotten(attempt)

    def _forgotten(self, attempt: attempts.Attempt) -> bool:
        """Whether Flower will not start this attempt any more: it was interrupted between asking and starting."""
        if not self._may_ask():
            return False
        runs = operator.runs_of_flower(self.federation)
        return runs is not None and runs.get(attempt.flower_run, "finished").startswith("finished")

    def _late_site_is_back(self, folder: Path) -> bool:
        late = submitted_runs.without_model(folder)
        if not late or not self._may_ask():
            return False
        sites = operator.sites_of_flower(self.federation)
        return sites is not None and any(sites.get(name, {}).get("status") == operator.ONLINE for name in late)

    def _may_ask(self) -> bool:
        """Whether to ask Flower now; a question costs a second of processor time."""
        if time.monotonic() < self.next_question:
            return False
        self.next_question = time.monotonic() + QUESTION_INTERVAL
        return True

    def _continue(self, folder: Path, why: str) -> None:
        attempt, failure = attempts.attempt(folder), attempts.failure(folder)
        progress = attempt is None or submitted_runs.rounds_done(folder) > attempt.rounds
        delay = FIRST_DELAY if progress else self.delays.get(folder, FIRST_DELAY)
        self.delays[folder], self.not_before[folder] = min(2 * delay, MAX_DELAY), time.monotonic() + delay
        self.log(f"{folder.name}: {failure.reason if failure is not None else why}; continuing it")
        operator.start_attempt(self.federation, folder, patience=0.0)  # whoever waits here cannot restart the server
