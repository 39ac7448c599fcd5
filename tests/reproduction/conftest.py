import pytest


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """Where runs at smoke scale are, shared by all tests: most results share runs."""
    return tmp_path_factory.mktemp("reproduce")
