"""The nearest valid word to a mistyped one, by the number of edits.

gemctl train model.dimm=64      # error: model.dimm=64: unknown key; did you mean model.dim?
"""


def edits(word: str, other: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that make `other` of `word`; limit + 1 if more."""
    if abs(len(word) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and word[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return row[-1] if row[-1] <= limit else limit + 1


def nearest(word: str, candidates: list[str], most: int = 3) -> list[str]:
    """Up to `most` candidates within a third of the word's length (at least 1 edit, at most 3), nearest first."""
    limit = min(3, max(1, len(word) // 3))
    ranked = [(edits(word.lower(), candidate.lower(), limit), candidate) for candidate in candidates]
    return [candidate for cost, candidate in sorted(ranked) if cost <= limit][:most]


def offer(words: list[str]) -> str:
    """`; did you mean a, b or c?`, or nothing where there is nothing to offer."""
    if not words:
        return ""
    return f"; did you mean {' or '.join(filter(None, [', '.join(words[:-1]), words[-1]]))}?"


def did_you_mean(word: str, candidates: list[str]) -> str:
    """The offer of the nearest candidates."""
    return offer(nearest(word, candidates))
