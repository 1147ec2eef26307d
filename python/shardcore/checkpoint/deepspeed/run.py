"""What a DeepSpeed run is besides tensors: counters, schedule, the user's own state."""

from __future__ import annotations

from typing import Any

import torch

from shardcore.checkpoint.collected import Collected
from shardcore.checkpoint.deepspeed.folders import Files
from shardcore.checkpoint.deepspeed.optimizer import Optimizer
from shardcore.checkpoint.values import encode
from shardcore.errors import CheckpointError

_OWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts",
        "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version", "ds_autoep_layers",
        "autoep_layers",
    }
)  # fmt: skip
"""What DeepSpeed itself puts into a model's file; everything else is the user's."""


def describe_run(found: Collected, model: dict[str, Any], optimizer: Optimizer, files: Files) -> None:
    """Fill in what an index says of a training.

    Args:
        model: the model's file of the first rank.
    """
    config = model.get("ds_config") if isinstance(model.get("ds_config"), dict) else {}
    num_ranks = max(len(files.ranks_of(stage)) for stage in files.stages)
    described = optimizer.describe(_class_name(config), model)
    found.training |= {
        "model": f"imported from DeepSpeed {model.get('ds_version', '')}".rstrip(),
        "torch": torch.__version__,
        "stage": _stage(config),
        "mesh": {"pp": len(files.stages), "shard": num_ranks},
        "world": len(files.stages) * num_ranks,
        "optimizer": described,
        "pipeline": {"num_steps": int(model.get("global_steps") or 0)} if files.layers else None,
        "parts": _parts(found, model, config, optimizer),
        "client_state": _client_state(found, model),
    }


def _class_name(config: Any) -> str:
    section = config.get("optimizer")
    return str(section.get("type", "an optimizer")) if isinstance(section, dict) else "an optimizer"


def _stage(config: Any) -> int:
    section = config.get("zero_optimization")
    return int(section.get("stage", 0)) if isinstance(section, dict) else 0


def _parts(found: Collected, model: dict[str, Any], config: Any, optimizer: Optimizer) -> dict[str, Any]:
    steps = int(model.get("global_steps") or 0)
    accumulation = config.get("gradient_accumulation_steps")
    counters = {
        "global_steps": steps,
        "global_samples": int(model.get("global_samples") or 0),
        "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
    }
    parts: dict[str, Any] = {"engine": counters}
    scheduler = model.get("lr_scheduler")
    if scheduler is not None:
        state = _schedule(scheduler, optimizer.groups) if "last_batch_iteration" in scheduler else scheduler
        try:
            parts["scheduler"] = encode(state, "the state of the schedule")
        except CheckpointError as error:
            found.notes.append(f"{error}; the schedule begins anew")
    return parts


def _schedule(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The position of one of DeepSpeed's schedules as ours keep it: the same place on the curve."""
    done = max(int(state["last_batch_iteration"]), 0)
    rates = [float(group["lr"]) for group in groups]
    first = [float(group.get("initial_lr", group["lr"])) for group in groups]
    momenta = [group["betas"][0] if "betas" in group else group.get("momentum") for group in groups]
    return {"last_epoch": done, "step_count": done + 1, "base_lrs": first, "lrs": rates, "momenta": momenta}


def _client_state(found: Collected, model: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in model.items():
        if key in _OWN_KEYS:
            continue
        try:
            kept[key] = encode(value, f"client_state[{key!r}]")
        except CheckpointError as error:
            found.notes.append(f"{error}; it is left out")
    return kept
