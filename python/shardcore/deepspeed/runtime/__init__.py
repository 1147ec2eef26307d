"""``deepspeed.runtime``: the parts that scripts import by name."""

from shardcore.deepspeed.runtime import lr_schedules, pipe

__all__ = ["lr_schedules", "pipe"]
