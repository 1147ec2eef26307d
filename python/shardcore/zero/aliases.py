"""Whole parameters are released although code outside may still show their memory: a detached view, a numpy array.

- What was taken inside ``summon`` keeps its memory, with the values of that time; the group goes on in memory of its
  own. So does what cannot be released, since numpy, DLPack or another process has seen it.
- Anything else that shows released memory, such as a detached parameter that a forward has put aside, raises an error
  when it is read. A kernel would crash on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardcore import _torch_private as private

if TYPE_CHECKING:
    from shardcore.protocols import ParameterSlot


def release(full: torch.Tensor, slots: Sequence[ParameterSlot], name: str, *, was_shown: bool) -> None:
    """Free the memory of ``full`` [padded_numel], of which each parameter is a view, or leave it to whoever shows it.

    Args:
        was_shown: a context had the parameters in its hands. What autograd has saved counts as shown, too: it keeps the
            memory then, instead of finding it gathered again.
    """
    storage = full.untyped_storage()
    if not storage.resizable() or (was_shown and private.num_storage_users(full) > 1 + len(slots)):
        storage = _renew(full, slots)
    storage.resize_(0)
    private.forbid_access(
        storage,
        f"this tensor shows parameters of unit {name!r} (stage 3), whose memory was released after the forward or "
        "backward in which the tensor was made: clone() what is to be kept, or take it inside shardcore.summon(model)",
    )


def reclaim(full: torch.Tensor, nbytes: int) -> None:
    """Give ``full`` memory again, of unknown contents."""
    storage = full.untyped_storage()
    private.allow_access(storage)
    storage.resize_(nbytes)


def _renew(full: torch.Tensor, slots: Sequence[ParameterSlot]) -> torch.UntypedStorage:
    """Give the buffer and its parameters another storage; their identities and version counters stay."""
    storage = torch.UntypedStorage(full.untyped_storage().nbytes(), device=full.device)
    with torch.no_grad(), private.without_torch_function():
        full.set_(storage, 0, full.shape, full.stride())
        for slot in slots:
            slot.param.data = full[slot.offset : slot.offset + slot.numel].view(slot.param.shape)
    return storage
