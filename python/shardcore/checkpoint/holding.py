"""What this rank holds of a training: pieces of tensors, in the order in which they can be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.checkpoint.cutting import Cut, cuts
from shardcore.checkpoint.dtypes import dtype_of, name_of
from shardcore.checkpoint.ties import Tie
from shardcore.checkpoint.values import encode
from shardcore.errors import ConfigError
from shardcore.protocols import (
    MASTER,
    HeldPiece,
    Runs,
    ShardedGroup,
    ShardedOptimizerMark,
    ShardedRoot,
    find_root,
    find_slot,
    not_sharded,
    whole_shape,
)

WEIGHT, BUFFER, STATE = "weight", "buffer", "state/"
"""Roles of tensors; a state's own name follows."""
Key = tuple[str, str]
"""(role, name) of a tensor: ``("state/exp_avg", "layers.0.weight")``."""
Source = torch.Tensor | Callable[[], torch.Tensor] | None
"""Values on any device, or what brings them from a disk; None where the optimizer shows them when their turn comes."""
Held = tuple[torch.Tensor, int, int, Source]
"""A parameter as this rank has it, elements [start, stop) of it, flattened, and where their values are."""


@dataclass(slots=True)
class Tensor:
    """One tensor of the unsharded model or its optimizer."""

    dtype: str
    """As safetensors spells it."""
    shape: list[int]


@dataclass(slots=True)
class Piece:
    """Elements [start, stop) of a flattened tensor, or of runs of it, that are here."""

    key: Key
    start: int
    stop: int
    source: Source = None
    """[stop - start]."""
    may_change: bool = False
    """Whatever has the module may write to it, and nobody else learns of that: a buffer, or memory of a parameter."""
    runs: Runs | None = None


@dataclass(slots=True)
class Holding:
    """All of it."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each parameter: its other names, its dtype in the model, whether it is trained."""
    buffers: dict[str, list[str]] = field(default_factory=dict)
    """The other names of each buffer."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each parameter, the encoded values of its optimizer state that are one for all elements."""
    ties: dict[str, Tie] = field(default_factory=dict)
    """Of each parameter that other pipeline stages hold, too."""
    rests_on_disk: bool = False
    """Weights, or master weights and states, come from a disk."""
    roots: list[ShardedRoot] = field(default_factory=list)
    """Of the model, and of all others whose states the optimizer keeps."""

    def itemsize(self, piece: int) -> int:
        """Bytes of an element of a piece."""
        return dtype_of(self.tensors[self.pieces[piece].key].dtype).itemsize

    def name_of(self, name: str) -> str:
        """Under which name a parameter is kept."""
        return self.ties[name].name if name in self.ties else name

    def add(self, key: Key, whole: tuple[torch.dtype, list[int]], piece: Piece) -> None:
        """Hold a piece of a tensor with this dtype and shape."""
        dtype, shape = whole
        self.tensors[key] = Tensor(name_of(dtype, f"{key[0]} {key[1]!r}"), shape)
        if piece.stop > piece.start:
            self.pieces.append(piece)

    def add_range(self, key: Key, dtype: torch.dtype, held: Held, *, may_change: bool = False) -> None:
        """Hold a range of a parameter of which this rank may have a part."""
        param, start, stop, source = held
        self.add(key, (dtype, list(whole_shape(param))), Piece(key, 0, 0))
        for cut in cuts(param, start, stop):
            self.pieces.append(Piece(key, cut.start, cut.stop, _part(source, cut), may_change, cut.runs))


def root_of(model: nn.Module, what: str) -> ShardedRoot:
    """What ``shardcore.shard`` left on the model.

    Raises:
        ConfigError: it is not sharded.
    """
    root = find_root(model)
    if root is None:
        raise ConfigError(f"{what}: {not_sharded(model)}")
    return root  # type: ignore[no-any-return]


def buffer_prints(model: nn.Module, root: ShardedRoot) -> list[list[int]]:
    """Every data-parallel rank's checksums of its buffers. Collective over the data-parallel axis."""
    mine = [comm.fingerprint(buffer) for buffer, _ in persistent_buffers(model).values()]
    return comm.exchange(mine, root.data_axis, "values of buffers")


def hold(
    model: nn.Module,
    root: ShardedRoot,
    optimizer: ShardedOptimizerMark | None,
    prints: list[list[int]],
    ties: dict[str, Tie],
    with_frozen: bool = True,
) -> Holding:
    """Everything of the model, and of the optimizer if there is one. Not collective.

    Args:
        prints: what :func:`buffer_prints` gave.
        ties: of the parameters that other pipeline stages hold, too.
    """
    holding = Holding(ties=ties)
    those = keepers(root, optimizer)
    pieces = [(piece, keeper is optimizer) for keeper in those for piece in keeper.held_pieces()]
    holding.roots = list(dict.fromkeys((root, *(piece.slot.group.root for piece, _ in pieces))))
    _hold_weights(holding, root, those)
    _hold_others(holding, model, root, prints)
    if not with_frozen:
        frozen = {(WEIGHT, name) for name, info in holding.weights.items() if not info["trainable"]}
        holding.pieces = [piece for piece in holding.pieces if piece.key not in frozen]
        holding.tensors = {key: tensor for key, tensor in holding.tensors.items() if key not in frozen}
    for piece, with_states in pieces:
        _hold_states(holding, piece, with_states=with_states)
    return holding


def keepers(root: ShardedRoot, optimizer: ShardedOptimizerMark | None) -> list[ShardedOptimizerMark]:
    """The optimizer whose states are asked for, if there is one; then the others of the model, where master weights
    rest on a disk with them.
    """
    first = [] if optimizer is None else [optimizer]
    if not any(group.trainable and group.masters_are_away for group in root.groups):
        return first
    return first + [other for other in root.live_optimizers() if other is not optimizer]


