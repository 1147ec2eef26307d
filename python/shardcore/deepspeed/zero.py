"""``deepspeed.zero``: parameters made whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from shardcore import zero

__all__ = ["GatheredParameters", "register_external_parameter", "unregister_external_parameter"]

register_external_parameter = zero.register_external_parameter
unregister_external_parameter = zero.unregister_external_parameter


def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """A context in which ``params`` are whole on every rank; edits by ``modifier_rank`` reach all ranks. Collective on
    entering and leaving. See :func:`shardcore.zero.gathered`.

    Raises:
        StateError: on leaving, if a parameter was written to and ``modifier_rank`` is None, or one that is not in
            ``params``; the message names it, on every rank, and the write is undone.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    return zero.gathered(params, modifier_rank=modifier_rank, enabled=enabled)
