"""One method of `make reliability`'s runs with failing clients, and that the part notices when nothing fails."""

from fedme_reliability.dropout import OTHERS, failing


def test_a_run_whose_clients_fail_is_whole(tmp_path):
    whole, detail = failing("fedme", 4, ["faults.dropout=0.3", *OTHERS], tmp_path)
    assert whole == 4
    assert "dropped out" in detail
    assert "3 joins" in detail


def test_nothing_is_proved_if_nobody_fails(tmp_path):
    assert failing("fedavg", 2, [], tmp_path) == (0, "nobody dropped out")
    whole, detail = failing("fedavg", 2, ["faults.quorum=11"], tmp_path)
    assert whole == 0
    assert "there are only 10 clients" in detail
