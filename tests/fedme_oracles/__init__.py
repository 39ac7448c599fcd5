"""Oracles of federated methods: plain loops written from the papers alone, without a line of the library.

`common.py` states what an oracle is given and what it returns. One file per method has `Settings` and `run(problem, settings)`.
`test_oracles.py` checks the oracles themselves; tests of the library feed a method the same problem and compare.
"""
