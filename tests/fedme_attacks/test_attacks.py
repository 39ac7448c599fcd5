"""Every attack of `make attack`: those of `QUICK` are deployment tests, the others take minutes and are slow tests."""

import pytest

from fedme_attacks import frame
from fedme_attacks.federation import Loopback

QUICK = ("site_requests",)
ATTACKS = [
    pytest.param(attack, marks=pytest.mark.deploy if part in QUICK else pytest.mark.slow, id=attack.name.replace(" ", "-"))
    for part in frame.PARTS
    for attack in frame.attacks(part)
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with Loopback(tmp_path_factory.mktemp("attacks")) as made:
        yield made


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own, when it builds a bundle
@pytest.mark.xdist_group("attacks")  # one federation for all of them
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack(attack, federation):
    assert attack.attempt(federation)
