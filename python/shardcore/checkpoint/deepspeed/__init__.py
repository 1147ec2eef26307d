"""DeepSpeed's checkpoints, read without DeepSpeed and without running anything that their files name."""

from shardcore.checkpoint.deepspeed.folders import find_folder, looks_like_deepspeed
from shardcore.checkpoint.deepspeed.reading import collect

__all__ = ["collect", "find_folder", "looks_like_deepspeed"]
