"""The grid of malicious clients in small: one method, one attack; `make reliability` measures them all."""

from fedme_reliability import poison


def test_honest_clients_only_and_the_attack_is_felt_without_defences():
    base = {**poison.BASE, "rounds": 4, "evaluate_every": 4}
    calm, hit, held = (
        poison.honest_accuracy(poison.config("fedavg", kind, defended, base))
        for kind, defended in ((None, False), ("huge-norm", False), ("huge-norm", True))
    )
    assert hit < calm - 20
    assert held > hit + 20


def test_a_row_says_what_an_attack_costs():
    found = {(False, kind): 20.0 for kind in (None, *poison.KINDS)} | {(True, kind): 90.0 for kind in (None, *poison.KINDS)}
    assert poison.row("fedavg", found).kept
    found[True, "sign-flip"] = 80.0
    row = poison.row("fedavg", found)
    assert not row.kept
    assert "sign-flip 20.0 / 80.0" in row.detail
