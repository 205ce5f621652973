"""Figures as people read them; what is not known is a dash."""

from datetime import UTC, datetime

DASH = "–"


def number(value: float | None, digits: int = 4) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f}%"


def milliseconds(seconds: float | None) -> str:
    return DASH if seconds is None else f"{1000 * seconds:,.2f}"


def count(value: float | None) -> str:
    return DASH if value is None else f"{int(value):,}"


def rate(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def si(value: float | None) -> str:
    """With a unit prefix: 1.23 G."""
    if value is None:
        return DASH
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g}"


def binary(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return DASH
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return f"{value / factor:,.1f} {unit}"
    return f"{int(value)} B"


def date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def plural(number: int, word: str, many: str = "") -> str:
    """A number of things: 1 host, 2,048 hosts."""
    return f"{number:,} {word if number == 1 else many or word + 's'}"
