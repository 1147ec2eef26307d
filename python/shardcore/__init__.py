"""Train PyTorch models that do not fit one GPU, or not fast enough.

Names are imported when first used, so that ``shardcore.plan``, ``shardcore.config`` and the command line work without
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcore.engine import Engine as Engine
    from shardcore.engine import initialize as initialize
    from shardcore.integrations import load_safetensors as load_safetensors
    from shardcore.mesh import Mesh as Mesh
    from shardcore.offload import Offload as Offload
    from shardcore.optim import optimizer as optimizer
    from shardcore.zero import Communication as Communication
    from shardcore.zero import Precision as Precision
    from shardcore.zero import empty_init as empty_init
    from shardcore.zero import load_state_dict as load_state_dict
    from shardcore.zero import local_shard as local_shard
    from shardcore.zero import no_sync as no_sync
    from shardcore.zero import reset_iteration as reset_iteration
    from shardcore.zero import shard as shard
    from shardcore.zero import sharded_init as sharded_init
    from shardcore.zero import state_dict as state_dict
    from shardcore.zero import summon as summon

_HOME = {
    "Communication": "zero",
    "Engine": "engine",
    "Mesh": "mesh",
    "Offload": "offload",
    "Precision": "zero",
    "empty_init": "zero",
    "initialize": "engine",
    "load_safetensors": "integrations",
    "load_state_dict": "zero",
    "local_shard": "zero",
    "no_sync": "zero",
    "optimizer": "optim",
    "reset_iteration": "zero",
    "shard": "zero",
    "sharded_init": "zero",
    "state_dict": "zero",
    "summon": "zero",
}
_ROOMS = (
    "activation",
    "checkpoint",
    "comm",
    "config",
    "data",
    "deepspeed",
    "engine",
    "errors",
    "integrations",
    "launch",
    "mesh",
    "offload",
    "optim",
    "pipeline",
    "plan",
    "tensor",
    "testing",
    "zero",
)

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
