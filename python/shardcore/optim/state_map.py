"""``optimizer.state`` as users see it: the inner optimizer's, whose keys are this rank's pieces of the masters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from shardcore.errors import StateError
from shardcore.protocols import find_slot

State = dict[str, Any]


class StateOfPieces(MutableMapping[torch.Tensor, State]):
    """Reads and writes go to ``kept``. Asking for a parameter of the model, which has no entry, is an error: code that
    resets or edits the state of a parameter would change nothing.
    """

    def __init__(self, kept: MutableMapping[torch.Tensor, State]) -> None:
        self._kept = kept

    def __getitem__(self, key: torch.Tensor) -> State:
        _check(key)
        return self._kept[key]

    def __setitem__(self, key: torch.Tensor, state: State) -> None:
        _check(key)
        self._kept[key] = state

    def __delitem__(self, key: torch.Tensor) -> None:
        _check(key)
        del self._kept[key]

    def __contains__(self, key: object) -> bool:
        _check(key)
        return key in self._kept

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return repr(dict(self._kept))


def _check(key: object) -> None:
    if isinstance(key, torch.Tensor) and find_slot(key) is not None:
        raise StateError(
            "optimizer.state of a sharded optimizer is kept by this rank's pieces, and not by parameters: read and "
            "replace states by shardcore.optim.local_state, full_state, set_local_state and set_full_state; "
            "optimizer.state.clear() forgets all of them"
        )
