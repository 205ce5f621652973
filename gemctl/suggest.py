"""Suggestions for mistyped names: keys, choices, commands, options, tables, columns.

did_you_mean("trian", ["plan", "train"])      # "; did you mean train?"
"""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the closest of the known names, or nothing if none is close. Case is ignored."""
    return offer(closest(word, known))


def closest(word: str, known: Iterable[str], cutoff: float = 0.7) -> list[str]:
    """The known name that is most similar to `word`, if any is at least `cutoff` similar (0 to 1)."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)]


def offer(names: list[str]) -> str:
    """`; did you mean a, b or c?`, or nothing if there are no names."""
    if not names:
        return ""
    return f"; did you mean {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}?"
