"""How the shards of a flat buffer travel: in one step or two, in full or quantised.

Two steps (``split``) keep what crosses nodes to one shard of each place: a gather goes across the nodes first and then
inside each, a reduction the other way round (MiCS, Zhang et al. 2022, "Hierarchical communication strategy"). Quantised
gathers and reductions follow ZeRO++ (Wang et al. 2023: qwZ, "Quantized weight communication", and qgZ, "Quantized
gradients communication"): a reduction swaps codes, adds them up in fp32 in the order of ranks, and quantises anew for
its second step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from shardcore.comm import quantized
from shardcore.comm.collectives import DONE, Handle, gather_shards, reduce_shards, swap_shards
from shardcore.comm.program import Program
from shardcore.comm.steps import After, Step, Steps, StreamSteps
from shardcore.mesh import Axis, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """In how many bits shards travel; None is in full."""

    gather_bits: int | None = None
    reduce_bits: int | None = None
    feeds_back: bool = False
    """What quantising takes from a gradient is added to the next one. Costs 2 bytes for each element that is sent."""


class Route:
    """The way of one buffer's shards over an axis. Every call is collective over the axis."""

    def __init__(self, axis: Axis, split: Split | None = None, coding: Coding | None = None) -> None:
        self._axis = axis
        self._split = split if split is not None and 1 < split.inside.size < axis.size else None
        self._coding = coding if coding is not None and axis.size > 1 else Coding()
        self._residuals: dict[str, torch.Tensor] = {}

    @property
    def is_plain(self) -> bool:
        """Whether a gather is one step over the whole axis, in full."""
        return self._split is None and self._coding.gather_bits is None

    @property
    def rounds_gathers(self) -> bool:
        """Whether a gather that is not ``exact`` gives rounded values."""
        return self._coding.gather_bits is not None

    @property
    def rounds_reductions(self) -> bool:
        """Whether reductions travel quantised."""
        return self._coding.reduce_bits is not None

    def gather(self, full: torch.Tensor, unit: str, program: Program | None = None, *, exact: bool = True) -> Handle:
        """Fill ``full`` [W x shard_numel] with every rank's shard; this rank's must be in its place already.

        Args:
            exact: send the values in full, whatever the coding.
        """
        bits = self._coding.gather_bits
        if bits is None or exact or full.numel() == 0:
            return self._gather(full, unit, program)
        shards = full.view(self._axis.size, -1)
        packed = full.new_empty((len(shards), quantized.packed_nbytes(shards.shape[1], bits)), dtype=torch.uint8)
        quantized.pack(shards[self._axis.rank], packed[self._axis.rank], bits)

        def read() -> None:
            # This rank's own shard too: all ranks must compute with the same values.
            for row, shard in zip(packed, shards, strict=True):
                quantized.unpack(row, shard, bits)

        return After(self._gather(packed.view(-1), f"{unit} in {bits} bits", program), read)

    def reduce(self, full: torch.Tensor, unit: str, program: Program | None = None) -> Handle:
        """Sum ``full`` [W x shard_numel] over the axis into this rank's shard of it; the rest is left undefined."""
        split = self._split
        if split is None:
            return self._reduce(full, self._axis, unit, program)
        part = full.view(split.inside.size, -1)[split.inside.rank]
        return self._in_steps(
            full,
            lambda: self._reduce(full, split.inside, f"{unit} inside", program),
            lambda: self._reduce(part, split.across, f"{unit} across", program),
        )

    def forget_errors(self) -> None:
        """Drop what quantising has taken from earlier gradients."""
        for residual in self._residuals.values():
            residual.zero_()

    def _gather(self, full: torch.Tensor, unit: str, program: Program | None) -> Handle:
        split = self._split
        if split is None:
            return gather_shards(full, self._axis, unit, program)
        part = full.view(split.inside.size, -1)[split.inside.rank]
        return self._in_steps(
            full,
            lambda: gather_shards(part, split.across, f"{unit} across", program),
            lambda: gather_shards(full, split.inside, f"{unit} inside", program),
        )

    def _in_steps(self, full: torch.Tensor, *steps: Step) -> Handle:
        if full.numel() == 0:
            return DONE
        if full.is_cuda:
            return StreamSteps(steps, _side_stream(full.device), full)
        return Steps(steps)

    def _reduce(self, full: torch.Tensor, axis: Axis, unit: str, program: Program | None) -> Handle:
        bits = self._coding.reduce_bits
        if bits is None or axis.size == 1 or full.numel() == 0:
            return reduce_shards(full, axis, unit, program)
        shards = full.view(axis.size, -1)
        sent = full.new_empty((axis.size, quantized.packed_nbytes(shards.shape[1], bits)), dtype=torch.uint8)
        residual = self._residual(shards, axis.name)
        for i, (shard, row) in enumerate(zip(shards, sent, strict=True)):
            if i != axis.rank:  # this rank's own part stays here, in full
                quantized.pack(shard, row, bits, None if residual is None else residual[i])
        received = torch.empty_like(sent)
        swap = swap_shards(sent.view(-1), received.view(-1), axis, f"{unit} in {bits} bits", program)
        return After(swap, _sum_in_rank_order(shards[axis.rank], received, axis.rank, bits))

    def _residual(self, shards: torch.Tensor, name: str) -> torch.Tensor | None:
        if not self._coding.feeds_back:
            return None
        if name not in self._residuals:
            self._residuals[name] = torch.zeros(shards.shape, dtype=torch.bfloat16, device=shards.device)
        return self._residuals[name]


def _sum_in_rank_order(own: torch.Tensor, received: torch.Tensor, rank: int, bits: int) -> Callable[[], None]:
    def add() -> None:
        total = torch.zeros_like(own)
        for i, row in enumerate(received):
            if i == rank:
                total.add_(own)
            else:
                quantized.unpack(row, total, bits, add=True)
        own.copy_(total)

    return add


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
