"""Every rank must make the same optimizer: another learning rate on one of them would show in no error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardcore import comm
from shardcore.protocols import ShardedRoot, find_slot

_NO_OPTIONS = ("params", "param_names")


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
        options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        slots = [find_slot(param) for param in group["params"]]
        options["params"] = [slot.name for slot in slots if slot is not None]
        settings |= {f"{key} of group {index}": value for key, value in options.items()}
    for axis in {root.data_axis.key: root.data_axis for root in roots}.values():
        comm.agree_on_settings("shardcore.optimizer(...)", settings, axis)


class OptionChanges:
    """The options of the groups as they were at the last step. All ranks must change them alike: a schedule that
    follows each rank's own loss would train the parts of the model at different rates.
    """

    def __init__(self, roots: Sequence[ShardedRoot], groups: Sequence[dict[str, Any]]) -> None:
        self._axes = list({root.data_axis.key: root.data_axis for root in roots}.values())
        self._known = [_numbers(group) for group in groups]

    def note_changes(self, groups: Sequence[dict[str, Any]]) -> None:
        """Note what has changed since the last step, for the comparison that comes with each. Not collective."""
        now = [_numbers(group) for group in groups]
        if now == self._known:
            return
        changes = [
            f"{key} of group {index}={value}"
            for index, (old, new) in enumerate(zip(self._known, now, strict=False))
            for key, value in new.items()
            if old.get(key) != value
        ]
        self._known = now
        for axis in self._axes:
            comm.note_choice(axis, "step with", ", ".join(changes))


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The options that are plain values; tensors on a device would have to be waited for."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in _NO_OPTIONS
        and (not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and value.numel() == 1))
    }