def persistent_buffers(model: nn.Module) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """The buffers in ``state_dict`` by their first name, with the others."""
    found: dict[int, tuple[str, torch.Tensor, list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = private.non_persistent_buffers(module)
        for short, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if short in transient:
                continue
            name = f"{prefix}.{short}" if prefix else short
            found.setdefault(id(buffer), (name, buffer, []))[2].append(name)
    return {name: (buffer, [n for n in names if n != name]) for name, buffer, names in found.values()}


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that every rank has whole, because sharding left them out."""
    return ((name, param) for name, param in model.named_parameters() if find_slot(param) is None)


def _hold_weights(holding: Holding, root: ShardedRoot, those: Sequence[ShardedOptimizerMark]) -> None:
    """The weights; master weights that rest on a disk are shown by those optimizers that hold them."""
    for group in root.groups:
        for slot in group.slots:
            name = holding.name_of(slot.name)
            names = holding.ties[slot.name].names if slot.name in holding.ties else slot.aliases
            holding.weights[name] = _weight_info(name, names, slot.param.dtype, trainable=group.trainable)
            start, stop, offset = group.local_range(slot)
            key, part = (WEIGHT, name), slice(offset, offset + stop - start)
            if group.has_masters and not group.masters_are_away:
                holding.add_range(key, group.master.dtype, (slot.param, start, stop, group.master[part]))
            elif not group.masters_are_away or not any(keeper.holds(slot.param) for keeper in those):
                holding.rests_on_disk |= group.rests_on_disk
                source = _source(group, part) if group.rests_on_disk else group.own[part]
                held = (slot.param, start, stop, source)
                holding.add_range(key, slot.param.dtype, held, may_change=group.own_is_shown)
            else:
                holding.rests_on_disk = True
                holding.tensors[key] = Tensor(name_of(group.master.dtype, slot.name), list(whole_shape(slot.param)))


def _part(source: Source, cut: Cut) -> Source:
    within = slice(cut.offset, cut.offset + cut.numel)
    if callable(source):
        return lambda: source()[within]
    return None if source is None else source[within]


def _source(group: ShardedGroup, part: slice) -> Callable[[], torch.Tensor]:
    return lambda: group.copy_of_own(part.start, part.stop)


def _hold_others(holding: Holding, model: nn.Module, root: ShardedRoot, prints: list[list[int]]) -> None:
    for name, param in unsharded_parameters(model):
        holding.weights[name] = _weight_info(name, (), param.dtype, trainable=param.requires_grad)
        _hold_whole(holding, (WEIGHT, name), param.detach())
    axis = root.data_axis
    for i, (name, (buffer, aliases)) in enumerate(persistent_buffers(model).items()):
        holding.buffers[name] = aliases
        if axis.rank == 0 or prints[axis.rank][i] == prints[0][i]:
            _hold_whole(holding, (BUFFER, name), buffer)
        else:  # such as running statistics: this rank's own go with it
            _hold_whole(holding, (role_of_rank(axis.ranks[axis.rank]), f"{BUFFER} {name}"), buffer)


def role_of_rank(rank: int) -> str:
    """The role of what one rank alone has."""
    return f"rank/{rank}"


def _hold_whole(holding: Holding, key: Key, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1)
    holding.add(key, (tensor.dtype, list(tensor.shape)), Piece(key, 0, flat.numel(), flat, may_change=True))


def _hold_states(holding: Holding, piece: HeldPiece, *, with_states: bool) -> None:
    name, held = holding.name_of(piece.slot.name), (piece.slot.param, piece.start, piece.stop, None)
    for state, dtype in piece.states.items():
        if with_states or state == MASTER:
            holding.add_range(key_of_state(state, name), dtype, held)
    values = {key: value for key, value in piece.values.items() if value is not None}
    if with_states and (values or set(piece.states) - {MASTER}):
        holding.values[name] = {key: encode(value, f"state {key} of {name}") for key, value in values.items()}


def key_of_state(state: str, name: str) -> Key:
    """Under which role a state of a parameter is kept; master weights are the weights."""
    return (WEIGHT, name) if state == MASTER else (STATE + state, name)


def _weight_info(name: str, names: tuple[str, ...], dtype: torch.dtype, *, trainable: bool) -> dict[str, Any]:
    aliases = [other for other in names if other != name]
    return {"aliases": aliases, "dtype": str(dtype).removeprefix("torch."), "trainable": trainable}


def read_in_order(
    holding: Holding, optimizers: Iterable[ShardedOptimizerMark], act: Callable[[int, torch.Tensor], None]
) -> None:
    """Call ``act(number of the piece, its values)`` for every piece, in their order: that of these :func:`keepers`."""
    num_here = sum(piece.source is not None for piece in holding.pieces)
    for number, piece in enumerate(holding.pieces[:num_here]):
        if piece.source is not None:
            act(number, piece.source() if callable(piece.source) else piece.source)
    upcoming = deque(range(num_here, len(holding.pieces)))

    def show(held: HeldPiece, states: dict[str, torch.Tensor]) -> None:
        name, parts = holding.name_of(held.slot.name), cuts(held.slot.param, held.start, held.stop)
        for state, value in states.items():
            for part in parts:
                if upcoming and holding.pieces[upcoming[0]].key == key_of_state(state, name):
                    act(upcoming.popleft(), value[part.offset : part.offset + part.numel])

    for optimizer in optimizers:
        if upcoming:
            optimizer.read_pieces(show)
