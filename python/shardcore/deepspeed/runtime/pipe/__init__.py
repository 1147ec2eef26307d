"""``deepspeed.runtime.pipe``."""

from shardcore.deepspeed.runtime.pipe import module, topology

__all__ = ["module", "topology"]
