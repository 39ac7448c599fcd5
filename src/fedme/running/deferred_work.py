"""Work that waits until other threads compute: compiled code needs one thread for Python, and the others go on meanwhile."""

from collections.abc import Callable


class DeferredWork:
    """At most one piece of work, which is finished at the first result of the next operations, or when it is asked for."""

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Leave work for later; what was left before is finished first."""
        self.finish()
        self._work = work

    def finish(self) -> None:
        """Do what was left, if it was not done yet."""
        work, self._work = self._work, None
        if work is not None:
            work()
