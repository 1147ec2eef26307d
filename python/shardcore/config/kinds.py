"""What a value may be: each kind checks one JSON value and says in words what it expects."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

INVALID: Final = object()
"""What `parse` returns for a value that is not of its kind."""

_FLOAT_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A check for one JSON value."""

    expected: str
    """What a good value looks like, to be read after the word "expected"."""
    parse: Callable[[object], Any]
    """Returns the value in the type the library uses; raises ValueError if it is not of this kind."""


def show(value: object, limit: int = 60) -> str:
    """A value as it stands in JSON, cut to ``limit`` characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse(kind: Kind, path: str, value: object, problems: list[str]) -> Any:
    """The parsed value; else `INVALID`, and one more problem line that names ``path``, expected and got."""
    try:
        return kind.parse(value)
    except ValueError:
        kind_of_text = " (a string)" if isinstance(value, str) else ""  # quotes around a number are easily missed
        problems.append(f"{path}: expected {kind.expected}, got {show(value)}{kind_of_text}")
        return INVALID


def _within(low: float | None, high: float | None, above: float | None, below: float | None) -> str:
    bounds = ((">=", low), ("<=", high), (">", above), ("<", below))
    return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _whole(value: object) -> int:
    """Integers, and floats that are whole: JSON files write bucket sizes as 5e8."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, numbers.Integral):
        return int(value)
    real = _real(value)
    if not real.is_integer():
        raise ValueError
    return int(real)


def integer(low: int | None = None, high: int | None = None) -> Kind:
    """A whole number in the closed range [low, high]."""

    def check(value: object) -> int:
        whole = _whole(value)
        if (low is not None and whole < low) or (high is not None and whole > high):
            raise ValueError
        return whole

    return Kind(f"an integer {_within(low, high, None, None)}".rstrip(), check)


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None, below: float | None = None
) -> Kind:
    """A finite number in [low, high], strictly over ``above`` and strictly under ``below``."""

    def check(value: object) -> float:
        real = _real(value)
        too_low = (low is not None and real < low) or (above is not None and real <= above)
        too_high = (high is not None and real > high) or (below is not None and real >= below)
        if too_low or too_high:
            raise ValueError
        return real

    return Kind(f"a number {_within(low, high, above, below)}".rstrip(), check)


def choice(*names: str) -> Kind:
    """One of the given names; letter case does not matter."""
    by_folded = {name.casefold(): name for name in names}

    def check(value: object) -> str:
        if not isinstance(value, str) or value.casefold() not in by_folded:
            raise ValueError
        return by_folded[value.casefold()]

    return Kind("one of " + ", ".join(f'"{name}"' for name in names), check)


def list_of(item: Kind, length: int | None = None) -> Kind:
    """A list whose every item is of one kind; comes back as a tuple."""

    def check(value: object) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError
        if length is not None and len(value) != length:
            raise ValueError
        return tuple(item.parse(entry) for entry in value)

    count = "a list" if length is None else f"a list of {length}"
    return Kind(f"{count}, each {item.expected}", check)


def one_or_list(item: Kind) -> Kind:
    """One value for all parameter groups, or a list with one value a group (comes back as a tuple)."""
    many = list_of(item)

    def check(value: object) -> Any:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return many.parse(value) if is_list else item.parse(value)

    return Kind(f"{item.expected}, or a list of one such value per parameter group", check)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError
    return dict(value)


def _float_dtype(value: object) -> str:
    if not isinstance(value, str) or value.casefold() not in _FLOAT_DTYPES:
        raise ValueError
    return _FLOAT_DTYPES[value.casefold()]


def _period(value: object) -> int | None:
    """A count of steps; infinity, which front ends write for "never", is None."""
    if isinstance(value, float) and value == math.inf:
        return None
    whole = _whole(value)
    if whole < 1:
        raise ValueError
    return whole


BOOL = Kind("true or false", _truth)
TEXT = Kind("a string", _text)
MAPPING = Kind("an object", _mapping)
FLOAT_DTYPE = Kind('one of "fp32", "fp16", "bf16"', _float_dtype)
PERIOD = Kind("a number of steps >= 1 (leave it out for never)", _period)
ANYTHING = Kind("any value", lambda value: value)
