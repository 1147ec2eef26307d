"""Every rank must make the same optimizer: another learning rate on one of them would show in no error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardcore import comm
from shardcore.protocols import ShardedRoot, find_slot


def agree_on_options(
    roots: Sequence[ShardedRoot],
    inner: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    settings: dict[str, Any],
) -> None:
    """Raise on every rank unless all ranks make the same optimizer. Collective over the data-parallel axis.

    Raises:
        RankMismatchError: they do not; the message names the option and both values.
    """
    settings = {"algorithm": type(inner), **settings}
    for index, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        slots = [find_slot(param) for param in group["params"]]
        options["params"] = [slot.name for slot in slots if slot is not None]
        settings |= {f"{key} of group {index}": value for key, value in options.items()}
    for axis in {root.data_axis.key: root.data_axis for root in roots}.values():
        comm.agree_on_settings("shardcore.optimizer(...)", settings, axis)
