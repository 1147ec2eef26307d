"""Which known name was probably meant: edit distance over short key names."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(left: str, right: str) -> int:
    """Number of single-character edits between two names, letter case ignored.

    An edit inserts, deletes or replaces one character, or swaps two neighbours (the optimal string alignment
    distance, the restricted form of Damerau, "A technique for computer detection and correction of spelling
    errors", CACM 1964): a swap is the commonest slip of the hand and should not count twice.
    """
    left, right = left.casefold(), right.casefold()
    before: list[int] = []
    above = list(range(len(right) + 1))
    for row, char in enumerate(left, start=1):
        current = [row]
        for column, other in enumerate(right, start=1):
            cost = min(above[column] + 1, current[-1] + 1, above[column - 1] + (char != other))
            if row > 1 and column > 1 and char == right[column - 2] and left[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, above = above, current
    return above[-1]


_INITIALS = {"learning_rate": "lr", "epsilon": "eps", "max_learning_rate": "max_lr", "min_learning_rate": "min_lr"}
"""Words that are written in full elsewhere."""


def nearest(name: str, known: Iterable[str], max_distance: int | None = None) -> str | None:
    """The known name closest to ``name``, or None if none is near.

    Without ``max_distance`` the limit is 2 edits, or a third of the name's length where that is more, and words
    left out ("warmup_steps" for "warmup_num_steps") count as two edits at most. Of equally close names the first
    in alphabetical order wins, so that every rank says the same.
    """
    known = list(known)
    if _INITIALS.get(name) in known:
        return _INITIALS[name]
    limit = max(2, len(name) // 3) if max_distance is None else max_distance
    words = set(name.split("_"))

    def distance(candidate: str) -> int:
        edits = edit_distance(name, candidate)
        shortened = max_distance is None and len(words) > 1 and words < set(candidate.split("_"))
        return min(edits, 2) if shortened else edits

    ranked = sorted((distance(candidate), candidate) for candidate in known)
    return ranked[0][1] if ranked and ranked[0][0] <= limit else None


def unknown_name(path: str, name: str, known: Iterable[str]) -> str:
    """One problem line for an unknown ``name`` at ``path`` ("" is the top level), with the nearest known name."""
    names = sorted(known)
    guess = nearest(name, names)
    where = f"{path}." if path else ""
    if guess is not None:
        return f'{where}{name}: unknown key; did you mean "{where}{guess}"?'
    return f"{where}{name}: unknown key; known here: {', '.join(names)}"


def unknown_names(path: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """Problem lines for every name in ``given`` that is not among ``known``."""
    names = set(known)
    return [unknown_name(path, name, names) for name in given if name not in names]
