"""A few points of `make reliability`: runs that are killed, or stopped by their disk, and resumed."""

import io

import pytest
from rich.console import Console

from fedme.running.progress import Display
from fedme_reliability.crash import ERRORS, KILLS, RUNS, Bench, small_disk

QUIET = Display(Console(file=io.StringIO()), quiet=True)
FEW = [("fedme", "instant"), ("fedme", "power"), ("fml", "torn"), ("fml", "full"), ("pfedme", "kill"), ("pfedme", "broken")]
MORE = [pair for name in RUNS for how in ("instant", *KILLS, *ERRORS) if (pair := (name, how)) not in FEW]


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    made = {}

    def bench(name):
        if name not in made:
            made[name] = Bench(name, tmp_path_factory.mktemp("bench"), seed=1)
        return made[name]

    return bench


@pytest.mark.parametrize(("name", "how"), [*FEW, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)])
def test_stopped_anywhere_it_ends_the_same(benches, name, how):
    assert benches(name).tries(how, 1, QUIET) == (1, [])


def test_the_comparison_sees_what_differs(benches):
    bench = benches("fml")
    other = bench.folder / "other"
    assert bench.command("run", other).code == 0
    assert bench.goes_on(other) == "", "a finished run is left as it is"
    changed = bench.folder / "changed"
    bench.words.append("seed=1")
    assert bench.command("run", changed).code == 0
    bench.words.remove("seed=1")
    assert bench.goes_on(changed) == "records"
    segment = next((other / "weights").glob("*.bin"))
    segment.write_bytes(bytes(len(segment.read_bytes())))
    assert bench.goes_on(other) == "checkpoint"
    (other / ".summary.json.partial").write_text("")
    assert bench.goes_on(other) == "left behind: ['.summary.json.partial']"


@pytest.mark.slow
def test_a_real_file_system_that_gets_full(tmp_path):
    wrong = small_disk(tmp_path)
    if wrong is None:
        pytest.skip("needs permission to mount a file system")
    assert wrong == ""
