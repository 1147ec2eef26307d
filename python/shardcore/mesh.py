"""The named axes over which a job is split, and the process group of each.

Axes, outermost first: ``pp, replicate, shard, cp, tp``; ``dp`` is ``replicate x shard``. ``tp`` is innermost, so that
its ranks share a node; ``ep`` is the innermost part of ``shard``. One process needs neither a launcher nor a process
group.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet
from zlib import crc32

import torch
import torch.distributed as dist

from shardcore import _torch_private as private
from shardcore.errors import ConfigError, StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

_AXES = ("pp", "replicate", "shard", "cp", "tp")
_MADE_OF = {"shard": ("expert_shard", "ep"), "dp": ("replicate", "expert_shard", "ep")}
"""Axes that are several dims of the grid of ranks: experts lie over ``ep``, and are sharded over the rest of
``shard``.
"""


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis as this rank sees it: the ranks along it, and the process group that joins them."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    """This process's position along the axis, 0 <= rank < size."""
    group: dist.ProcessGroup | None
    """None where the axis has one rank: then no collective is needed."""
    mesh: Mesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Take note of what refers to a process group."""
        if self.group is not None:
            _with_groups.add(self)

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)

    def __reduce__(self) -> NoReturn:
        """An axis belongs to the process that made it.

        Raises:
            StateError: always; so nothing that holds one (a layer that is split over it) is copied or pickled.
        """
        raise StateError(
            f"the axis {self.name!r} of a mesh, or a layer that is split over it, cannot be copied or pickled "
            "(copy.deepcopy, torch.save(model), multiprocessing, ...): save state_dict() instead, and make meshes and "
            "split layers in each rank's own process"
        )

    @cached_property
    def key(self) -> str:
        """Equal exactly for axes over the same ranks, whatever their names."""
        return f"{self.ranks[0]}.{self.size}.{crc32(repr(self.ranks).encode()):08x}"


_with_groups: WeakSet[Axis] = WeakSet()
"""Axes that refer to a process group."""


def axis_of_group(name: str, group: dist.ProcessGroup) -> Axis:
    """An axis over the ranks of a process group that exists already, such as another library's. Not collective."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, ranks, ranks.index(dist.get_rank()), group if len(ranks) > 1 else None)


@dataclass(frozen=True, eq=False)
class Split:
    """An axis cut into blocks of neighbouring ranks, such as those of a node."""

    axis: Axis
    """The whole axis, its ranks ordered by their place inside the block first, and by block second. In this order the
    shards that one place holds in all blocks lie in a row, so that collectives over ``across`` and then ``inside``
    work in place on a flat buffer.
    """
    inside: Axis
    """The ranks of this rank's block."""
    across: Axis
    """The ranks at this rank's place, one of each block."""


@dataclass(frozen=True, eq=False)
class DataAxes:
    """Over which ranks some parameters are copied and sharded, and their gradients averaged."""

    replicate: Axis
    shard: Axis
    every: Axis
    """Both together."""


