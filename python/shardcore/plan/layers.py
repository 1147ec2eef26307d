"""Layers chosen by the names of their classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardcore._core import partition_marked
from shardcore.errors import PlanError


def partition_by_class(
    class_names: Iterable[str], pattern: str, num_parts: int, *, cut_nbytes: Sequence[int] | None = None
) -> list[int]:
    """Spread the layers whose class matches evenly over ``num_parts`` parts, and cut the others as they fall.

    ``class_names`` has the name of every layer's class, in order. ``pattern`` is a regular expression that is searched
    for anywhere in the name, in upper or lower case (as DeepSpeed's ``partition_method="type:..."`` does). Boundaries
    and ties are those of ``partition_layers``.

    Raises ``PlanError`` for one string as ``class_names``, for a pattern that is none or matches no layer, and for
    fewer layers than parts.
    """
    if isinstance(class_names, str):
        raise PlanError(
            f"class_names is the string {class_names!r}: expected a list with the name of every layer's class"
        )
    names = list(class_names)
    try:
        matches = re.compile(pattern, re.IGNORECASE).search
    except re.error as error:
        raise PlanError(f"pattern {pattern!r} is no regular expression: {error}") from None
    marked = [matches(name) is not None for name in names]
    if names and not any(marked):
        found = ", ".join(dict.fromkeys(names))
        raise PlanError(f"pattern {pattern!r} matches the class of no layer: expected one of {found}")
    return partition_marked(marked, num_parts, cut_nbytes=cut_nbytes)
