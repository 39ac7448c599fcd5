"""Every method with clients that fail: the run completes, everybody has a model in the end, and every loss has a name."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedme.core.atomic_files import read_tensors
from fedme.core.method import POOL
from fedme.methods import METHODS
from fedme.results import records
from fedme.running.progress import Display
from fedme_reliability import commands
from fedme_reliability.frame import Row
from fedme_test_runs import TINY

CLIENTS, SHARE = 10, 0.3
WORDS = [f"partition.clients={CLIENTS}", "data.limit=300", "evaluate_every=10", "train.epochs=1", "faults.quorum=0.5"]
MORE = {"fedmd": ["method.public_epochs=2", "method.private_epochs=1"], "mapper": ["method.lambdas=[0.0, 0.5, 1.0]"]}
OTHERS = ["faults.lost=0.1", "faults.deadline=2.0", "faults.spread=0.5", "faults.join={1 = 3}", "faults.leave={2 = 5}"]


def failing(method: str, rounds: int, words: list[str], place: Path) -> tuple[int, str]:
    """How many rounds of a run whose clients fail are whole in its records, and what was lost, or what is wrong."""
    folder = Path(tempfile.mkdtemp(dir=place)) / method
    given = [*TINY, *WORDS, f"method.name={method}", f"rounds={rounds}", *MORE.get(method, []), *words, f"output={folder}"]
    ended = commands.do(["run", "digits-fedme", *given], place, folder)
    if ended.code:
        return 0, ended.said[-300:]
    modelless = [i for i in range(CLIENTS) if not _finite(folder / "clients" / str(i) / "model.safetensors")]
    if modelless:
        return 0, f"clients without a model: {modelless}"
    reasons: Counter[str] = Counter()
    heard: Counter[int] = Counter()
    for row in records.read(folder):
        notes = row.get("notes")
        if notes is None or row["client"] == POOL:
            continue
        heard[row["round"]] += 1
        if "missing" in notes:
            reasons[notes["missing"].split(" in round")[0].split(":")[0]] += 1
    whole = sum(heard[t] == CLIENTS or METHODS[method].pooled for t in range(rounds))
    if not METHODS[method].pooled and not reasons["dropped out"]:
        return 0, "nobody dropped out"
    return whole, ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))


def _finite(path: Path) -> bool:
    return path.exists() and all(bool(tensor.isfinite().all()) for tensor in read_tensors(path)[0].values())


def rows(display: Display, quick: bool) -> Iterator[Row]:
    """All methods with 30 % dropping out of every round, then with everything that can happen to a client."""
    rounds = 4 if quick else 30
    simply, fully = f"{SHARE:.0%} drop out of every round", "the same, with replies lost or late, joining and leaving"
    with tempfile.TemporaryDirectory() as place:
        for title, words in ((simply, []), (fully, OTHERS)):
            here = Path(tempfile.mkdtemp(dir=place))
            display.start(title, len(METHODS))
            for method in METHODS:
                whole, detail = failing(method, rounds, [f"faults.dropout={SHARE}", *words], here)
                display.advance()
                yield Row(f"{method}: {title}", rounds, whole, detail)
