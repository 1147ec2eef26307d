"""Settings that every rank must give alike, compared before anything depends on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch

from shardcore.comm.agree import agree_on
from shardcore.mesh import Axis


def agree_on_settings(what: str, settings: Mapping[str, Any], axis: Axis) -> None:
    """Raise on every rank unless all ranks of the axis give the same settings. Collective over the axis.

    Args:
        what: whose settings, for the message.
        settings: by name; numbers, text, None, dtypes, tensors, dataclasses and collections of them are compared by
            value, anything else by its type.

    Raises:
        RankMismatchError: they differ; the message names the ranks, the first setting and both values.
    """
    if axis.size == 1:
        return
    text = json.dumps(_flat(settings))
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    agree_on(what, digest, text, axis, _first_difference)


def _first_difference(left: str, right: str) -> str | None:
    one, other = json.loads(left), json.loads(right)
    for name in one | other:
        if one.get(name) != other.get(name):
            return " against ".join(f"{name}={side[name]}" if name in side else f"no {name}" for side in (one, other))
    return None


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Each setting as text, the same in every process that gives it; those of dataclasses one by one."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if is_dataclass(value) and not isinstance(value, type):
            parts = _flat({field.name: getattr(value, field.name) for field in fields(value)})
            flat |= {f"{name}.{part}": text for part, text in parts.items()}
        else:
            flat[name] = _shown(value)
    return flat


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
