"""``shardcore-launch``: start one process per GPU (or CPU core) of this machine, and end them all together."""

from shardcore.launch.command import main
from shardcore.launch.plan import LaunchPlan

__all__ = ["LaunchPlan", "main"]
