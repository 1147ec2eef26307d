"""How much host memory an offload takes on a rank, known before anything is taken; and the sums that it follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardcore._core import HostMemory as _Pool
from shardcore._core import ShardLayout, ShardPlan, place_tiles
from shardcore.errors import PlanError

_SIXTEEN_BIT = ("bf16", "fp16")
_ITEMSIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_ALIGNMENT = 512
"""Of shards in the host memory for parameters on a disk, as direct transfers want it."""
_DEFAULT_NUM_SHARDS = 3
"""The shard in use, the next on its way in, and the last on its way out."""
_CHOICES = {"params": (None, "cpu", "nvme"), "grads": (None, "cpu"), "states": (None, "cpu", "nvme")}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes on one rank. ``total`` is what is taken from the machine's memory, with the gaps between tensors."""

    params: int
    """Shards of parameters that rest in host memory, or the room for those on their way from a disk."""
    masters: int
    """Master weights that are kept beside them."""
    grads: int
    """Gradients that rest there, or pass on their way to the update."""
    states: int
    """Optimizer states, or the tiles of masters and states on their way from a disk."""
    total: int
    """All of them together."""
    disk: int
    """Files on a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Where states rest, as in :class:`shardcore.Offload`, and what is kept of each element."""

    params: str | None = None
    grads: str | None = None
    states: str | None = None
    ratio: float = 1.0
    tile_numel: int = 1 << 22
    num_tiles: int = 4
    host_param_nbytes: int | None = None
    master: str = "fp32"
    """Dtype of masters of 16-bit parameters."""
    kept: tuple[str, ...] = ("fp32", "fp32")
    """Dtypes of the states that the optimizer keeps; two of fp32 for Adam."""
    device_is_host: bool = False
    """The device is the CPU, too."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PlanError(f"{name}={getattr(self, name)!r}: expected {' or '.join(map(repr, choices))}")
        for name, least in (("tile_numel", 1), ("num_tiles", 1), ("host_param_nbytes", 0)):
            value = getattr(self, name)
            is_default = value is None and name == "host_param_nbytes"
            if not is_default and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise PlanError(f"{name}={value!r}: expected an integer of at least {least}")
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 <= self.ratio <= 1:
            raise PlanError(f"ratio={self.ratio!r}: expected a number from 0 to 1")
        _itemsize(self.master)
        for dtype in self.kept:
            _itemsize(dtype)

    def on_host(self, shard_numel: Sequence[int | None]) -> list[bool]:
        """Which shards the CPU updates: of all that were considered so far, always as near to ``ratio`` as they come.
        None stands for a shard that is not trained.
        """
        total, there, found = 0, 0, []
        for numel in shard_numel:
            total += numel or 0
            found.append(self.states is not None and numel is not None and there + numel / 2 <= self.ratio * total)
            there += numel or 0 if found[-1] else 0
        return found

    def resting(self, *, on_host: bool, masters_differ: bool) -> list[str]:
        """Which of a shard's ``"own"`` (parameters), ``"master"`` and ``"grad"`` have host memory of their own, in the
        order in which they take it.

        Args:
            on_host: the CPU updates it.
            masters_differ: they are of another dtype than the parameters.
        """
        names = ["own"] if self.params == "cpu" else []
        if on_host:
            if self.states == "cpu" and (self.params != "cpu" or masters_differ):
                names.append("master")
            if self.grads == "cpu" or not self.device_is_host:
                names.append("grad")
        return names

    def room_nbytes(self, shard_nbytes: Sequence[int]) -> int:
        """Bytes of host memory for shards on their way from a disk: what was asked for, but room for the largest, and
        no more than for all.
        """
        sizes = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in shard_nbytes]
        largest = max(sizes, default=0)
        asked = self.host_param_nbytes
        wanted = _DEFAULT_NUM_SHARDS * largest if asked is None else asked // _ALIGNMENT * _ALIGNMENT
        return min(max(wanted, largest), sum(sizes))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring parameters of one group of the optimizer, in a shard: elements [start, stop)."""

    options: int
    start: int
    stop: int


