"""Parameters of a model that is being built: whole while something uses them, else one piece on each rank.

Between its construction and ``shardcore.shard`` a parameter belongs to a :class:`Keeper`. It is sent away when another
one needs the room: this rank keeps its piece of the values (those of the axis's first rank, as after
``shardcore.shard``), the storage is resized to 0, and the guard takes over the parameter's class. The next use, by
whatever code, brings the values back, so that constructors, ``post_init``, ``Module.apply`` and tied weights work as if
nothing had happened. Which parameters are whole depends on the program alone, so all ranks run the same collectives.

Of ``numel`` elements, in the order of the storage, each of W ranks keeps ``numel // W`` and the remainder of less than
W: a gather then needs no padding and writes in place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.protocols import find_slot
from shardcore.zero.construction import attach_piece, detach_piece, find_piece, notice_uses, stop_noticing
from shardcore.zero.host_heap import give_back_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardcore.mesh import Axis

_DEAD, _LEAVES, _STAYS = range(3)
_PATTERN = 0xA5
"""A byte that is no bool, and repeated no likely number."""


class Piece:
    """What stands for the data of one parameter while they are away."""

    __slots__ = ("is_empty", "is_given", "keeper", "name", "own")

    def __init__(self, keeper: Keeper, name: str) -> None:
        self.keeper = keeper
        self.name = name
        self.own: torch.Tensor | None = None
        """[numel // W + numel % W] this rank's values, and the remainder; None while the parameter is whole."""
        self.is_empty = False
        """On the meta device: there are no values yet."""
        self.is_given = False
        """What is written to it is dropped when it is sent away: the rest of the model is being initialised."""


class Keeper:
    """Holds the parameters of a model under construction to ``limit_nbytes``, apart from one piece of each.

    Its collectives run over ``axis``; all ranks must use the parameters in the same order. With one rank it only gives
    memory to parameters on the meta device.
    """

    def __init__(self, axis: Axis, device: torch.device, limit_nbytes: int = 0) -> None:
        self.axis = axis
        self.device = device
        """Where parameters on the meta device get their memory."""
        self.limit_nbytes = limit_nbytes
        """Bytes of whole parameters that may stay; what one operation uses may exceed it."""
        self._whole: dict[int, torch.Tensor] = {}
        self._held: set[int] = set()
        self._program = comm.Program(gathers_in_forward=False)
        give_back_freed_memory()

    # ------------------------------------------------------------------------------------------- what it keeps

    def adopt(self, param: torch.Tensor, name: str) -> None:
        """Keep a whole parameter from now on; those that cannot be sharded, or are kept already, are left alone."""
        known = find_piece(param) is not None or find_slot(param) is not None
        if self.axis.size > 1 and not known and param.is_floating_point() and not param.is_meta:
            attach_piece(param, Piece(self, name))
            self._whole[id(param)] = param

    def adopt_empty(self, tensor: torch.Tensor, name: str) -> None:
        """Give this parameter or buffer on the meta device memory when it is first used."""
        piece = Piece(self, name)
        piece.is_empty = True
        attach_piece(tensor, piece)
        notice_uses(tensor)

    def adopt_piece(self, param: torch.Tensor, name: str, own: torch.Tensor) -> None:
        """Keep a parameter on the meta device, or one that is away, with these values of this rank."""
        piece = find_piece(param)
        if piece is None:
            _replace(param, _without_data(param, own.device, own.dtype), name)
            piece = Piece(self, name)
            attach_piece(param, piece)
            notice_uses(param)
        piece.own = own

    def split(self, numel: int) -> list[tuple[int, int]]:
        """The ranges of a flattened parameter that this rank keeps: its part, and the remainder."""
        part = numel // self.axis.size
        return [(part * self.axis.rank, part * (self.axis.rank + 1)), (part * self.axis.size, numel)]

    @staticmethod
    def forget(param: torch.Tensor) -> None:
        """The parameter is an ordinary one again, with whatever data it has."""
        piece = find_piece(param)
        if piece is not None:
            piece.keeper._whole.pop(id(param), None)
            stop_noticing(param)
            detach_piece(param)

    # ---------------------------------------------------------------------------------------- bringing, sending

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the parameters that are whole."""
        return sum(param.nbytes for param in self._whole.values())

    def bring(self, params: Sequence[torch.Tensor]) -> None:
        """Make these parameters whole; others leave if there is no room for all. Collective."""
        used = {id(param): param for param in params}
        absent = [param for key, param in used.items() if key not in self._whole]
        if self.axis.size > 1 and self.whole_nbytes + sum(p.nbytes for p in absent) > self.limit_nbytes:
            self.settle(used)
        for param in absent:
            piece = _piece_of(param)
            if piece.is_empty:
                self._fill_with_nothing(param, piece)
            else:
                self._gather(param, piece)

    def settle(self, keep: Collection[int] = ()) -> None:
        """Send all whole parameters away but those of these ids, and those whose memory an alias or a graph shows on
        any rank. Collective.
        """
        if self.axis.size == 1:
            return
        leaving = [key for key in self._whole if key not in keep and key not in self._held]
        while leaving:
            # Not on the device of a context that the model is built in.
            votes = torch.tensor([self._verdict(key) for key in leaving], dtype=torch.int32, device="cpu")
            comm.max_over_ranks(votes, self.axis, "parameters under construction that stay whole")
            verdicts = dict(zip(leaving, votes.tolist(), strict=True))
            for key, verdict in verdicts.items():
                if verdict == _LEAVES:
                    self._send_away(self._whole[key])
                elif verdict == _DEAD:
                    del self._whole[key]
            # The memory of one that was dead may have been another's, which can leave now.
            leaving = [key for key in leaving if verdicts[key] == _STAYS] if _DEAD in verdicts.values() else []

    def _verdict(self, key: int) -> int:
        """What this rank wants to become of a whole parameter; the largest of all ranks' counts."""
        if _num_references(self._whole, key) <= _KEEPERS_REFERENCES:
            return _DEAD
        return _LEAVES if _may_leave(self._whole[key]) else _STAYS

    def after_use(self, params: Iterable[torch.Tensor], func: Callable[..., Any]) -> None:
        """A use of parameters that were away is over. Those whose address somebody knows stay whole for good."""
        if func is torch.Tensor.data_ptr:
            for param in params:
                self.forget(param)

    @contextmanager
    def holding(self, params: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, these parameters are whole and stay so. Collective."""
        self.bring(params)
        keys = {id(param) for param in params} - self._held
        self._held |= keys
        try:
            yield
        finally:
            self._held -= keys

    def _fill_with_nothing(self, tensor: torch.Tensor, piece: Piece) -> None:
        """Memory, marked so that whoever initialises nothing is found out."""
        stop_noticing(tensor)
        give_memory(tensor, self.device, piece.name)
        mark_unwritten(_plain(tensor))
        if isinstance(tensor, nn.Parameter):
            piece.is_empty = False
            self._whole[id(tensor)] = tensor
        else:
            detach_piece(tensor)

    def _gather(self, param: torch.Tensor, piece: Piece) -> None:
        if piece.own is None:
            raise StateError(f"parameter {piece.name} was sent away and has no piece; build the model again")
        plain = _plain(param)
        plain.untyped_storage().resize_(plain.numel() * plain.element_size())
        self._gather_into(_flat(param), piece.own, piece.name, self._program)
        if not piece.is_given:
            piece.own = None
        stop_noticing(param)
        self._whole[id(param)] = param

    def _gather_into(
        self, flat: torch.Tensor, own: torch.Tensor, name: str, program: comm.Program | None = None
    ) -> None:
        (start, stop), (rest, numel) = self.split(flat.numel())
        flat[start:stop].copy_(own[: stop - start])
        flat[rest:numel].copy_(own[stop - start :])
        comm.gather_shards(flat[:rest], self.axis, f"parameter {name}", program).wait()

    def _send_away(self, param: torch.Tensor) -> None:
        piece = _piece_of(param)
        if not piece.is_given:  # else what was written to it is dropped
            flat = _flat(param)
            comm.broadcast(flat, self.axis, 0, f"parameter {piece.name}").wait()
            piece.own = torch.cat([flat[start:stop] for start, stop in self.split(flat.numel())])
        param.untyped_storage().resize_(0)
        notice_uses(param)
        del self._whole[id(param)]


# ------------------------------------------------------------------------------------------- for other rooms' doors


@contextmanager
def gathered_pieces(params: Iterable[torch.Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Inside, those of ``params`` that are under construction are whole. With ``modifier_rank``, its edits count.
    Collective over the data-parallel axis.

    Raises:
        StateError: on leaving, if a parameter was written to and ``modifier_rank`` is None; the message names it.
    """
    built = [param for param in params if find_piece(param) is not None]
    keepers = {_piece_of(param).keeper: None for param in built}
    with ExitStack() as stack:
        for keeper in keepers:
            stack.enter_context(keeper.holding([param for param in built if _piece_of(param).keeper is keeper]))
        before = [(param, _piece_of(param).name, _piece_of(param).keeper, private.version(param)) for param in built]
        yield
    edited = [name for param, name, _, version in before if private.version(param) != version]
    if edited and modifier_rank is None:
        raise StateError(
            f"parameters {edited[:5]} were written to while gathered for reading, so ranks may differ in them; name "
            "the rank whose edits count: GatheredParameters(..., modifier_rank=0)"
        )
    if modifier_rank is not None:
        for param, name, keeper, _ in before:
            dense = _plain(param).contiguous()
            comm.broadcast(dense, keeper.axis, modifier_rank, f"parameter {name}").wait()
            _plain(param).copy_(dense)
    for keeper in keepers:
        keeper.settle()


def cast_piece(param: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Convert a parameter that is away, piece by piece; False if it is not."""
    piece = find_piece(param)
    if piece is None or piece.own is None:
        return False
    dtype = dtype or param.dtype
    if (piece.own.device, piece.own.dtype) != (device, dtype):
        piece.own = piece.own.to(device=device, dtype=dtype)
        with private.without_torch_function():
            param.data = _without_data(param, device, dtype).data
        piece.keeper._whole.pop(id(param), None)
        notice_uses(param)
    return True


def move_into(param: torch.Tensor, flat: torch.Tensor) -> bool:
    """Move a parameter's values into ``flat`` [numel], for its owner to be. Collective if they are away, and then they
    are the same on all ranks: returns whether.
    """
    piece: Piece | None = find_piece(param)
    if piece is None or piece.own is None:
        flat.view(param.shape).copy_(param)
        Keeper.forget(param)
        return False
    if _plain(param).is_contiguous():
        piece.keeper._gather_into(flat, piece.own, piece.name)
    else:
        piece.keeper.bring([param])
        flat.view(param.shape).copy_(param)
    Keeper.forget(param)
    return True


# ------------------------------------------------------------------------------------------------------- memory


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fill with what no initialisation leaves: NaN, or a pattern of bytes where there is none."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(_PATTERN)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether :func:`mark_unwritten` shows through: anywhere, or everywhere where it may be a value."""
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor.contiguous().view(-1).view(torch.uint8) == _PATTERN).all())


def give_memory(tensor: torch.Tensor, device: torch.device, name: str) -> None:
    """Move a parameter or buffer from the meta device; it stays the same object, with arbitrary values."""
    real = torch.empty_like(_plain(tensor), device=device)
    _replace(tensor, nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real, name)


def to_meta(param: nn.Parameter, name: str) -> None:
    """Give up a parameter's memory and values; it stays the same object."""
    _replace(param, nn.Parameter(_plain(param).to("meta"), param.requires_grad), name)


def _num_references(holder: Mapping[int, object], key: int) -> int:
    """How often the held object is referred to, as Python counts inside this function."""
    value = holder[key]
    return sys.getrefcount(value)


_KEEPERS_REFERENCES = _num_references({0: object()}, 0)


def _piece_of(param: torch.Tensor) -> Piece:
    piece: Piece | None = find_piece(param)
    if piece is None:
        raise StateError(f"the parameter of shape {tuple(param.shape)} is not under construction")
    return piece


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its data as a plain tensor, with a version counter of its own."""
    with private.without_torch_function():
        return tensor.data


def _flat(param: torch.Tensor) -> torch.Tensor:
    """[numel] the whole storage of a parameter that fills one."""
    return _plain(param).as_strided((param.numel(),), (1,), 0)


def _may_leave(param: torch.Tensor) -> bool:
    """Whether the parameter fills a storage that nothing else uses."""
    storage = param.untyped_storage()
    fills = param.storage_offset() == 0 and storage.nbytes() == param.nbytes > 0 and storage.resizable()
    return bool(fills) and param.layout is torch.strided and private.is_only_user(param)


def _without_data(param: torch.Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this one's shape and strides, whose storage has no bytes."""
    plain = _plain(param)
    empty = torch.empty_like(plain, device=device, dtype=dtype)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, param.requires_grad)


def _replace(tensor: torch.Tensor, content: torch.Tensor, name: str) -> None:
    """Give ``tensor`` another content, under its identity, class and attributes."""
    cls, attributes = type(tensor), tensor.__dict__
    try:
        torch.utils.swap_tensors(tensor, content)
    except RuntimeError as error:
        raise StateError(
            f"{name} cannot move from or to the meta device, because something else refers to its insides (a weak "
            f"reference, or a graph that was recorded): {error}. Build the model anew, and shard it before it is used"
        ) from error
    tensor.__class__ = cls
    tensor.__dict__.clear()
    tensor.__dict__.update(attributes)
