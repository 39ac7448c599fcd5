"""Text that others have written (error texts, notes, names of clients and models), made safe to print, to log and to store.

Characters that are not printable (control characters, marks that change the direction of text, invisible and invalid ones) are
written as escapes: they can neither move a terminal's cursor, nor start a line of a log, nor make a name look like another one.
Long text is cut before anything else is done with it.
"""

LONGEST = 1000  # characters of a text
LONGEST_NAME = 200  # characters of a name or a note


def one_line(text: str, longest: int = LONGEST) -> str:
    """The text on one line with unsafe characters as escapes, and about `longest` characters of it."""
    if len(text) > longest:
        return f"{_safe(text[: longest - longest // 5 - 4])} ... {_safe(text[-(longest // 5) :])}"
    return _safe(text)


def _safe(text: str) -> str:
    if text.isprintable():
        return text
    flat = " ".join(text.split())
    return flat if flat.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in flat)


def safe_name(text: str) -> str:
    """A name or a note as it is shown; one that is short and printable is shown as it is."""
    return one_line(text, LONGEST_NAME)
