"""Plain values as JSON, exactly: what a checkpoint keeps besides tensors. Nothing is ever pickled.

JSON has no tuples, no keys but text and no infinities; these are written as objects with one key that starts with "$".
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from shardcore.errors import CheckpointError

_HINTS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda value: isinstance(value, torch.Tensor), "put tensors into buffers of the model, or write value.tolist()"),
    (lambda value: hasattr(value, "item") and hasattr(value, "dtype"), "write value.item() or value.tolist()"),
    (lambda value: hasattr(value, "state_dict"), "write value.state_dict()"),
    (lambda value: isinstance(value, set | frozenset), "write sorted(value)"),
    (lambda value: isinstance(value, bytes | bytearray), "write value.hex()"),
    (lambda value: hasattr(value, "__fspath__"), "write str(value)"),
    (callable, "a checkpoint holds data, no code; keep its name instead"),
]


def encode(value: Any, where: str) -> Any:
    """The value as JSON can hold it.

    Args:
        where: how messages name it.

    Raises:
        CheckpointError: something in it is no plain value (None, bool, int, float, str, list, tuple, dict).
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) in (tuple, deque, torch.Size):
        kind = "$deque" if type(value) is deque else "$tuple"
        return {kind: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"$tensor": [encode(value.item(), where), str(value.dtype).removeprefix("torch.")]}
    hint = next((hint for applies, hint in _HINTS if applies(value)), "keep the plain values that it is made of")
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds plain values only (None, bool, int, float, str, "
        f"list, tuple, dict): {hint}"
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    ((kind, content),) = value.items()
    return _DECODERS[kind](content) if kind in _DECODERS else {kind: decode(content)}


def to_json(value: Any) -> str:
    """The JSON text of an encoded value."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {"$counter" if is_counter else "$dict": pairs}


def _pairs(content: list[list[Any]]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in content}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda content: tuple(decode(item) for item in content),
    "$deque": lambda content: deque(decode(item) for item in content),
    "$dict": _pairs,
    "$counter": lambda content: Counter(_pairs(content)),
    "$tensor": lambda content: torch.tensor(decode(content[0]), dtype=getattr(torch, content[1])),
}
