"""Train PyTorch models that do not fit one GPU, or not fast enough.

Names are imported when first used, so that ``shardcore.plan``, ``shardcore.config`` and the command line work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcore.engine import Engine, initialize
    from shardcore.mesh import Mesh
    from shardcore.optim import optimizer
    from shardcore.zero import Precision, local_shard, no_sync, reset_iteration, shard, state_dict, summon

_HOME = {
    "Engine": "engine",
    "Mesh": "mesh",
    "Precision": "zero",
    "initialize": "engine",
    "local_shard": "zero",
    "no_sync": "zero",
    "optimizer": "optim",
    "reset_iteration": "zero",
    "shard": "zero",
    "state_dict": "zero",
    "summon": "zero",
}
_ROOMS = ("comm", "config", "data", "deepspeed", "engine", "errors", "launch", "mesh", "optim", "plan", "testing", "zero")

__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"shardcore.{name}")
    if name in _HOME:
        return getattr(import_module(f"shardcore.{_HOME[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("shardcore-torch")
    raise AttributeError(f"module 'shardcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
