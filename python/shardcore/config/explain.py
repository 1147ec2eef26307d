"""A `Config` as text for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardcore.config.keys import Field
from shardcore.config.kinds import show
from shardcore.config.sections import default_of
from shardcore.config.table import TABLE

if TYPE_CHECKING:
    from shardcore.config.config import Config


def explain(config: Config) -> str:
    """Each honoured key with its value and where it comes from, ignored keys with reasons, and the notes."""
    mode = ", DeepSpeed's defaults" if config.drop_in else ""
    blocks = [
        (f"{config.label}{mode}", [_batch_line(config)]),
        ("values", [_value_line(config, path, target) for path, target in _targets(config)]),
        ("without effect here", [f"{key.path} = {key.shown}: {key.reason}" for key in config.ignored]),
        ("notes", list(config.notes)),
    ]
    return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in blocks if lines)


def to_json(config: Config) -> str:
    """The honoured keys with their resolved values, in the format that `load_config` reads."""
    tree: dict[str, Any] = {}
    for path, target in _targets(config):
        value = _value(config, target)
        if value is None:
            continue
        node = tree
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return json.dumps(tree, indent=2, default=repr)


def _targets(config: Config) -> list[tuple[str, str]]:
    """Dotted path and target of every honoured key, in the order of the table; of two names the first.

    The keys of an optimizer or a scheduler that the file does not have are left out.
    """
    paths: dict[str, str] = {}
    for path, entry in TABLE.items():
        if isinstance(entry, Field) and getattr(config, entry.target.split(".")[0]) is not None:
            paths.setdefault(entry.target, path)
    return [(path, target) for target, path in paths.items()]


def _value(config: Config, target: str) -> Any:
    section, name = target.split(".")
    if target == "gradients.clipping":
        return config.gradients.clipping or 0.0
    if section == "batch" and hasattr(config.batch_sizes, name):
        return getattr(config.batch_sizes, name)
    return getattr(getattr(config, section), name)


def _value_line(config: Config, path: str, target: str) -> str:
    value = _value(config, target)
    shown = "not set" if value is None else show(value, limit=200)
    return f"{path} = {shown} ({_origin(config, target, value)})"


def _origin(config: Config, target: str, value: object) -> str:
    if any(entry.target == target for path in config.given if isinstance(entry := TABLE[path], Field)):
        return "given"
    return "worked out" if target.startswith("batch.") and value != default_of(target) else "default"


def _batch_line(config: Config) -> str:
    sizes = config.batch_sizes
    if sizes is None:
        return "batch: worked out once the number of data-parallel ranks is known"
    return (
        f"batch: {sizes.train_batch_size} samples a step = {sizes.micro_batch_size} per rank x "
        f"{sizes.accumulation_steps} accumulated x {sizes.data_world} data-parallel ranks"
    )
