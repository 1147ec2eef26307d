"""DeepSpeed's names over shardcore: ``import shardcore.deepspeed as deepspeed``.

The same ``ds_config.json`` and the same loop run unchanged. Defaults and error classes are DeepSpeed's where they
differ from the native ones (``docs/config.md`` lists them).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from shardcore import __version__
from shardcore.config import drop_in_errors
from shardcore.deepspeed import accelerator, checkpointing, comm, ops, pipe, runtime, utils, zero
from shardcore.deepspeed.aliases import install
from shardcore.deepspeed.missing import describe, explain_imports
from shardcore.deepspeed.pipe import PipelineModule
from shardcore.engine import Engine as DeepSpeedEngine
from shardcore.engine import initialize as _initialize
from shardcore.errors import ConfigError
from shardcore.mesh import init_process_group

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from shardcore.engine import ClientOptimizer
    from shardcore.optim import ShardedOptimizer

__all__ = [
    "DeepSpeedEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "install",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

explain_imports(__all__)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: dict[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: dict[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[DeepSpeedEngine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Shard ``model`` and wrap it in an engine. Collective over all ranks.

    As :func:`shardcore.initialize`, whose arguments these are, with DeepSpeed's defaults: gradients are clipped at 1.0
    and AdamW decays nothing unless the configuration says otherwise.

    Args:
        args: an argument namespace; its ``deepspeed_config`` is used if no other configuration is given.
        model: changed in place.
        optimizer: a torch optimizer, or a function of parameter groups; wins over the configuration's.
        model_parameters: parameters or groups to train; None means all of the model's.
        training_data: a dataset; the third result is then a loader of this rank's micro-batches.
        lr_scheduler: a torch scheduler, or a function of the optimizer; wins over the configuration's.
        distributed_port: where ranks meet, with ``dist_init_required``, if the environment does not say.
        mpu: refused; pass ``mesh_param``.
        collate_fn: makes a batch of samples.
        config: a dict (never modified), the path of a JSON file, or base64 text; see ``docs/config.md``.
        mesh_param: a :class:`shardcore.Mesh` or a DeviceMesh; None means all ranks in data parallel.
        config_params: an older name of ``config``.

    Returns:
        (engine, optimizer, training loader, scheduler); the last three None where there is none.

    Raises:
        DropInConfigError: a :class:`shardcore.errors.ConfigError` that is an AssertionError as well, for everything
            that is wrong with the arguments and the configuration.
        RankMismatchError: ranks were given different configurations.
    """
    with drop_in_errors():
        return _initialize(
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            config,
            mesh_param,
            config_params,
            drop_in=True,
        )


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
    raise AttributeError(describe(name, __all__))
