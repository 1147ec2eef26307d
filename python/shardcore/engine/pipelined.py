"""What an engine does where its module is one rank's stages of a pipeline: a call trains a whole step.

The pipeline is a collaborator: it runs forward and backward of all micro-batches, and the engine updates as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_pipeline

if TYPE_CHECKING:
    from torch import nn

    from shardcore.config import BatchSizes


class PipelineCalls:
    """DeepSpeed's names for a pipeline's steps; an error on engines without one."""

    module: nn.Module
    training: bool
    training_dataloader: Any
    micro_steps: int
    _batch: BatchSizes
    _root: Any
    _window_steps: int
    _data: Iterator[Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train one step on as many micro-batches as accumulation steps. Collective over all ranks.

        Args:
            data_iter: yields (inputs, labels); None draws from the engine's loader (see :meth:`set_dataloader`).

        Returns:
            The mean loss, on every rank.
        """
        loss = self._train_micro_batches(data_iter if data_iter is not None else self._own_data())
        self.step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of some micro-batches without training, on every rank; with ``return_logits`` also the outputs
        of the last stage, by micro-batch, where it runs. Collective over all ranks.

        Raises:
            ConfigError: ``reduce_output`` is not "avg".
        """
        if reduce_output != "avg":
            raise ConfigError(f"eval_batch(reduce_output={reduce_output!r}): only 'avg' is supported")
        pipe = self._pipeline("eval_batch")
        count = num_micro_batches or self._batch.accumulation_steps
        loss, outputs = pipe.eval_batch(data_iter, count, return_outputs=True, compute_loss=compute_loss)
        result = loss if compute_loss else outputs
        return (result, outputs) if return_logits else result

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Draw micro-batches from this loader where ``train_batch`` gets no iterator; it is begun anew at its end."""
        self.training_dataloader, self._data = loader, None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Draw micro-batches from this iterator where ``train_batch`` gets none."""
        self.training_dataloader, self._data = None, iterator

    def is_first_stage(self) -> bool:
        """Whether this rank runs the first stage."""
        placement = self._pipeline("is_first_stage").placement
        return any(stage % placement.per_chain == 0 for stage in placement.stages)

    def is_last_stage(self) -> bool:
        """Whether this rank runs the last stage."""
        placement = self._pipeline("is_last_stage").placement
        return any(stage % placement.per_chain == placement.per_chain - 1 for stage in placement.stages)

    def step(self, lr_kwargs: dict[str, Any] | None = None, flush: bool = False) -> None:
        """See the engine."""
        raise NotImplementedError

    def _pipeline(self, name: str) -> Any:
        pipe = find_pipeline(self.module)
        if pipe is None:
            raise StateError(
                f"engine.{name}() is for pipelines; pass initialize(model=<PipelineModule or "
                "shardcore.pipeline.Pipeline>), or use engine(batch), engine.backward(loss), engine.step()"
            )
        return pipe

    def _train_micro_batches(self, data_iter: Iterator[Any] | None) -> torch.Tensor:
        """Forward and backward of a whole window; what is left is ``step``."""
        pipe = self._pipeline("train_batch")
        count = pipe.num_microbatches = self._batch.accumulation_steps
        loss: torch.Tensor = pipe.train_batch(data_iter)
        self.micro_steps += count - 1
        self._window_steps = count - 1
        self._root.window.num_backwards_in_micro_batch = 1  # what step() counts; also where no hook has fired
        return loss

    def _call_pipeline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """``engine(batch)``, ``engine(inputs, labels)`` or ``engine(**batch)``: a step's whole batch, cut into
        micro-batches.
        """
        pipe = self._pipeline("forward")
        if len(args) + bool(kwargs) > 2 or (args and kwargs):
            raise ConfigError(
                "an engine over pipeline stages is called as engine(batch), engine(inputs, labels) or engine(**batch)"
            )
        batch: Any = kwargs or (args[0] if len(args) == 1 else args or None)
        count = self._batch.accumulation_steps
        if self.training:
            self._check_rows(batch)
        data = None if batch is None else iter(_cut(batch, count))
        if self.training:
            return self._train_micro_batches(data)
        loss: torch.Tensor = pipe.eval_batch(data, count)
        return loss

    def _check_rows(self, batch: Any) -> None:
        """A loader's micro-batch, say, is not a step's whole batch."""
        micro, count = self._batch.micro_batch_size, self._batch.accumulation_steps
        num_rows = next((len(leaf) for leaf in _tensors(batch) if leaf.dim()), None)
        if num_rows not in (None, micro * count):
            raise ConfigError(
                f"engine(batch) over pipeline stages takes a step's whole batch on this rank: micro batch {micro} x "
                f"{count} accumulation steps = {micro * count} samples, got {num_rows}. Give it as many, or let "
                "engine.train_batch(data_iter) draw micro-batches"
            )

    def _own_data(self) -> Iterator[Any] | None:
        if self._data is None and self.training_dataloader is not None:
            self._data = _repeat(self.training_dataloader)
        return self._data


def _repeat(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested tuple, list or dict."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


def _cut(batch: Any, count: int) -> list[Any]:
    """``count`` micro-batches of a nested tuple, list or dict of tensors, along their first dim.

    Raises:
        ConfigError: the first dim is not divisible.
    """
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or batch.shape[0] % count:
            raise ConfigError(f"a batch of shape {tuple(batch.shape)} cannot be cut into {count} equal micro-batches")
        return list(batch.chunk(count))
    if isinstance(batch, Mapping):
        cut = {key: _cut(item, count) for key, item in batch.items()}
        return [{key: items[i] for key, items in cut.items()} for i in range(count)]
    if isinstance(batch, (tuple, list)):
        parts = [_cut(item, count) for item in batch]
        return [type(batch)(items) for items in zip(*parts, strict=True)]
    return [batch] * count
