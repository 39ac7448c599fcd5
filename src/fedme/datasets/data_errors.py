"""What can be wrong with data: every message says what, where, and what to do about it."""

from collections.abc import Collection


class DataError(ValueError):
    """A file, an option or a set of rows that cannot be used as it is."""


class PartitionError(ValueError):
    """A way of dividing samples that these samples do not allow."""


def check_choice(dataset: str, option: str, value: object, allowed: Collection[object]) -> None:
    """Refuse an option outside its list, and print the list."""
    if value not in allowed:
        known = ", ".join(repr(one) for one in allowed)
        raise DataError(f"{dataset}: {option} = {value!r} is not known; choose one of {known}")
