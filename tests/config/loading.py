"""What the tests of the configuration room share."""

from __future__ import annotations

from typing import Any

import pytest

from shardcore.config import Config, load_config
from shardcore.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 2}


def load(drop_in: bool = False, **keys: Any) -> Config:
    return load_config({**BATCH, **keys}, data_world=2, drop_in=drop_in)


def problems(source: dict[Any, Any], **options: Any) -> list[str]:
    """The numbered lines of the error that the configuration raises."""
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, **source}, data_world=2, **options)
    head, *lines = str(caught.value).split("\n")
    assert head == f"config has {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    assert [line.split(".")[0].strip() for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
    return [line.split(". ", 1)[1] for line in lines]


def nested(path: str, value: Any) -> dict[str, Any]:
    tree = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    assert isinstance(tree, dict)
    return tree
