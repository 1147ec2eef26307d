"""Checkpoints: saved on any mesh, loaded on any other, never half-written.

A checkpoint holds the training under the names of the unsharded model, in safetensors files with a checksum for every
block, and a JSON index. Nothing is pickled. See ``docs/checkpoints.md``. Looking at checkpoints needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardcore._core import latest_checkpoint, list_checkpoints
from shardcore.checkpoint.describing import explain_checkpoint, explain_run
from shardcore.checkpoint.inspecting import Damage, verify

if TYPE_CHECKING:
    from shardcore.checkpoint.comparing import Difference as Difference
    from shardcore.checkpoint.comparing import diff as diff
    from shardcore.checkpoint.export import to_hf as to_hf
    from shardcore.checkpoint.loading import from_hf as from_hf
    from shardcore.checkpoint.loading import load as load
    from shardcore.checkpoint.report import Loaded as Loaded
    from shardcore.checkpoint.report import Report as Report
    from shardcore.checkpoint.rewriting import reshard as reshard
    from shardcore.checkpoint.saving import save as save
    from shardcore.checkpoint.saving import wait as wait

_HOME = {
    "Difference": "comparing",
    "Loaded": "report",
    "Report": "report",
    "diff": "comparing",
    "from_hf": "loading",
    "load": "loading",
    "reshard": "rewriting",
    "save": "saving",
    "to_hf": "export",
    "wait": "saving",
}
"""Names whose file imports torch, and that file."""

__all__ = [
    "Damage",
    "Difference",
    "Loaded",
    "Report",
    "diff",
    "explain_checkpoint",
    "explain_run",
    "from_hf",
    "latest_checkpoint",
    "list_checkpoints",
    "load",
    "reshard",
    "save",
    "to_hf",
    "verify",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"shardcore.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shardcore.checkpoint' has no attribute {name!r}")
