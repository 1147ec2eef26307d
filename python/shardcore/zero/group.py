"""The one mechanism behind every stage: the parameters of a unit in one flat buffer, whole or as this rank's shard.

Releasing and gathering resize the buffer's one storage. The alternatives were tried: swapping ``param.data`` leaves
what autograd saved (a view such as ``weight.t()``) holding the old memory, and a buffer shared by units lets the next
unit overwrite what autograd saved, silently. A resized storage keeps parameter identity, keeps saved views valid once
gathered again, and leaves version counters alone, because the gather writes through the flat tensor, which has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.offload import ShardMemory
from shardcore.zero.aliases import reclaim, release
from shardcore.zero.edits import Edits
from shardcore.zero.gathering import Gathering
from shardcore.zero.gradients import GroupGradients
from shardcore.zero.guard import explain_use, guard_class, reads_data
from shardcore.zero.joining import JoinsGathers
from shardcore.zero.pieces import move_into
from shardcore.zero.saved import VersionCounters
from shardcore.zero.state import ParamState, check_move

if TYPE_CHECKING:
    from shardcore.mesh import Axis
    from shardcore.plan import ShardLayout
    from shardcore.protocols import ParameterSlot
    from shardcore.zero.policy import Policy, Precision
    from shardcore.zero.prefetch import Phase

_LEAVES_NO_TRACE = frozenset(
    getattr(torch.Tensor, name)
    for name in ["numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"]
)
"""Ways to a parameter's memory by which writes do not show in its version counter; ``.data`` is another."""


