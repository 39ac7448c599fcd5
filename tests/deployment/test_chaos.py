"""A federation of machines with random kills, reboots, cut and slow links and a full disk, in short.

`make reliability` has ten of them with twenty events each.
"""

import pytest

from fedme_reliability.chaos import KINDS, play
from fedme_test_hosts import Hosts, unavailable

SEED = 6399  # kills of a node and a client app, a full disk, a slow link, a cut link, a reboot of the server


@pytest.fixture
def hosts(tmp_path):
    if reason := unavailable():
        pytest.skip(reason)
    made = Hosts(tmp_path, min_replies=3, timeout=120.0)
    yield made
    made.end()


@pytest.mark.deploy
def test_a_federation_under_random_events_ends_with_the_models_of_an_undisturbed_run(hosts):
    done = play(hosts, SEED, events=6, rounds=3).done
    assert len(done) == 6
    assert {"cut link", "slow link", "full disk"} <= {kind for event in done for kind in KINDS if event.startswith(kind)}
