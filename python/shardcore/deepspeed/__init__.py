"""DeepSpeed's names over shardcore: ``import shardcore.deepspeed as deepspeed``.

The same ``ds_config.json`` and the same loop run unchanged. Defaults and error classes are DeepSpeed's where they
differ from the native ones (``docs/config.md`` lists them).
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from shardcore import __version__
from shardcore.deepspeed import pipe, utils, zero
from shardcore.deepspeed.pipe import PipelineModule
from shardcore.engine import Engine as DeepSpeedEngine
from shardcore.engine import initialize as _initialize
from shardcore.errors import ConfigError
from shardcore.mesh import init_process_group

__all__ = [
    "DeepSpeedEngine",
    "PipelineModule",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "pipe",
    "utils",
    "zero",
]

initialize = partial(_initialize, drop_in=True)


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Join the job described by the environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).
    Collective.

    Args:
        dist_backend: "gloo", "nccl" or None for what the devices need.
        **options: DeepSpeed's other arguments; those that would change where ranks meet are refused, the rest have no
        effect.

    Raises:
        ConfigError: an unknown backend, or ``init_method``, ``rank`` or ``world_size`` that contradict the environment.
    """
    if dist_backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"init_distributed(dist_backend={dist_backend!r}): expected 'gloo', 'nccl' or None")
    for name in ("init_method", "rank", "world_size"):
        if options.get(name) not in (None, -1):
            raise ConfigError(
                f"init_distributed({name}={options[name]!r}): set it through the launcher's environment variables "
                "instead"
            )
    init_process_group(None if dist_backend is None else "cuda" if dist_backend == "nccl" else "cpu")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser, as DeepSpeed scripts expect; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "options of the drop-in engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (a flag for the script's own logic)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    for old in ("--deepscale", "--deepscale_config"):
        kind: dict[str, Any] = {"action": "store_true"} if old == "--deepscale" else {"type": str, "default": None}
        group.add_argument(old, help=argparse.SUPPRESS, **kind)
    return parser


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"shardcore.deepspeed does not offer {name!r} yet; it has {', '.join(__all__)}")
