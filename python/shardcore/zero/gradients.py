"""The gradients of one group: summed over micro-batches and uses, reduced over ranks, kept whole or as a shard.

There is one door, :meth:`GroupGradients.accumulate`; autograd hooks and other producers of gradients use it alike. The
whole buffer is one storage with a view per parameter. Where gradients are sharded it exists only from the first
gradient of a backward to the end of its reduction, by resizing that storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.zero.joining import JoinsReductions
from shardcore.zero.showing import ShowsGradients

if TYPE_CHECKING:
    from shardcore.mesh import Axis
    from shardcore.plan import ShardLayout
    from shardcore.protocols import ParameterSlot


class GroupGradients(ShowsGradients, JoinsReductions):
    """Gradient buffers of a group of ``padded_numel`` elements over a shard axis of S ranks.

    Local gradients are divided by the number of data-parallel ranks as they enter (where nothing is sharded: after the
    all-reduce, so that autograd itself may accumulate into ``param.grad``, and sums of two reductions stay right).
    """

    has_local = False
    """The whole buffer holds gradients of this rank that no reduction has taken yet."""
    was_reduced = False
    """A reduction of this window is in the shard."""
    program: comm.Program | None = None
    """The model's order of collectives."""
    _handle: comm.Handle | None = None
    _sent: torch.Tensor | None = None
    _host_is_current = False
    """What the update reads in host memory is what the device has, or was made of it."""

    def __init__(
        self,
        name: str,
        layout: ShardLayout,
        slots: Sequence[ParameterSlot],
        *,
        shard_axis: Axis,
        replicate_axis: Axis,
        route: comm.Route,
        keep_whole: bool,
        expose: bool,
        sum_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
        host_shard: torch.Tensor | None = None,
        rests_on_host: bool = False,
    ) -> None:
        self.name = name
        self._slots = slots
        self._shard_axis = shard_axis
        self._replicate_axis = replicate_axis
        self.route = route
        """The way of its shards between ranks."""
        self._host_shard = host_shard
        self._rests_on_host = rests_on_host and not keep_whole
        self._keep_whole = keep_whole or (shard_axis.size == 1 and not self._rests_on_host)
        self._reduce_dtype = reduce_dtype
        self._world = shard_axis.size * replicate_axis.size
        self.exposed = expose
        """Whether ``param.grad`` shows the reduced gradient (stage 0), as users of DDP expect."""

        self._layout = layout
        self._shard: torch.Tensor | None = None
        self._make_buffer(sum_dtype, device)
        self._num_users = private.num_storage_users(self._full)

        self.present = [False] * len(slots)
        """Which parameters got a gradient on this rank since the last clear."""
        self.has_sum = [False] * len(slots)
        """Of which a gradient has come that is not zero for sure."""
        self._written = [False] * len(slots)
        self._shown = [False] * len(slots)

    def _make_buffer(self, dtype: torch.dtype, device: torch.device) -> None:
        layout, start = self._layout, self._shard_axis.rank * self._layout.shard_numel
        self._full = torch.empty(layout.padded_numel, dtype=dtype, device=device)
        self._views = [self._full[s.offset : s.offset + s.numel].view(s.param.shape) for s in self._slots]
        self._gaps = [self._full[start:stop] for start, stop in layout.gaps()]
        self._nbytes = self._full.untyped_storage().nbytes()
        self._own = self._full[start : start + layout.shard_numel]
        self._rest = (self._full[:start], self._full[start + layout.shard_numel :])
        if self._keep_whole:
            self._shard = self._own
        self._resize(0)

    @property
    def shard(self) -> torch.Tensor:
        """[shard_numel] the reduced mean gradient of this rank's shard (zeros before any reduction), in host memory
        where the update runs there.
        """
        return self._device_shard if self._host_shard is None else self._host_shard

    @property
    def _device_shard(self) -> torch.Tensor:
        """Where reductions are summed up: in host memory too, if gradients rest there."""
        if self._keep_whole:
            self._allocate()
            return self._own
        if self._shard is None and self._rests_on_host:
            self._shard = self._host_shard
        if self._shard is None:
            self._shard = torch.zeros(self._own.shape, dtype=self._full.dtype, device=self._full.device)
        return self._shard

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad`` (the shape of parameter ``index``, any float dtype) to the window's sum."""
        if grad.is_sparse:
            raise ConfigError(
                f"parameter {self._slots[index].name!r} got a sparse gradient; sparse gradients are not supported: "
                "build the embedding with sparse=False"
            )
        self.finish_reduce()
        self._open()
        self.present[index] = self.has_sum[index] = True
        view = self._views[index]
        if self.holds(index, grad):
            self._written[index] = True  # autograd has added into the buffer itself
        elif self._written[index] and not self._was_reset(index):
            view.add_(grad, alpha=self._prescale)
        else:  # the first of the window, or the user has reset param.grad since it was shown
            self._write(view, grad)
            self._written[index] = True
            self._shown[index] = False

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is this buffer's own memory for the parameter."""
        return grad.numel() > 0 and grad.data_ptr() == self._views[index].data_ptr()

    def local_sum(self, index: int) -> torch.Tensor:
        """The unreduced sum of a parameter, in place; from now on it counts as a gradient, zeros if there was none."""
        self.finish_reduce()
        self._open()
        if not self._written[index]:
            self._views[index].zero_()
            self._written[index] = True
        self.present[index] = self.has_sum[index] = True
        return self._views[index]

    def empty_whole(self, index: int) -> None:
        """Set to zero what the whole buffer holds of a parameter, reduced or not; a shard of its own stays."""
        self.finish_reduce()
        if self._keep_whole and self._is_open():
            self._views[index].zero_()

    def start_reduce(self) -> None:
        """Start reducing the whole buffer into this rank's shard; absent gradients count as zero. Collective."""
        self.finish_reduce()  # that of the backward before, where no gradient has come since
        self._open()
        self.has_local = False
        if not all(self._written):
            private.zero_all([v for v, written in zip(self._views, self._written, strict=True) if not written])
        buffer = self._full
        if self._reduce_dtype != buffer.dtype and self._world > 1 and not self.route.rounds_reductions:
            buffer = self._sent = buffer.to(self._reduce_dtype)
        if self._shard_axis.size > 1:
            self._handle = self.route.reduce(buffer, self.name, self.program)
        else:
            self._handle = comm.all_reduce(buffer, self._replicate_axis, self.name, self.program)

    def finish_reduce(self) -> None:
        """Wait for a reduction under way and take its result; nothing if there is none."""
        if self._handle is None:
            return
        self._handle.wait()  # where this raises, the next call waits again
        self._handle = None
        sent, self._sent = self._sent, None
        reduced = self._own
        if sent is not None:
            start = self._own.storage_offset()
            reduced = sent[start : start + self._own.numel()]
        if self._shard_axis.size > 1 and self._replicate_axis.size > 1:
            reduced = self._sum_copies(reduced)
        if reduced is not self._own:
            self._own.copy_(reduced)
        if self._post_divide:
            self._full.mul_(1 / self._world)
        if not self._keep_whole:
            self._store_shard()
        self.was_reduced = True
        self._host_is_current = False

    def settle(self) -> None:
        """The window is complete: a shard that nothing was reduced into is zero, whatever the last window left
        there.
        """
        if not self.was_reduced:
            self._device_shard.zero_()
            self.was_reduced = True
            self._host_is_current = False
        if self._host_shard is not None and not self._rests_on_host and not self._host_is_current:
            self._host_shard.copy_(self._device_shard)
            self._host_is_current = True

    def buffers(self, *, whole: bool) -> list[torch.Tensor]:
        """The whole buffer, or the shard where it is a buffer of its own; empty where there is none now."""
        if whole:
            return [self._full] if self._is_open() else []
        return [self._shard] if self._shard is not None and not self._keep_whole else []

    def reduce_now(self, *, local_anywhere: bool) -> None:
        """Bring the shard up to date before the window's end. Collective where ``local_anywhere``: some rank holds
        gradients that no reduction has taken.
        """
        if local_anywhere:
            self.start_reduce()
        self.finish_reduce()
        self.settle()
        self.expose()

    def drop(self, index: int, *, set_to_none: bool = True) -> None:
        """Forget the gradient of one parameter, as :meth:`clear` does of all."""
        self.finish_reduce()
        slot = self._slots[index]
        if set_to_none or not self.exposed:  # there, what a backward that failed has left
            self._take_off(index)
            self._leave_to_user(keeps_values=True)
        if self._is_open():
            self._views[index].zero_()
        if self._shard is not None and not self._keep_whole:
            start = self._own.storage_offset()
            first, last = max(slot.offset - start, 0), min(slot.offset + slot.numel - start, self._own.numel())
            self._shard[first : max(first, last)].zero_()
        self._host_is_current = False
        self.has_sum[index] = False
        if set_to_none:
            self.present[index] = False

    def _assign(self, index: int, value: torch.Tensor) -> None:
        self.finish_reduce()
        if not self.has_local:
            self.settle()
        self._views[index].copy_(value)
        self.present[index] = self.has_sum[index] = self._written[index] = True
        self.show([index])

    def clear(self, set_to_none: bool) -> None:
        """Forget all gradients; with ``set_to_none=False`` they become zeros that still count as gradients."""
        self.finish_reduce()
        self.has_local = self.was_reduced = self._host_is_current = False
        self._written, self.has_sum = [False] * len(self._slots), [False] * len(self._slots)
        if set_to_none or not self.exposed:
            self._take_off()
        if set_to_none:
            self.present = [False] * len(self._slots)
            self._leave_to_user(keeps_values=False)
        else:
            self._device_shard.zero_()
            self.was_reduced = True
        if not self._keep_whole:
            self._resize(0)

    def free(self) -> None:
        """Forget all gradients and give their memory back."""
        self.abandon()
        self._resize(0)
        if not self._keep_whole:
            self._shard = None

    def abandon(self) -> None:
        """Drop everything after a failed step. A reduction under way is waited for: its memory is in use until then."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        self._sent = None
        self.route.forget_errors()
        self.clear(set_to_none=True)

    def _leave_to_user(self, *, keeps_values: bool) -> None:
        """If somebody keeps a gradient that a parameter has shown, leave the buffer to them, and go on with another."""
        if not (self.exposed and self._is_open()):
            return
        with private.without_torch_function():
            grads = [slot.param.grad for slot in self._slots]
        shown = [i for i, grad in enumerate(grads) if grad is not None and self.holds(i, grad)]
        if private.num_storage_users(self._full) <= self._num_users + len(shown):
            return
        old = self._full
        self._make_buffer(old.dtype, old.device)
        if keeps_values:
            self._resize(self._nbytes)
            self._full.copy_(old)
        with private.without_torch_function():
            for i in shown:
                self._slots[i].param.grad = self._views[i].detach()

    def _was_reset(self, index: int) -> bool:
        """Whether the user has replaced ``param.grad`` since it showed this buffer."""
        shown = self._slots[index].param.grad
        return self._shown[index] and (shown is None or not self.holds(index, shown))

    @property
    def _prescale(self) -> float:
        return 1.0 if self._post_divide else 1 / self._world

    @property
    def _post_divide(self) -> bool:
        return self._shard_axis.size == 1 and self._world > 1

    def _sum_copies(self, reduced: torch.Tensor) -> torch.Tensor:
        """Sum the reduced shard over the copies of the model, in the dtype in which gradients travel."""
        reduced = reduced.to(self._reduce_dtype)
        comm.all_reduce(reduced, self._replicate_axis, self.name, self.program).wait()
        return reduced

    def _write(self, view: torch.Tensor, grad: torch.Tensor) -> None:
        if self._prescale == 1.0:
            view.copy_(grad)
        elif grad.dtype == view.dtype:
            torch.mul(grad, self._prescale, out=view)
        else:
            view.copy_(grad).mul_(self._prescale)

    def _open(self) -> None:
        """Make the whole buffer ready for this rank's contributions."""
        if self.has_local:
            return
        self.has_local = True
        self._allocate()
        reduced_in_place = self._keep_whole and self.was_reduced
        self._written = [reduced_in_place] * len(self._slots)
        if reduced_in_place and self._shard_axis.size > 1:
            # Our own shard already holds reduced sums; what the other ranks' places hold was reduced into theirs.
            for part in self._rest:
                part.zero_()
            if self._replicate_axis.size > 1:
                self._own.div_(self._replicate_axis.size)  # every replica holds them, and all are summed again

    def _allocate(self) -> None:
        if not self._is_open():
            self._resize(self._nbytes)
            if self._gaps:
                private.zero_all(self._gaps)
            if self._keep_whole:
                self._full.zero_()

    def _store_shard(self) -> None:
        if self._shard is None and not self._rests_on_host:
            self._shard = self._own.clone()
        elif self.was_reduced:
            self._device_shard.add_(self._own.to(self._device_shard.device))
        else:
            self._device_shard.copy_(self._own)
        self._resize(0)

    def _is_open(self) -> bool:
        return self._full.untyped_storage().nbytes() == self._nbytes

    def _resize(self, nbytes: int) -> None:
        self._full.untyped_storage().resize_(nbytes)
