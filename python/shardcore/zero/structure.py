"""What a sharded model was made of, to notice layers that were put into it afterwards.

Such a layer has no shard, no optimizer state and no average over the ranks, so it would stay as it is, or part company
between ranks, in silence. torch can report registrations, but not those of ``ModuleList.insert``; comparing what the
modules hold sees all of them, for a few microseconds per hundred modules and step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from shardcore.errors import StateError
from shardcore.protocols import find_slot


class Structure:
    """The modules and parameters inside a model at the time when it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = [
            (m._parameters, key, param)
            for m in model.modules()
            for key, param in m._parameters.items()
            if param is not None
        ]
        self._note()

    def check(self) -> None:
        """Raise if parameters were replaced, or trainable ones were added, since.

        Raises:
            StateError: they were; the message names some.
        """
        now = _held(self._tables)
        if len(now) == len(self._held) and all(map(is_, now, self._held)):
            return
        for params, key, param in self._places:
            if params.get(key, param) is not param:
                raise StateError(
                    f"parameter {key!r} of shape {tuple(param.shape)} was replaced by another object after sharding "
                    "(by model.to(another device), module.weight = nn.Parameter(...), ...), so training would not "
                    "reach it: move the model before shardcore.shard, and write values in place, under "
                    "shardcore.summon(model, writeback=True)"
                )
        added = {name: param for name, param in self._model.named_parameters() if find_slot(param) is None}
        names = [name for name, param in added.items() if param.requires_grad]
        if names:
            raise StateError(
                f"{len(names)} parameters ({', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}) were "
                "put into the model after shardcore.shard(model, ...), so they are not averaged over the ranks, and no "
                "sharded optimizer trains them. Build the whole model first, then shard it, then make the optimizer; "
                "or freeze them by requires_grad_(False)"
            )
        if not added:  # else looked at again: what is frozen now may be thawed
            self._note()

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._tables = [table for m in modules for table in (m._parameters, m._modules)]
        self._held = _held(self._tables)


def _held(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))
