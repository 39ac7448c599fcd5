"""Numbers as text, rounded once: measures, gains, sizes, times and lists."""

from collections.abc import Sequence

from fedme.core.metrics import Measure

SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(measure: Measure, mean: float, std: float | None = None) -> str:
    """A value of a measure with its unit, and its standard deviation over seeds if there is one."""
    digits = 1 if measure.percent else None
    deviation = "" if std is None else f" ± {measure.text(std, digits)}"
    return f"{measure.text(mean, digits)}{deviation}{' %' if measure.percent else ''}"


def signed(measure: Measure, gain: float) -> str:
    """A gain with its sign."""
    return f"{'+' if gain >= 0 else ''}{measure.text(gain, 1 if measure.percent else None)}"


def change(measure: Measure, now: float, before: float) -> str:
    """How a value differs from an earlier one."""
    gain = measure.gain(now, before)
    if abs(gain) < (0.0005 if measure.percent else 1e-9):
        return "the same"
    if not measure.percent:
        return f"{measure.text(abs(gain))} {'better' if gain > 0 else 'worse'}"
    return f"{100 * abs(gain):.1f} points {'more' if gain > 0 else 'less'}"


def size(count: float) -> str:
    """A number of bytes."""
    return _scaled(count, SIZES, "bytes")


def duration(seconds: float) -> str:
    """Seconds, or a larger unit if there are many."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{_three(seconds / length)} {unit}"
    return f"{_three(seconds)} s"


def count(value: float) -> str:
    """A large number of parameters."""
    return _scaled(value, COUNTS, "")


def clients(many: int) -> str:
    """A number of clients."""
    return f"{many:,} client{'s' * (many != 1)}"


def listed(words: Sequence[str], conjunction: str = "and") -> str:
    """Words with commas and a conjunction."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def _scaled(value: float, units: Sequence[tuple[float, str]], base: str) -> str:
    for factor, unit in units:
        if value >= 0.9995 * factor:
            return f"{_three(value / factor)} {unit}"
    return f"{value:.0f} {base}".strip()


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
