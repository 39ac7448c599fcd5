"""How many processors this process may use: on a shared machine they are often fewer than there are."""

import os


def processors() -> int:
    """Those it is allowed to run on, where the system tells; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
