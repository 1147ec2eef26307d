"""Tensors outside the device: exactly sized host memory, and disks that are read and written while training goes on.

>>> import torch
>>> from shardcore import offload
>>> with offload.IoEngine() as io:
...     io.write("/tmp/moments", torch.arange(1000.0)).wait()
...     back = offload.HostPool(4000, pin=False).tensor(1000, torch.float32)
...     io.read("/tmp/moments", back).wait()
"""

from __future__ import annotations

from shardcore._core import IoEngine, IoHandle, SwapFile

from .host_pool import HostPool
from .lanes import Lane, Ticket
from .passing import Passing, PassingStore
from .policy import Offload
from .shard_store import ShardStore, StoredShard
from .shards import ShardMemory, ShardSpec, place_shards
from .taking import take_pool
from .tiles import TileSpec, TileStore

__all__ = [
    "HostPool",
    "IoEngine",
    "IoHandle",
    "Lane",
    "Offload",
    "Passing",
    "PassingStore",
    "ShardMemory",
    "ShardSpec",
    "ShardStore",
    "StoredShard",
    "SwapFile",
    "Ticket",
    "TileSpec",
    "TileStore",
    "place_shards",
    "take_pool",
]
