"""``initialize``: from DeepSpeed's arguments and config file to an engine, by the functions that hand-written loops
use.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardcore import comm, tensor, zero
from shardcore.config import BatchSizes, Classes, Config, LeafConfig, load_config
from shardcore.engine.engine import Engine
from shardcore.engine.network import communication, data_world, make_mesh
from shardcore.engine.recomputation import recompute
from shardcore.engine.stages import into_stages, listed, on_this_rank
from shardcore.errors import ConfigError, DropInConfigError
from shardcore.mesh import Mesh
from shardcore.offload import Offload
from shardcore.optim import (
    ConstantScale,
    DynamicScale,
    ShardedOptimizer,
    build_scheduler,
    optimizer_names,
    schedule_names,
)
from shardcore.optim import optimizer as make_optimizer
from shardcore.protocols import LossScale, find_context_axis, find_pipeline, find_tensor_axis

_log = logging.getLogger("shardcore")
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


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
    drop_in: bool = False,
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Shard ``model`` and wrap it in an engine, by DeepSpeed's signature. Collective over all ranks.

    Args:
        args: an argument namespace; its ``deepspeed_config`` is used if neither ``config`` nor ``config_params`` is
        given.
        model: changed in place; over pipeline stages, this rank's stages of it become the engine's ``module``, and the
            parameters of the others leave it for the meta device.
        optimizer: a torch optimizer, or a function of parameter groups; wins over the config's.
        model_parameters: parameters or groups to train; None means all of the model's.
        training_data: a dataset; the third result is then a loader of this rank's micro-batches.
        lr_scheduler: a torch scheduler, or a function of the optimizer; wins over the config's.
        config: a dict (never modified), the path of a JSON file, or base64 text; see ``docs/config.md``.
        mesh_param: a :class:`shardcore.Mesh` or a DeviceMesh; None makes the mesh that the config asks for
            (``pipeline.stages``, ``tensor_parallel.tp_size``, ``sequence_parallel_size``,
            ``expert_parallel.autoep_size``, ``zero_optimization.replicate_size``), whose other ranks are data-parallel.
        drop_in: DeepSpeed's defaults and error classes where they differ from the native ones.

    Returns:
        (engine, optimizer, training loader, scheduler); the last three None where there is none.

    Raises:
        ConfigError: everything that is wrong with the arguments and the config, at once where possible.
        RankMismatchError: ranks were given different configurations.
    """
    failure = DropInConfigError if drop_in else ConfigError
    if not isinstance(model, nn.Module):
        raise failure(f"initialize requires a model (torch.nn.Module), got {type(model).__name__}: pass model=...")
    if mpu is not None:
        raise failure(
            "initialize(mpu=...) is not supported: pass mesh_param=shardcore.Mesh(...) with named axes instead"
        )
    if dist_init_required and distributed_port != 29500:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    mesh = _mesh(model, mesh_param)
    is_given = mesh_param is not None or find_pipeline(model) is not None
    loaded = load_config(
        _config_source(args, config, config_params, failure),
        data_world=lambda config: data_world(config, mesh, is_given=is_given),
        drop_in=drop_in,
        accumulation_argument=getattr(args, "gradient_accumulation_steps", None),
        classes=Classes(optimizers=optimizer_names(), schedules=schedule_names()),
    )
    _agree_on(loaded, mesh)
    mesh = make_mesh(loaded, mesh, failure, is_given=is_given)
    _announce(loaded, mesh, replaces_optimizer=optimizer is not None)
    batch = loaded.resolve_batch(mesh.data_world)
    parameters = listed(model_parameters)
    whole = set(model.parameters())
    model = _split(loaded, model, mesh, batch)
    parameters = on_this_rank(model, whole, parameters, optimizer)
    recompute(loaded, model, mesh)
    _shard(loaded, model, mesh, communication(loaded, mesh, failure))
    sharded = _optimizer(loaded, model, optimizer, parameters)
    scheduler = _scheduler(loaded, sharded, lr_scheduler)
    engine = Engine(model, sharded, scheduler, config=loaded, batch=batch, mesh=mesh, collate_fn=collate_fn)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, sharded, engine.training_dataloader, scheduler


