"""The engine: a module, its optimizer and scheduler, and the bookkeeping of accumulation windows. Nothing else.

It owns no hook, allocates no tensor and opens no stream. A loop written by hand over ``shardcore.shard`` and
``shardcore.optimizer`` gives the same parameters, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from shardcore import data, zero
from shardcore.config import BatchSizes, Config
from shardcore.engine.calls import call
from shardcore.engine.checkpoints import Checkpoints
from shardcore.engine.pipelined import PipelineCalls
from shardcore.engine.queries import Queries
from shardcore.engine.timing import PhaseTimes
from shardcore.engine.upkeep import Upkeep
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Mesh
from shardcore.optim import ShardedOptimizer
from shardcore.protocols import find_pipeline, find_root

_log = logging.getLogger("shardcore")


class Engine(PipelineCalls, Checkpoints, Queries, Upkeep, nn.Module):
    """Trains a sharded module by ``loss = engine(batch); engine.backward(loss); engine.step()``, once per micro-batch.

    ``step`` acts when ``gradient_accumulation_steps`` micro-batches are in; before that it only counts. A plain
    ``loss.backward()`` is equivalent to ``engine.backward(loss)``. Unknown attributes are looked up on the module.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        *,
        config: Config,
        batch: BatchSizes,
        mesh: Mesh,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.mesh = mesh
        self.training_dataloader: DataLoader[Any] | None = None
        self.global_steps = 0
        """Optimizer steps, applied or skipped."""
        self.global_samples = 0
        self.micro_steps = 0
        """Calls of ``step()``, over the whole run."""
        self._batch = batch
        self._collate_fn = collate_fn
        self._root: Any = find_root(module)
        self._window_steps = 0
        self._forced_boundary: bool | None = None
        self._is_coalesced = self._is_counting = self._has_warned = False
        self._times = PhaseTimes(enabled=config.logging.wall_clock_breakdown)
        self.is_pipeline = find_pipeline(module) is not None
        """Whether the module is one rank's stages; then its forward is a whole training step, backward included."""
        self._prepare_backward()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; of a pipeline, forward and backward of a whole step, which returns its mean loss. One
        dict whose keys are arguments of the module is spread over them, and gives the output's ``loss``, if any.
        """
        if self.is_pipeline:
            return self._call_pipeline(args, kwargs)
        with self._times.phase("forward"):
            return call(self.module, args, kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        num_tokens: int | float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Backward of one micro-batch's mean loss. Collective over the data-parallel axis where this stage reduces now.

        Args:
            loss: a scalar; its gradient is divided by the accumulation count (unless ``scale_wrt_gas=False``) and
                multiplied by the loss scale where the backward starts, as for a plain ``loss.backward()``.
            num_tokens: the loss is a sum over so many target tokens; the step takes the gradient of the mean over all
                tokens of all ranks and micro-batches. Then every backward of the window says its number (0 is fine),
                and the loss is not divided by the accumulation count.

        Returns:
            The loss divided by the accumulation count, not multiplied by the loss scale.

        Raises:
            StateError: the loss is no scalar, nothing in it requires a gradient, or the window's backwards differ in
                whether they count tokens.
        """
        if self.is_pipeline and self._root.window.num_backwards_in_micro_batch:
            return loss  # the pipeline has run it
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise StateError(
                f"engine.backward expects a scalar loss that requires a gradient, got {_describe(loss)}; reduce it "
                "with .mean(), and compute it outside torch.no_grad()"
            )
        by_tokens = self._counts_tokens(num_tokens)
        try:
            self._root.accumulation = self._batch.accumulation_steps if scale_wrt_gas else 1
            with self._times.phase("backward"):
                loss.backward(retain_graph=retain_graph)
        finally:
            self._root.accumulation = self._batch.accumulation_steps
        if self.optimizer is not None and num_tokens is not None:
            self.optimizer.count_tokens(num_tokens)
        return loss.detach() / self._batch.accumulation_steps if scale_wrt_gas and not by_tokens else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the current loss scale, for a loop that shows scaled losses; in fp32, where the product is in
        range. ``engine.scale(loss).backward()`` is the same as ``loss.backward()``: nothing is scaled twice.
        """
        scale = self.loss_scale()
        return loss if scale == 1.0 else zero.mark_scaled(loss.float() * scale, scale)

    def step(self, lr_kwargs: dict[str, Any] | None = None, flush: bool = False) -> None:
        """End a micro-batch; at the accumulation boundary update parameters and learning rate, and clear gradients.

        Args:
            flush: update now with the micro-batches that are in; their mean is taken over as many as there are. Does
                nothing if there are none.

        Raises:
            StateError: no backward since the last ``step()``, no optimizer, or called inside ``no_sync``.
        """
        optimizer = self._checked_optimizer()
        self._window_steps = min(self._window_steps, self._root.num_micro_batches)  # 0 where gradients were cleared
        at_boundary = self.is_gradient_accumulation_boundary()
        num_backwards = self._root.window.num_backwards_in_micro_batch
        if num_backwards:
            self._root.window.num_backwards_in_micro_batch = 0
            self._warn_of_missing_steps(num_backwards, at_boundary)
            self.micro_steps += 1
            self._window_steps += 1
            self._root.num_micro_batches = self._batch.accumulation_steps if self._is_coalesced else self._window_steps
        elif not flush:
            raise StateError(
                "engine.step() without a backward that reached the model: call engine.backward(loss) (or "
                "loss.backward()) for each micro-batch first, with a loss that comes from what the model returned"
            )
        if (at_boundary or flush) and self._window_steps:
            with self._times.phase("step"):
                self._update(optimizer, lr_kwargs)
        self._prepare_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the window's gradients."""
        self._root.clear_gradients(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming (or running) micro-batch is the window's last."""
        if self._is_coalesced or self._forced_boundary is not None:
            return self._is_coalesced or bool(self._forced_boundary)
        return not self.config.batch.managed or self._window_steps + 1 >= self._batch.accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming micro-batch is the window's last, instead of counting. Holds until set again."""
        self._forced_boundary = bool(is_boundary)
        self._prepare_backward()

    def reset_iteration(self) -> None:
        """After an exception in a step: drop the window and return to the state between steps. Collective over all
        ranks.
        """
        self._root.reset_iteration()
        self._window_steps = 0
        self._is_coalesced = False
        self._prepare_backward()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation count; the micro-batch stays.

        Raises:
            ConfigError: not divisible by micro-batch x data-parallel ranks (a ValueError).
        """
        per_step = self._batch.micro_batch_size * self.mesh.data_world
        if train_batch_size < 1 or train_batch_size % per_step:
            raise ConfigError(
                f"train batch size {train_batch_size} must be a positive multiple of micro batch "
                f"{self._batch.micro_batch_size} x "
                f"{self.mesh.data_world} data-parallel ranks = {per_step}"
            )
        self._set_batch(self._batch.micro_batch_size, train_batch_size // per_step)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation count stays, so the global batch changes with it."""
        if micro_batch_size < 1:
            raise ConfigError(f"micro batch size {micro_batch_size}: expected at least 1")
        self._set_batch(micro_batch_size, self._batch.accumulation_steps)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | Iterable[int] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches; training data are shuffled, other routes keep their order. Without a
        sampler of the caller's, the position in the data is known and saved with checkpoints.
        """
        batch_size = batch_size or self._batch.micro_batch_size
        options: dict[str, Any] = {
            "collate_fn": collate_fn or self._collate_fn,
            "num_workers": num_local_io_workers or 0,
            "drop_last": self.config.data.drop_last,
            "pin_memory": pin_memory and self.device.type == "cuda",
        }
        if data_sampler is not None:
            return DataLoader(dataset, batch_size=batch_size, sampler=data_sampler, **options)
        sampler = data.sampler(dataset, self.mesh, shuffle=route == "train")
        return data.RankLoader(dataset, sampler, batch_size, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"neither Engine nor the module {type(module).__name__} has an attribute {name!r}"
                ) from None
            return getattr(module, name)

    def _checked_optimizer(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise StateError(
                "engine.step() without an optimizer: pass one to initialize(optimizer=...) or name it in the "
                "config ('optimizer' section)"
            )
        if self._root.window.suspended:
            raise StateError(
                "engine.step() inside no_sync() or coalesce_grad_reduction(): leave the context before the step"
            )
        if self.optimizer.has_unscaled(self._root):
            raise StateError(
                "engine.step() after optimizer.step() took the same gradients: call one of them, or zero_grad() between"
            )
        return self.optimizer

    def _update(self, optimizer: ShardedOptimizer, lr_kwargs: dict[str, Any] | None) -> None:
        optimizer.step()
        optimizer.zero_grad()
        self._window_steps = 0
        self._is_coalesced = False
        self.global_steps += 1
        self.global_samples += self._batch.train_batch_size
        if optimizer.step_was_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._report()

    def _prepare_backward(self) -> None:
        """Tell the model what a coming backward means: plain ``loss.backward()`` and ``engine.backward`` are the
        same.
        """
        self._root.accumulation = self._batch.accumulation_steps
        self._root.window.last_backward = self.is_gradient_accumulation_boundary()

    def _set_batch(self, micro: int, accumulation: int) -> None:
        total = micro * accumulation * self.mesh.data_world
        self._batch = BatchSizes(
            train_batch_size=total,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            data_world=self.mesh.data_world,
        )
        self._prepare_backward()

    def _report(self) -> None:
        every = self.config.logging.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            _log.info(
                "step=%d skipped=%d lr=%s mom=%s", self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom()
            )
            self._times.report(_log, every)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