def host_memory(
    shards: ShardPlan | Sequence[ShardLayout],
    homes: Homes,
    *,
    rank: int = 0,
    options_of: Mapping[str, int] | None = None,
) -> HostMemory:
    """The host memory that an offload takes on one rank: to the byte, where a kernel of ``shardcore.optim.CPU...``
    updates (torch's optimizers make their states outside the pools of an offload).

    Args:
        shards: as :func:`plan_shards` plans them, or the layouts of all groups in order.
        rank: its position among the ranks that hold the parameters together.
        options_of: number of the optimizer's parameter group of each parameter; None: all are in one.

    Raises:
        PlanError: these are no layouts, or there is no such rank.
    """
    layouts = [layout for _, layout in shards.groups] if isinstance(shards, ShardPlan) else shards
    if not isinstance(layouts, list | tuple) or not all(isinstance(layout, ShardLayout) for layout in layouts):
        raise PlanError(f"shards={shards!r}: expected a ShardPlan, or a list of ShardLayouts")
    if options_of is not None and not isinstance(options_of, Mapping):
        raise PlanError(f"options_of={options_of!r}: expected a number for each name, or None")
    there = homes.on_host([layout.shard_numel if layout.trainable else None for layout in layouts])
    resting = [item for each in zip(layouts, there, strict=True) for item in _resting(*each, homes)]
    sums = {name: sum(nbytes for each, nbytes in resting if each == name) for name in ("own", "master", "grad")}
    room, shard_file = 0, 0
    if homes.params == "nvme":
        places, shard_file = place_tiles([(layout.shard_numel, [layout.itemsize]) for layout in layouts])
        room = homes.room_nbytes([nbytes for _, nbytes, _ in places])
    updated = [layout for layout, is_there in zip(layouts, there, strict=True) if is_there]
    states, file_nbytes = _states(updated, homes, rank, options_of or {})
    return HostMemory(
        params=sums["own"] + room,
        masters=sums["master"],
        grads=sums["grad"],
        states=sum(states),
        total=_Pool.required([nbytes for _, nbytes in resting]) + room + _Pool.required(states),
        disk=file_nbytes + shard_file,
    )


def _resting(layout: ShardLayout, is_there: bool, homes: Homes) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors of one shard that have host memory."""
    master = _master_itemsize(layout, homes)
    itemsizes = {"own": layout.itemsize, "master": master, "grad": max(layout.itemsize, 4)}
    differ = layout.dtype in _SIXTEEN_BIT and homes.master != layout.dtype
    names = homes.resting(on_host=is_there, masters_differ=differ)
    return [(name, layout.shard_numel * itemsizes[name]) for name in names]


def _pieces(layout: ShardLayout, rank: int, options_of: Mapping[str, int], tile_numel: int | None) -> list[_Piece]:
    """What an optimizer updates as one: runs of parameters with the same options, cut where tiles end."""
    spans = []
    for name, start, stop, offset in layout.ranges(rank):
        end = offset + stop - start
        cuts = [offset]
        if tile_numel is not None:
            cuts.extend(range((offset // tile_numel + 1) * tile_numel, end, tile_numel))
        spans += [
            _Piece(options_of.get(name, 0), begin, finish)
            for begin, finish in zip(cuts, [*cuts[1:], end], strict=True)
            if finish > begin
        ]
    runs = groupby(spans, key=lambda span: (span.options, span.start // tile_numel if tile_numel else 0))
    members = [(options, list(run)) for (options, _), run in runs]
    return [_Piece(options, run[0].start, run[-1].stop) for options, run in members]


def _states(
    layouts: Sequence[ShardLayout], homes: Homes, rank: int, options_of: Mapping[str, int]
) -> tuple[list[int], int]:
    """(bytes of each tensor in host memory, bytes of the file) of the states of what the CPU updates."""
    kept = [_itemsize(dtype) for dtype in homes.kept]
    if homes.states == "cpu":
        pieces = [piece for layout in layouts for piece in _pieces(layout, rank, options_of, None)]
        pieces.sort(key=lambda piece: piece.options)  # stable: in the order of the optimizer's groups
        return [(piece.stop - piece.start) * itemsize for piece in pieces for itemsize in kept], 0
    tiles = []
    for layout in layouts:
        spans: dict[int, tuple[int, int]] = {}
        for piece in _pieces(layout, rank, options_of, homes.tile_numel):
            number = piece.start // homes.tile_numel
            spans[number] = (spans.get(number, (piece.start, 0))[0], piece.stop)
        tiles += [(stop - start, [_master_itemsize(layout, homes), *kept]) for start, stop in spans.values()]
    places, file_nbytes = place_tiles(tiles)
    largest = max((nbytes for _, nbytes, _ in places), default=0)
    return [largest] * min(homes.num_tiles, len(tiles)), file_nbytes


def _master_itemsize(layout: ShardLayout, homes: Homes) -> int:
    return _itemsize(homes.master) if layout.dtype in _SIXTEEN_BIT else layout.itemsize


def _itemsize(dtype: str) -> int:
    if dtype not in _ITEMSIZES:
        raise PlanError(f"dtype {dtype!r}: expected one of {', '.join(_ITEMSIZES)}")
    return _ITEMSIZES[dtype]
