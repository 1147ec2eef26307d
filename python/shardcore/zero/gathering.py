"""Where a group's whole parameters come from: every rank's shard, or the second shards of a few near ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardcore import comm

if TYPE_CHECKING:
    from shardcore.mesh import Axis


class Gathering:
    """Fills one group's flat buffer. Where there is a second shard, the first gather after an update leaves it, and
    later ones are collective over its axis alone.
    """

    def __init__(self, route: comm.Route, secondary_axis: Axis | None) -> None:
        self.route = route
        """How shards travel over the whole shard axis."""
        self._secondary_axis = secondary_axis
        self._secondary: torch.Tensor | None = None
        self._secondary_is_current = False
        self.is_rounded = False
        """The buffer holds, or will hold, values that were quantised on their way."""

    @property
    def obstacle(self) -> str:
        """What keeps ranks from joining a gather they do not need; empty where each is one step over the whole shard
        axis, in full.
        """
        if self.route.rounds_gathers:
            return "quantised gathers (Communication(gather=...), zero_quantized_weights)"
        if not self.route.is_plain:
            return "gathers in two steps (Communication(hierarchical=True), mics_hierarchical_params_gather)"
        if self._secondary_axis is not None:
            return "a second shard (Communication(secondary=...), zero_hpz_partition_size)"
        return ""

    def start(
        self,
        full: torch.Tensor,
        own: slice,
        shard: torch.Tensor,
        unit: str,
        program: comm.Program | None,
        *,
        exact: bool,
    ) -> comm.Handle:
        """Start filling ``full``.

        Args:
            own: where this rank's ``shard`` belongs in it.
            exact: values in full, even where gathers are quantised.
        """
        rounds = self.route.rounds_gathers and not exact
        self.is_rounded = rounds
        is_plain = rounds or not self.route.rounds_gathers
        if is_plain and self._secondary_is_current:
            return self._gather_secondary(full, unit, program)
        full[own].copy_(shard, non_blocking=True)
        handle = self.route.gather(full, unit, program, exact=exact)
        if self._secondary_axis is None or not is_plain:
            return handle
        self._secondary_is_current = True  # of use from the end of this gather on, before which no other can start
        return comm.After(handle, lambda: self._keep(full))

    def invalidate(self) -> None:
        """The shards have changed, or memory is wanted: the second shard is freed until the next gather."""
        self._secondary_is_current = False
        self._secondary = None

    def _keep(self, full: torch.Tensor) -> None:
        self._secondary = self._rows(full).clone()

    def _gather_secondary(self, full: torch.Tensor, unit: str, program: comm.Program | None) -> comm.Handle:
        axis = self._secondary_axis
        if axis is None or self._secondary is None:  # for the type checker: it is current only after `_keep`
            raise RuntimeError(f"{unit} has no second shard")
        self._rows(full).copy_(self._secondary)
        return comm.gather_shards(full, axis, f"{unit} second shard", program)

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's second shard in the whole buffer."""
        axis = self._secondary_axis
        if axis is None:
            return full
        return full.view(axis.size, -1)[axis.rank]
