"""Numbers, dates and lists of numbers as text; an unknown value (None) is a dash."""

from datetime import UTC, datetime
from itertools import pairwise

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
    """With an SI prefix: 1.23 G."""
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
    """A count with its noun: 1 host, 2,048 hosts."""
    return f"{number:,} {word if number == 1 else many or word + 's'}"


def abbreviated(numbers: list[int]) -> str:
    """Ascending numbers: "0–7", "0, 8, … 120", or where they have no pattern, the first of them and their count."""
    listed = 4
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    even = all(after - before == step for before, after in pairwise(numbers))
    if even and step == 1:
        return f"{numbers[0]}–{numbers[-1]}"
    if len(numbers) <= listed:
        return ", ".join(map(str, numbers))
    if even:
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    return ", ".join(map(str, numbers[: listed - 1])) + f", … ({len(numbers)})"
