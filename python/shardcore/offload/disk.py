"""The disk behind an offload: an engine for its transfers, and one file with all its space."""

from __future__ import annotations

from shardcore import comm
from shardcore._core import IoEngine, SwapFile
from shardcore.errors import StorageError
from shardcore.offload.host_pool import HostPool
from shardcore.offload.policy import Offload


def open_disk(offload: Offload, file_nbytes: int, pool: HostPool) -> tuple[IoEngine, SwapFile]:
    """An engine that knows the pool's memory, and a file of ``file_nbytes`` bytes. The file has all its space from the
    start and no name, so a disk that is too small shows before training, and nothing is left behind however the process
    ends.

    Raises:
        StorageError: the disk is too small, with the arithmetic; or the folder cannot be written.
    """
    engine = IoEngine(queue_depth=offload.queue_depth, block_nbytes=offload.block_nbytes)
    pool.register(engine)
    try:
        file = SwapFile(engine, offload.folders, file_nbytes, stripe_nbytes=offload.block_nbytes)
    except StorageError as error:
        comm.report_failure(error)
        raise
    return engine, file