def init_process_group(device: str | None = None) -> None:
    """Join the job that the launcher described in the environment; a single process joins nothing.

    Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` as torchrun and shardcore-launch set them.
    Collective over all ranks. CPU tensors always go through gloo, CUDA tensors through NCCL.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return
        backend = "cpu:gloo,cuda:nccl" if (device or default_device().type) == "cuda" else "gloo"
        dist.init_process_group(backend)
        # Without an explicit end gloo's threads may be torn down in the wrong order and abort a finished job.
        atexit.register(_destroy_process_group)
    atexit.unregister(_let_go_of_groups)
    atexit.register(_let_go_of_groups)  # last of all, so that it comes first


def _let_go_of_groups() -> None:
    """Gloo's threads end with the last reference to their group. One that still lives while the interpreter ends, and
    frees a tensor then, aborts a job that has finished.
    """
    for axis in list(_with_groups):
        if axis.mesh is not None:
            axis.mesh.let_go_of_groups()
        object.__setattr__(axis, "group", None)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def default_device() -> torch.device:
    """``cuda:LOCAL_RANK`` where CUDA is present, else ``cpu``."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _device(given: str | torch.device) -> torch.device:
    """The device that ``Mesh(device=...)`` names, if ranks can compute there."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"Mesh(device={given!r}): expected 'cpu', 'cuda' or a torch.device ({error})") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Mesh(device={given!r}): ranks compute on 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"Mesh(device={given!r}): torch sees no CUDA device here; leave device out to take what there is, or give "
            "device='cpu'"
        )
    return device


class Mesh:
    """The ranks of the job as a grid of named axes. Collective over all ranks: every rank makes the same Mesh.

    Args:
        dp: data-parallel ranks (``replicate x shard``); None takes what the other axes leave.
        tp, pp, cp: tensor, pipeline and context parallel sizes.
        ep: expert parallel size; must divide ``shard``. Its ranks are neighbours along ``shard``.
        replicate: number of copies of the sharded model (hybrid sharding); must divide ``dp``.
        shard: number of ranks over which each copy is sharded; another way to say ``replicate = dp / shard``.
        replicate_inside: put the copies inside the node and the shards across nodes.
        ranks_per_node: how many consecutive ranks share a node; None takes ``LOCAL_WORLD_SIZE`` from the environment,
            as launchers set it. Only what depends on nodes asks for it.
        device: ``"cpu"`` or ``"cuda"``; None means CUDA where present.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks (the message names all of them), or the device
            is not there.
    """

    def __init__(
        self,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        replicate: int | None = None,
        shard: int | None = None,
        replicate_inside: bool = False,
        ranks_per_node: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.device = _device(device) if device is not None else default_device()
        if self.device.type == "cuda":
            self.device = default_device() if self.device.index is None else self.device
            torch.cuda.set_device(self.device)
        init_process_group(self.device.type)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        replicate, shard = _check_sizes(self.world, dp, replicate, shard, tp=tp, pp=pp, cp=cp, ep=ep)
        shape = {"pp": pp, "replicate": replicate, "expert_shard": shard // ep, "ep": ep, "cp": cp, "tp": tp}
        self._order = ("pp", "shard", "replicate", "cp", "tp") if replicate_inside else _AXES
        self._dims = [dim for name in self._order for dim in _MADE_OF.get(name, (name,))]
        self._grid = torch.arange(self.world).reshape([shape[dim] for dim in self._dims])
        self._ranks_per_node = _check_ranks_per_node(ranks_per_node, self.world)
        self._splits: dict[tuple[str, int], Split] = {}
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        self.attached: dict[str, Any] = {}
        """What rooms have made for this mesh, once: channels between ranks. It goes with the mesh."""
        self._axes = {name: self._join(name, self._rows(name)) for name in (*_AXES, "dp", "ep")}
        self._data_axes = [self._make_data_axes("shard"), self._make_data_axes("expert_shard")]

    @classmethod
    def from_torch(cls, mesh: DeviceMesh) -> Mesh:
        """A Mesh over an existing 1-D (shard) or 2-D (replicate, shard) DeviceMesh that spans all ranks."""
        if not hasattr(mesh, "mesh_dim_names"):
            raise ConfigError(f"{mesh!r} is no mesh: expected a shardcore.Mesh, its axis mesh['dp'], or a DeviceMesh")
        if mesh.ndim not in (1, 2):
            raise ConfigError(
                f"a DeviceMesh of {mesh.ndim} dimensions cannot be read as data-parallel axes; give one of 1 (shard) "
                "or 2 (replicate, shard) dimensions, or build shardcore.Mesh(...) with named sizes"
            )
        replicate = mesh.size(0) if mesh.ndim == 2 else 1
        return cls(dp=mesh.size(), replicate=replicate, device=mesh.device_type)

    def __getitem__(self, name: str) -> Axis:
        """The axis ``name``: pp, dp, replicate, shard, cp, tp or ep."""
        if name not in self._axes:
            raise ConfigError(f"the mesh has no axis {name!r}; its axes are {', '.join(self._axes)}")
        return self._axes[name]

    @cached_property
    def everyone(self) -> Axis:
        """All ranks of the job as one axis. No part of the grid: for what is agreed on, and not for training."""
        group = private.world_group() if self.world > 1 else None
        for axis in self._axes.values():
            if axis.size == self.world:
                return axis
        return Axis("all ranks", tuple(range(self.world)), self.rank, group, self)

    def rows(self, name: str) -> list[tuple[int, ...]]:
        """The global ranks of every row along the axis ``name``; this rank is in one. Alike on all ranks."""
        self[name]
        return self._rows(name)

    def data_axes(self, *, experts: bool = False) -> DataAxes:
        """Over which ranks parameters are copied and sharded, and their gradients averaged: the data-parallel ranks,
        together with those of ``cp``, which share a sequence. Of ``experts`` only those that hold the same ones.
        """
        return self._data_axes[experts]

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank reads, 0 <= data_rank < data_world."""
        return self._axes["dp"].rank

    @property
    def data_world(self) -> int:
        """Into how many slices the global batch is split."""
        return self._axes["dp"].size

    @cached_property
    def torch(self) -> DeviceMesh:
        """The same grid as torch's DeviceMesh, with the axes ``pp, replicate, shard, cp, tp``. Collective on first
        use.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=private.in_process_store(), rank=0, world_size=1)
            atexit.register(_destroy_process_group)
        grid = self._grid.reshape([self._axes[name].size for name in self._order])
        return DeviceMesh(self.device.type, grid, mesh_dim_names=self._order)

    @cached_property
    def ranks_per_node(self) -> int | None:
        """How many consecutive ranks share a node; None where that is not known, or differs between nodes. Collective
        over all ranks on first use.
        """
        if self._ranks_per_node is not None or self.world == 1:
            return self._ranks_per_node or 1
        told = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        extremes = torch.tensor([told, -told])
        dist.all_reduce(extremes, dist.ReduceOp.MIN)
        least, most = extremes[0].item(), -extremes[1].item()
        return int(least) if least == most and least > 0 and self.world % int(least) == 0 else None

    def num_in_node(self, name: str) -> int:
        """How many neighbours along the axis share a node: its blocks for :meth:`split`. Collective on first use.

        Raises:
            ConfigError: it is not known which ranks share a node.
        """
        per_node = self.ranks_per_node
        if per_node is None:
            raise ConfigError(
                f"which of the {self.world} ranks share a node is not known: LOCAL_WORLD_SIZE is not set, or differs "
                "between nodes. Start the job by shardcore-launch or torchrun with as many processes on every "
                "node, or give shardcore.Mesh(ranks_per_node=...)"
            )
        nodes = [[rank // per_node for rank in row] for row in self._rows(name)]
        count = next((i for i, node in enumerate(nodes[0]) if node != nodes[0][0]), len(nodes[0]))
        even = all(row[i : i + count] == [row[i]] * count for row in nodes for i in range(0, len(row), count))
        return count if even and len(nodes[0]) % count == 0 else 1

    def split(self, name: str, num_inside: int) -> Split:
        """Cut the axis into blocks of ``num_inside`` neighbours. Collective over all ranks; a second call returns the
        same.

        Raises:
            ConfigError: ``num_inside`` does not divide the axis.
        """
        axis = self[name]
        if num_inside < 1 or axis.size % num_inside:
            raise ConfigError(
                f"axis {name!r} of {axis.size} ranks cannot be cut into blocks of {num_inside}; choose a divisor of "
                f"{axis.size}"
            )
        if (name, num_inside) not in self._splits:
            rows = [[row[i : i + num_inside] for i in range(0, len(row), num_inside)] for row in self._rows(name)]
            inside = self._join(f"{name} inside", [block for blocks in rows for block in blocks])
            columns = [list(column) for blocks in rows for column in zip(*blocks, strict=True)]
            across = self._join(f"{name} across", columns)
            mine = next(blocks for blocks in rows if any(self.rank in block for block in blocks))
            ranks = tuple(rank for column in zip(*mine, strict=True) for rank in column)
            whole = Axis(name, ranks, ranks.index(self.rank), axis.group, self)
            self._splits[name, num_inside] = Split(whole, inside, across)
        return self._splits[name, num_inside]

    def let_go_of_groups(self) -> None:
        """The process ends: no collective will follow."""
        self._groups.clear()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={self._axes[name].size}" for name in _AXES)
        return f"Mesh({sizes}; rank {self.rank} of {self.world}, {self.device.type})"

    def _make_data_axes(self, shard: str) -> DataAxes:
        axes = {"replicate": ("replicate",), "shard": (shard, "cp"), "data": ("replicate", shard, "cp")}
        plain = shard == "shard" and self["cp"].size == 1
        names = {"data": "dp"} if plain else {}
        made = [self._join(names.get(name, name), self._rows(*dims)) for name, dims in axes.items()]
        return DataAxes(*made)

    def _rows(self, *names: str) -> list[tuple[int, ...]]:
        """The ranks along these axes, one row for each place on the others; the same on all ranks."""
        dims = [dim for name in names for dim in _MADE_OF.get(name, (name,))]
        kept = [self._dims.index(dim) for dim in dims]
        rest = [i for i in range(len(self._dims)) if i not in kept]
        rows = self._grid.permute(*rest, *kept).reshape(-1, prod(self._grid.shape[i] for i in kept))
        return [tuple(row) for row in rows.tolist()]

    def _join(self, name: str, rows: Sequence[Sequence[int]]) -> Axis:
        """The axis whose rows these are. Makes their process groups, on all ranks in the same order, but once."""
        key = tuple(map(tuple, rows))
        mine = next((row for row in key if self.rank in row), None)
        if mine is None:  # the grid holds every rank, so this is a fault of the grid, not of the user
            raise ConfigError(f"rank {self.rank} is not in the mesh of {self.world} ranks")
        if key not in self._groups:
            self._groups[key] = None
            for row in key:
                group = self._make_group(row)
                if row is mine:
                    self._groups[key] = group
        return Axis(name, mine, mine.index(self.rank), self._groups[key], self)

    def _make_group(self, row: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(row) == 1:
            return None
        return private.world_group() if len(row) == self.world else private.new_group(list(row))


def _check_sizes(world: int, dp: int | None, replicate: int | None, shard: int | None, **sizes: int) -> tuple[int, int]:
    """(replicate, shard) sizes that fit ``world``, or a ConfigError naming every size."""
    given = {"dp": dp, **sizes, "replicate": replicate, "shard": shard}
    shown = {k: v for k, v in given.items() if k not in ("replicate", "shard") or v is not None}
    text = f"Mesh({', '.join(f'{k}={v}' for k, v in shown.items())}) on {world} ranks"
    for name, num_ranks in given.items():
        if num_ranks is not None and (not isinstance(num_ranks, int) or num_ranks < 1):
            raise ConfigError(f"{text}: {name} must be a whole number of at least 1, got {num_ranks!r}")
    model = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world % model:
        raise ConfigError(
            f"{text}: tp x pp x cp = {model} does not divide the {world} ranks; start a multiple of {model} ranks, or "
            "lower one of them"
        )
    left = world // model
    if dp is not None and dp != left:
        raise ConfigError(
            f"{text}: dp x tp x pp x cp = {dp * model}, expected {world}; leave dp out (it becomes {left}) or "
            f"start {dp * model} ranks"
        )
    for name, num_ranks in (("replicate", replicate), ("shard", shard), ("ep", sizes["ep"])):
        if num_ranks is not None and left % num_ranks:
            raise ConfigError(
                f"{text}: {name}={num_ranks} does not divide the {left} data-parallel ranks; choose a divisor of {left}"
            )
    if shard is not None and replicate is not None and replicate * shard != left:
        raise ConfigError(
            f"{text}: replicate x shard = {replicate * shard}, expected the {left} data-parallel ranks; give one of "
            "the two"
        )
    replicate = left // shard if shard is not None else replicate or 1
    if left // replicate % sizes["ep"]:
        raise ConfigError(
            f"{text}: ep={sizes['ep']} does not divide the {left // replicate} ranks of each copy (axis 'shard'); "
            f"choose a divisor of {left // replicate}"
        )
    return replicate, left // replicate


def _check_ranks_per_node(ranks_per_node: int | None, world: int) -> int | None:
    if ranks_per_node is not None and (
        not isinstance(ranks_per_node, int) or ranks_per_node < 1 or world % ranks_per_node
    ):
        raise ConfigError(
            f"Mesh(ranks_per_node={ranks_per_node!r}) on {world} ranks: expected a divisor of {world}; leave it out to "
            "take LOCAL_WORLD_SIZE from the launcher"
        )
    return ranks_per_node
