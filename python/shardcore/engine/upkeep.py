"""What an engine does around training steps: reduce several backwards once, move states away, end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardcore import zero
from shardcore.errors import StateError

if TYPE_CHECKING:
    from torch import nn

    from shardcore.config import BatchSizes
    from shardcore.optim import ShardedOptimizer

_log = logging.getLogger("shardcore")


class Upkeep:
    """Mixed into the engine."""

    module: nn.Module
    optimizer: ShardedOptimizer | None
    _root: Any
    _is_coalesced: bool
    _is_counting: bool
    """The window's backwards said their numbers of tokens."""
    _has_warned: bool
    """Of calls of ``step()`` that seem to be missing."""
    _batch: BatchSizes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up on this rank. ``step()`` inside is an error."""
        with zero.no_sync(self.module):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside only add up on this rank; leaving reduces their sum once, and the next ``step()`` updates,
        whatever the accumulation count. Each backward is divided by that count, as elsewhere. Collective on leaving.
        """
        with zero.reduce_once(self.module):
            yield
        self._is_coalesced = True

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory and free their place; see :func:`shardcore.zero.offload_states`.

        Raises:
            ConfigError: a device other than the CPU ("nvme"), or an unknown state (a ValueError).
        """
        device = str(getattr(device, "value", device))
        zero.offload_states(self.module, include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` moved away, to the last bit."""
        zero.reload_states(self.module, non_blocking)

    def empty_partition_cache(self) -> None:
        """Release parameters that stage 3 keeps gathered between forward and backward; nothing during a pass."""
        self._root.rest()

    def destroy(self) -> None:
        """Free gradients and optimizer states; forward and ``step()`` raise :class:`StateError` from now on. The
        parameters stay as they are, and can be read by ``shardcore.summon``. A second call does nothing.

        Raises:
            StateError: a forward or backward is running.
        """
        if self._root.is_passing or self._root.backward_running:
            raise StateError("destroy() during a forward or backward: finish it, or call reset_iteration() first")
        self._root.close()
        if self.optimizer is not None:
            self.optimizer.inner.state.clear()

    def _counts_tokens(self, num_tokens: object) -> bool:
        """Whether the window is normalised by tokens; its first backward decides."""
        if self.optimizer is None:
            return False
        if self._root.window.num_backwards == 0:
            was_counting, self._is_counting = self._is_counting, num_tokens is not None
            if self._is_counting != was_counting:
                self.optimizer.normalize = "tokens" if self._is_counting else None
        elif self._is_counting != (num_tokens is not None):
            raise StateError(
                "engine.backward(loss, num_tokens=...): the backwards of one window either all count their tokens, and "
                "their losses are sums, or none does"
            )
        return self.optimizer.normalize is not None

    def _warn_of_missing_steps(self, num_backwards: int, at_boundary: bool) -> None:
        """Several losses may share a micro-batch; as many as a window has micro-batches look like a forgotten call."""
        if at_boundary or num_backwards < self._batch.accumulation_steps:
            return
        if self._has_warned or self._root.data_axis.rank != 0:
            return
        self._has_warned = True
        _log.warning(
            "engine.step() counts one micro-batch of %d for the %d backwards since the last call, and updates nothing "
            "yet; where each was a micro-batch, call engine.step() after each",
            self._batch.accumulation_steps,
            num_backwards,
        )