def _split(config: Config, model: nn.Module, mesh: Mesh, batch: BatchSizes) -> nn.Module:
    """The model's layers, experts and sequences over their axes, and this rank's stages, where not split already."""
    if max(mesh["tp"].size, mesh["ep"].size) > 1 and find_tensor_axis(model.parameters()) is None:
        tensor.parallelize(model, mesh)
    if mesh["cp"].size > 1 and find_context_axis(model) is None:
        tensor.context_parallel(model, mesh, config.sequence.attention)
    if mesh["pp"].size > 1 and find_pipeline(model) is None:
        return into_stages(config, model, mesh, batch.accumulation_steps)
    return model


def _agree_on(config: Config, mesh: Mesh) -> None:
    """Raise on every rank unless all ranks have read the same configuration; where it came from may differ."""
    told = {f.name: getattr(config, f.name) for f in fields(config)}
    for name in ("label", "given", "ignored", "notes"):
        del told[name]
    comm.agree_on_settings("the configuration", told, mesh["dp"])


def _mesh(model: nn.Module, given: Any) -> Mesh:
    """The mesh that was given, else a pipeline's own, else all ranks in data parallel."""
    if given is not None:
        return given if isinstance(given, Mesh) else Mesh.from_torch(given)
    part = find_pipeline(model)
    return Mesh() if part is None else part.mesh


def _shard(config: Config, model: nn.Module, mesh: Mesh, saving: zero.Communication) -> None:
    _mark_leaves(config, model)
    zero.shard(
        model,
        mesh,
        stage=config.zero.stage,
        precision=_precision(config),
        segment_nbytes=_segment_nbytes(config, mesh),
        prefetch=_prefetch_limits(config),
        offload=_offload(config),
        communication=saving,
    )


def _offload(config: Config) -> Offload | None:
    """The homes that the file asks for; None where everything stays on the device."""
    asked = config.offload
    states, params = (None if device == "none" else device for device in (asked.optimizer_device, asked.param_device))
    if states is None and params is None:
        return None
    room = asked.param_max_in_cpu
    offload = Offload(
        params=params,
        grads=None if states is None else "cpu",
        states=states,
        path=(asked.optimizer_path if states == "nvme" else None) or (asked.param_path if params == "nvme" else None),
        ratio=asked.ratio if states == "cpu" else 1.0,
        pin=asked.param_pin if states is None else asked.optimizer_pin,
        num_tiles=asked.buffer_count,
        host_param_nbytes=None if room is None or params != "nvme" else room * _BYTES[config.param_dtype],
        queue_depth=asked.queue_depth,
        block_nbytes=asked.block_size,
    )
    if asked.sub_group_size is None:
        return offload
    # Front ends write DeepSpeed's default, a thousand million, which would leave nothing to overlap.
    return dataclasses.replace(offload, tile_numel=min(asked.sub_group_size, offload.tile_numel))


def _mark_leaves(config: Config, model: nn.Module) -> None:
    """Follow ``zero_optimization.leaf_module``; of a pipeline each rank marks what it has."""
    leaves = config.leaves
    modules = dict(model.named_modules())
    part = find_pipeline(model)
    everywhere = [sorted(modules)] if part is None else comm.exchange(sorted(modules), part.pipeline_axis, "modules")
    unknown = sorted(set(leaves.names).difference(*everywhere))
    if unknown:
        raise ConfigError(
            f"zero_optimization.leaf_module.names: {type(model).__name__} has no modules {unknown}; use the names of "
            "model.named_modules()"
        )
    present = {type(module).__name__ for module in modules.values()}
    may_lack = leaves.classes == LeafConfig().classes or part is not None
    classes = [name for name in leaves.classes if name in present] if may_lack else leaves.classes
    by_suffix = [m for name, m in modules.items() if leaves.name_suffixes and name.endswith(leaves.name_suffixes)]
    for found in (classes, [modules[name] for name in leaves.names if name in modules], by_suffix):
        if found:
            zero.set_leaf_modules(model, found)


