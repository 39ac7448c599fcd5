"""What a report is called: the methods and the data of its runs."""

from collections.abc import Sequence

from fedme.methods import METHODS
from fedme.report.formats import clients, listed
from fedme.report.run_data import Family, Run

# Data whose name in an experiment says too little; those of the first three are the clients' own.
DATA = {
    "clients": "their own data",
    "given": "their own data",
    "sites": "the data of their sites",
    "images": "generated images",
    "synthetic": "synthetic data",
}
MOST = 4  # methods that a title names


def method(name: str) -> str:
    """The name of a method as people write it."""
    short = name.rpartition(":")[2]
    return METHODS[short].__name__ if short in METHODS else short


def data(run: Run) -> str:
    """The name of the data."""
    name = str(run.config["data"]["name"])
    return DATA.get(name, name)


def title(families: Sequence[Family]) -> str:
    """Methods, number of clients and data."""
    methods = list(dict.fromkeys(method(family.method) for family in families))
    names = listed(methods) if len(methods) <= MOST else f"{', '.join(methods[:MOST])} and {len(methods) - MOST} more"
    runs = [family.runs[0] for family in families]
    counts = sorted({len(run.clients) for run in runs})
    many = clients(counts[0]) if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} clients"
    sets = listed(list(dict.fromkeys(data(run) for run in runs)))
    experiments = list(dict.fromkeys(str(run.config["name"]) for run in runs))
    own = f"{experiments[0]}: " if len(experiments) == 1 and set(sets.split()) & {"own", "sites"} else ""
    return f"{own}{names}, {many} on {sets}"
