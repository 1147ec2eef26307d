"""``deepspeed.zero``: parameters made whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from shardcore import zero

__all__ = ["GatheredParameters"]


def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """A context in which ``params`` are whole on every rank; edits by ``modifier_rank`` reach all ranks. Collective.

    Raises:
        StateError: on leaving, if a parameter was written to and ``modifier_rank`` is None; the message names it.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    return zero.gathered(params, modifier_rank=modifier_rank, enabled=enabled)
