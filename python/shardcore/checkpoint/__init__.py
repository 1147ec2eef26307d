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
    from shardcore.checkpoint.dcp import import_dcp as import_dcp
    from shardcore.checkpoint.dcp import to_dcp as to_dcp
    from shardcore.checkpoint.deepspeed import looks_like_deepspeed as looks_like_deepspeed
    from shardcore.checkpoint.export import to_hf as to_hf
    from shardcore.checkpoint.export import to_torch as to_torch
    from shardcore.checkpoint.loading import from_hf as from_hf
    from shardcore.checkpoint.loading import load as load
    from shardcore.checkpoint.report import Loaded as Loaded
    from shardcore.checkpoint.report import Report as Report
    from shardcore.checkpoint.rewriting import import_deepspeed as import_deepspeed
    from shardcore.checkpoint.rewriting import reshard as reshard
    from shardcore.checkpoint.saving import save as save
    from shardcore.checkpoint.saving import wait as wait
    from shardcore.checkpoint.weights import StoredWeight as StoredWeight
    from shardcore.checkpoint.weights import open_weights as open_weights

_HOME = {
    "Difference": "comparing",
    "Loaded": "report",
    "Report": "report",
    "StoredWeight": "weights",
    "diff": "comparing",
    "from_hf": "loading",
    "import_dcp": "dcp",
    "import_deepspeed": "rewriting",
    "load": "loading",
    "looks_like_deepspeed": "deepspeed",
    "open_weights": "weights",
    "reshard": "rewriting",
    "save": "saving",
    "to_dcp": "dcp",
    "to_hf": "export",
    "to_torch": "export",
    "wait": "saving",
}
"""Names whose file imports torch, and that file."""

__all__ = [
    "Damage",
    "Difference",
    "Loaded",
    "Report",
    "StoredWeight",
    "diff",
    "explain_checkpoint",
    "explain_run",
    "from_hf",
    "import_dcp",
    "import_deepspeed",
    "latest_checkpoint",
    "list_checkpoints",
    "load",
    "looks_like_deepspeed",
    "open_weights",
    "reshard",
    "save",
    "to_dcp",
    "to_hf",
    "to_torch",
    "verify",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"shardcore.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shardcore.checkpoint' has no attribute {name!r}")
