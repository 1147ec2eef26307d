"""Taking host memory together: the ranks of one machine see first whether it has enough for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from shardcore import comm
from shardcore._core import check_host_memory
from shardcore.errors import StorageError
from shardcore.offload.host_pool import HostPool

if TYPE_CHECKING:
    from shardcore.mesh import Axis


def take_pool(tensors: Iterable[tuple[str, int, torch.dtype]], axis: Axis, *, pin: bool) -> HostPool:
    """A pool for exactly these tensors, each (what it is, numel, dtype), to be taken in this order. Collective over
    ``axis``: all ranks see whether the memory of the machine is enough for those on it before any takes its own.

    Raises:
        StorageError: the machine has less; the message has the sum by what the tensors are.
    """
    listed = list(tensors)
    nbytes = HostPool.required((numel, dtype) for _, numel, dtype in listed)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        check_host_memory(f"offload ({num_ranks} ranks on this machine x {_sum_of(listed)})", nbytes * num_ranks)
        comm.max_over_ranks(torch.zeros(1, dtype=torch.uint8), axis, "host memory")
        return HostPool(nbytes, pin=pin)
    except StorageError as error:
        comm.report_failure(error)
        raise


def _sum_of(tensors: Sequence[tuple[str, int, torch.dtype]]) -> str:
    sums: dict[str, int] = {}
    for what, numel, dtype in tensors:
        sums[what] = sums.get(what, 0) + numel * dtype.itemsize
    terms = " + ".join(f"{what} {nbytes}" for what, nbytes in sums.items())
    return f"({terms} = {sum(sums.values())} bytes)"