class ShardGroup(Edits, JoinsGathers):
    """Parameters that share a unit, dtype and trainability.

    Buffers, in elements: ``full`` [padded_numel] of the parameter dtype, ``own`` [shard_numel] this rank's shard of it,
    ``master`` [shard_numel] of the master dtype (``own`` itself where parameters are not 16-bit and masters rest with
    them). ``memory`` has those of them, and of gradients, that rest outside the device; on a disk in the case of
    ``stored``.
    """

    state = ParamState.UNSHARDED
    pins = 0
    """Open contexts that show the whole parameters; while there are any, nothing is released."""
    exporting = False
    """While ``state_dict`` runs: a use of a released parameter yields a whole copy on the CPU."""
    root: Any = None
    """The :class:`Root` that this group belongs to."""
    _program: comm.Program | None = None
    _is_guarded = False
    _handle: comm.Handle | None = None
    _release_is_due = False
    _num_users = 0
    """How many tensors showed the memory of ``full`` before code outside first used a parameter (stages 1 and 2)."""

    def __init__(
        self,
        index: int,
        name: str,
        layout: ShardLayout,
        slots: Sequence[ParameterSlot],
        *,
        policy: Policy,
        precision: Precision,
        shard_axis: Axis,
        replicate_axis: Axis,
        data_axis: Axis,
        device: torch.device,
        gathering: Gathering,
        memory: ShardMemory,
    ) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.slots = slots
        self.trainable = layout.trainable
        self.policy = policy
        self.holders: dict[Any, Phase] = {}
        """The units that use the whole parameters now, and whether in forward or backward."""
        self._on_demand: Callable[[ShardGroup], bool] = lambda group: False
        self._exported: list[torch.Tensor] = []
        self.loading: set[int] = set()
        """Parameters that ``load_state_dict`` is about to copy to."""
        self.shard_axis = shard_axis
        """The ranks that hold one copy of the parameters together."""
        self.data_axis = data_axis
        """All that hold them, or shards of them."""
        dtype = slots[0].param.dtype if slots else torch.float32
        self.full = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
        self.nbytes = self.full.untyped_storage().nbytes()  # of the whole parameters, padding included
        self._adopt_parameters()
        self._classes = [type(slot.param) for slot in slots]
        self._slice = slice(shard_axis.rank * layout.shard_numel, (shard_axis.rank + 1) * layout.shard_numel)
        self.releases = policy.shards_params
        self._gathering = gathering
        self._frees = self.releases and (shard_axis.size > 1 or memory.has_own)
        self._make_shard(memory, precision.master_dtype(dtype))
        self.versions = VersionCounters(self)
        self.note_versions()
        if self.releases:
            self.reshard()  # before the gradients' buffer, which is as large until it is released
        self.grads = self._make_gradients(precision, dtype, replicate_axis, memory) if self.trainable else None

    def join(self, root: Any, program: comm.Program, on_demand: Callable[[ShardGroup], bool]) -> None:
        """Become part of ``root``.

        Args:
            program: the model's order of collectives; gathers are in it where they are on demand.
            on_demand: asked when a released parameter is used; gathers it and returns True where that is legal.
        """
        self.root = root
        if self.releases:
            self._program = program
            obstacle = self._gathering.obstacle
            if self.data_axis.size > self.shard_axis.size:
                obstacle = "copies of the model (Mesh(replicate=...), mics_shard_size), whose ranks meet along two axes"
            program.invite_to_gather(self.shard_axis, self.name, self.full.numel(), obstacle or self)
        self._on_demand = on_demand
        if self.grads is not None:
            self.grads.program = program

    @property
    def grad_shard(self) -> torch.Tensor:
        """[shard_numel] this rank's reduced mean gradient."""
        if self.grads is None:
            raise StateError(f"group {self.name!r} is frozen and has no gradients")
        return self.grads.shard

    @property
    def own_is_shown(self) -> bool:
        """Whether ``own`` is memory of the parameters themselves, so that whoever writes to these writes to it."""
        return not self._frees and self._own.data_ptr() == self.full[self._slice].data_ptr()

    def is_frozen(self) -> bool:
        """Whether no parameter takes a gradient now; those of a trainable group may be frozen between steps."""
        return not any(slot.param.requires_grad for slot in self.slots)

    def local_range(self, slot: ParameterSlot) -> tuple[int, int, int]:
        """(start, stop, shard_offset): this rank's piece of the parameter, as a range of the flattened parameter."""
        return self.range_of_rank(slot, self.shard_axis.rank)

    def range_of_rank(self, slot: ParameterSlot, position: int) -> tuple[int, int, int]:
        """As :meth:`local_range`, for the rank at this position along the shard axis."""
        shard_start = position * self.layout.shard_numel
        start = min(max(shard_start - slot.offset, 0), slot.numel)
        stop = max(min(shard_start + self.layout.shard_numel - slot.offset, slot.numel), start)
        return start, stop, max(slot.offset + start - shard_start, 0)

    def start_unshard(self, *, exact: bool = True, purpose: str = "") -> None:
        """Start gathering the parameters unless they are here or on their way. Collective over the shard axis.

        Args:
            exact: values in full; else they may be rounded as :class:`Communication` asks for forward and backward.
            purpose: what all ranks call together; without one, ranks that do not use the parameters may join.
        """
        if self.state is not ParamState.SHARDED:
            return
        if self.root is not None and self.root.offloaded:
            self.root.check_here("lp_params", what=f"gathering unit {self.name}")
        self._move(ParamState.UNSHARDING)
        if self._frees:
            reclaim(self.full, self.nbytes)
            name = f"{self.name} for {purpose}" if purpose else self.name
            self._start_gather(name, exact=exact)

    def unshard(self, *, exact: bool = True, purpose: str = "") -> None:
        """Make the parameters readable: gather them, or wait for the gather under way. Collective if released, and
        where ``exact`` values are asked for and rounded ones are here.
        """
        self.complete(exact=exact, purpose=purpose)
        self._unguard()

    def complete(self, *, exact: bool = True, purpose: str = "") -> None:
        """As :meth:`unshard`, but uses of the parameters are still noticed."""
        self.start_unshard(exact=exact, purpose=purpose)
        self._arrive()
        if exact and self._gathering.is_rounded:
            self._start_gather(f"{self.name} in full", exact=True)
            self._finish_gather()

    def reshard(self, within_s: float | None = None) -> None:
        """Release the whole parameters; this rank keeps its shard. Nothing where the stage keeps them whole, and not
        before the last context is left that shows them.

        Args:
            within_s: a gather that is not complete by then, in seconds from now, stays under way; None waits for it.
        """
        if not self.releases or self.state is ParamState.SHARDED:
            return
        if within_s is not None and self._handle is not None and not self._handle.is_complete(within_s):
            return
        if self.pins:
            self._release_is_due = True
            return
        self._arrive()
        self.keep_edits_of_use()
        self._move(ParamState.SHARDED)
        if self.shard_axis.size > 1:
            self.versions.hide()
        self.guard()
        if self._frees:
            release(self.full, self.slots, self.name, was_shown=self._was_shown)
            self._was_shown = False

    def pin(self) -> None:
        """Gather the parameters and keep them until :meth:`unpin`. Collective if released."""
        if not self.pins:
            self._release_is_due = self.state is ParamState.SHARDED
        self.unshard(purpose="summon")
        self.pins += 1
        self._was_shown = True

    def unpin(self) -> None:
        """A context that shows the whole parameters ends."""
        self.pins -= 1
        if self.pins == 0 and self._release_is_due:
            self.reshard()

    def publish(self, *, copied: bool = False) -> None:
        """Make the updated masters the parameters. Where these are whole, starts a gather that their first use waits
        for. With ``copied`` the update has written ``own`` already.
        """
        if self.state is ParamState.UNSHARDING:
            self._arrive()
        if self.has_masters and not copied:
            self.own_to_fill.copy_(self.master)
        self.invalidate_copies()
        self.versions.count_write()
        self.note_versions()
        if not self.releases and self.shard_axis.size > 1:
            self._move(ParamState.UNSHARDING)
            self._handle = self._gathering.route.gather(self.full, self.name)
            self.guard()
            if self._num_users and private.num_storage_users(self.full) > self._num_users:
                self._arrive()  # somebody keeps param.detach() or a state_dict(), and cannot be made to wait

    def on_guarded_use(
        self, slot: ParameterSlot, func: Callable[..., Any], args: Sequence[Any] = ()
    ) -> torch.Tensor | None:
        """A use of a parameter whose data are away, or kept for a use to come: make them available to the unit that
        runs, or raise :class:`StateError`. Where parameters are whole, it is noted if the use may lead to writes.
        """
        if self.root is not None and self.root.offloaded:
            self.root.check_here("lp_params", what=f"a use of parameter {slot.name!r}")
        leaves_no_trace = func in _LEAVES_NO_TRACE or reads_data(func)
        if not self.releases or self.pins:
            self._num_users = self._num_users or private.num_storage_users(self.full)
            self._memory_was_taken |= leaves_no_trace and not self.releases  # contexts that show them see to writes
            if self.root is not None and self.root.is_passing:
                self.unshard()
            else:
                self.complete()
            return None
        if slot.index in self.loading and func is torch.Tensor.copy_:
            return self._load(slot, *args[1:2])
        if not self.holders:
            if self.exporting and func is torch.Tensor.detach:
                return self._export(slot)
            if not self._on_demand(self):
                stage = self.policy.stage
                raise StateError(f"parameter {slot.name!r} (stage {stage}) was used by {explain_use(func)}")
        self.unshard(exact=False)
        self._memory_was_taken |= leaves_no_trace
        return None

    def abandon(self) -> None:
        """Return to the resting state after a failed step; what is in flight is waited for."""
        if self.grads is not None:
            self.grads.abandon()
        self._arrive()
        self.reshard()
        self._gathering.invalidate()

    def _start_gather(self, name: str, *, exact: bool) -> None:
        shard = self.own_to_read
        self._handle = self._gathering.start(self.full, self._slice, shard, name, self._program, exact=exact)
        self._note_device_read()

    def _finish_gather(self) -> None:
        if self._handle is not None:
            self._handle.wait()  # where this raises, the next call waits again
            self._handle = None

    def _arrive(self) -> None:
        """Wait for a gather under way."""
        if self.state is ParamState.UNSHARDING:
            self._finish_gather()
            self._move(ParamState.UNSHARDED)
            self.versions.show()

    def _adopt_parameters(self) -> None:
        """Move the parameters' values into the flat buffer and make each parameter a view of it; those of the first
        rank count. Collective over the data axis.
        """
        agreed = True
        with torch.no_grad():
            for slot in self.slots:
                flat = self.full[slot.offset : slot.offset + slot.numel]
                agreed &= move_into(slot.param, flat)
                slot.param.data = flat.view(slot.param.shape)
                slot.group = self
        # What was in pieces is alike along "dp" already.
        axis, mesh = self.data_axis, self.data_axis.mesh
        if not agreed or mesh is None or axis.key != mesh["dp"].key:
            comm.broadcast(self.full, axis, 0, self.name).wait()

    def _make_shard(self, memory: ShardMemory, master_dtype: torch.dtype) -> None:
        self._stored = memory.stored
        self.updates_on_host = memory.updates_on_host
        self._own = self._make_own(memory.own)
        self._master = self._make_master(master_dtype, memory.master)

    def _make_own(self, memory: torch.Tensor | None) -> torch.Tensor:
        own = self.full[self._slice]
        if self._stored is not None:
            self._stored.fill().copy_(own)
            return own.new_empty(0)
        if memory is not None:
            return memory.copy_(own)
        return own.clone() if self._frees else own

    def _make_master(self, dtype: torch.dtype, memory: torch.Tensor | None) -> torch.Tensor | None:
        """None where masters are the parameters themselves."""
        own = self.full[self._slice]
        if memory is not None:
            return memory if memory.numel() == 0 else memory.copy_(own)
        rest_together = self._stored is None and (self._own.device == own.device or self.updates_on_host)
        if not self.trainable or (dtype == own.dtype and rest_together):
            return None
        return own.to(dtype, copy=True)

    def _make_gradients(
        self, precision: Precision, dtype: torch.dtype, replicate_axis: Axis, memory: ShardMemory
    ) -> GroupGradients:
        return GroupGradients(
            self.name,
            self.layout,
            self.slots,
            shard_axis=self.shard_axis,
            replicate_axis=replicate_axis,
            route=self._gathering.route,
            keep_whole=not self.policy.shards_grads,
            expose=not self.policy.shards_states and precision.sum_dtype(dtype) == dtype,
            sum_dtype=precision.sum_dtype(dtype),
            reduce_dtype=precision.reduce_dtype(dtype),
            device=self.full.device,
            host_shard=memory.grad,
            rests_on_host=memory.grad_rests,
        )

    def _load(self, slot: ParameterSlot, value: torch.Tensor) -> torch.Tensor:
        """``load_state_dict`` copies to a released parameter: this rank takes its piece, and nothing is gathered."""
        self.root.about_to_change()
        if self.state is not ParamState.SHARDED:
            self.unshard()
            self.reshard()
        start, stop, offset = self.local_range(slot)
        self.own[offset : offset + stop - start].copy_(value.expand(slot.param.shape).reshape(-1)[start:stop])
        self._refresh_masters(slice(offset, offset + stop - start))
        self.invalidate_copies()
        self.versions.count_write(slot.index)
        self.note_versions()
        return slot.param

    def begin_export(self) -> None:
        """``state_dict`` starts; one before it may have failed, and never ended."""
        self.end_export()
        self.exporting = True

    def end_export(self) -> None:
        """``state_dict`` is done."""
        self.exporting = False
        self._exported.clear()

    def _export(self, slot: ParameterSlot) -> torch.Tensor:
        """A whole copy of one parameter on the CPU; the first of a group gathers it once for all. Collective."""
        if not self._exported:
            was_sharded = self.state is ParamState.SHARDED
            self.unshard(purpose="state_dict")
            self._exported = [s.param.detach().to("cpu", copy=True) for s in self.slots]
            if was_sharded:
                self.reshard()
        return self._exported[slot.index]

    def guard(self) -> None:
        """Let the next use of a parameter be noticed: its data are away, or no unit that uses it holds them."""
        if self._is_guarded:
            return
        self._is_guarded = True
        for slot, cls in zip(self.slots, self._classes, strict=True):
            slot.param.__class__ = guard_class(cls)

    def watch(self) -> None:
        """Between passes of the model: where parameters are whole, notice what replaces their data or gradients."""
        if not self.releases and not self.pins:
            self.guard()

    def unwatch(self) -> None:
        """A pass begins: parameters that are there are themselves again."""
        if not self.releases and self.state is ParamState.UNSHARDED:
            self._unguard()

    def _unguard(self) -> None:
        if not self._is_guarded:
            return
        self._is_guarded = False
        for slot, cls in zip(self.slots, self._classes, strict=True):
            slot.param.__class__ = cls

    def _move(self, then: ParamState) -> None:
        check_move(self.name, self.state, then)
        self.state = then