def _prefetch_limits(config: Config) -> zero.PrefetchLimits:
    itemsize = _BYTES[config.param_dtype]
    return zero.PrefetchLimits(
        prefetch_nbytes=config.zero.prefetch_bucket_size * itemsize,
        max_live_nbytes=config.zero.max_live_parameters * itemsize,
        max_reuse_nbytes=config.zero.max_reuse_distance * itemsize,
        persistence_nbytes=config.zero.param_persistence_threshold * itemsize,
    )


def _segment_nbytes(config: Config, mesh: Mesh) -> int:
    """The largest group whose working buffers (a backward holds up to four at once) stay within one bucket."""
    bucket_nbytes = config.zero.reduce_bucket_size * _BYTES[config.param_dtype]
    return max(min(bucket_nbytes // 4, zero.default_segment_nbytes(mesh.device)), 1)


def _config_source(args: Any, config: Any, config_params: Any, failure: type[ConfigError]) -> Any:
    """The one config among the places where DeepSpeed takes it from."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        raise failure(
            "no configuration: pass config=<dict or path of a JSON file>, or --deepspeed_config on the command line"
        )
    if len(named) > 1:
        raise failure(f"the configuration was given {len(named)} times ({', '.join(named)}); give it once")
    return given[named[0]]


def _precision(config: Config) -> zero.Precision:
    scale: float | str | None = None
    if config.fp16.enabled:
        scale = "dynamic" if config.fp16.dynamic else config.fp16.loss_scale
    return zero.Precision(
        param=None if config.param_dtype == "fp32" else config.param_dtype,
        reduce=config.gradients.communication_dtype,
        loss_scale=scale,
        skip_nonfinite=True
        if config.fp16.enabled
        else config.bf16.check_grad_overflow
        if config.bf16.enabled
        else None,
    )


def _loss_scale(config: Config) -> LossScale:
    fp16 = config.fp16
    if not fp16.enabled:
        return ConstantScale()
    if not fp16.dynamic:
        return ConstantScale(fp16.loss_scale)
    return DynamicScale(
        scale=fp16.initial_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _optimizer(
    config: Config, model: nn.Module, client: ClientOptimizer | None, parameters: list[Any] | None
) -> ShardedOptimizer | None:
    """The client's optimizer, else the config's, else none (evaluation only)."""
    clip, scale = config.gradients.clipping, _loss_scale(config)
    if isinstance(client, torch.optim.Optimizer):
        sharded = make_optimizer(client, model, max_grad_norm=clip, loss_scale=scale)
    elif client is not None:
        sharded = make_optimizer(client, parameters or model, max_grad_norm=clip, loss_scale=scale)
    elif config.optimizer is not None:
        options = dict(config.optimizer.params)
        sharded = make_optimizer(
            config.optimizer.type, parameters or model, max_grad_norm=clip, loss_scale=scale, **options
        )
    else:
        return None
    sharded.track_grad_norm = True
    return sharded


def _scheduler(config: Config, optimizer: ShardedOptimizer | None, client: Any) -> Any:
    if client is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError(
            "a learning-rate scheduler was given without an optimizer; name one in the config or pass optimizer=..."
        )
    if client is None and config.scheduler is not None:
        return build_scheduler(optimizer, config.scheduler.type, dict(config.scheduler.params))
    return client if hasattr(client, "step") else client(optimizer)


def _announce(config: Config, mesh: Mesh, *, replaces_optimizer: bool) -> None:
    """Tell rank 0's log what the user should know, once."""
    if config.logging.level is not None:
        _log.setLevel(config.logging.level.upper())
    if mesh.rank != 0:
        return
    _show_log()
    notes = list(config.notes)
    if config.optimizer is not None and replaces_optimizer:
        notes = [note for note in notes if not note.startswith("optimizer.")]
        notes.append(f"optimizer: the section ({config.optimizer.type}) is not used, since an optimizer was passed in")
    for note in notes:
        _log.info("%s", note)
    if config.logging.dump_state:
        _log.info("%s", config.explain())


def _show_log() -> None:
    """Notes and progress lines are meant to be read: where the program has not set up logging, they go to stderr."""
    if _log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] shardcore: %(message)s", "%H:%M:%S"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
