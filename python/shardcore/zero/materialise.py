"""Models on the meta device get memory and values, never more whole parameters at once than the largest unit.

Nothing is allocated ahead: a parameter gets memory when the code that initialises it first touches it, and is sent away
in pieces (:mod:`pieces`) when another one needs the room. So the result is that of ``model.to_empty(device=...)`` and
the same calls in the same order, to the last bit, whatever the calls touch. What is called, children before the module
that holds them, as constructors and ``Module.apply`` do:

- ``init(module)``, where the caller gave one, for each module with own parameters or buffers on the meta device;
- ``initialize_weights()`` of a Hugging Face model, once for all modules inside it;
- ``reset_parameters()`` of any other module, or ``_reset_parameters()`` where that is its name.

Values that are there already, from a file or from a constructor, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh
from shardcore.zero.construction import detach_piece, find_piece, stop_noticing
from shardcore.zero.pieces import Keeper, Piece, is_unwritten
from shardcore.zero.units import Assignment

Init = Callable[[nn.Module], Any]
_HF_FLAG = "_is_hf_initialized"
"""Where Hugging Face notes that a module or tensor has its values."""


def materialise(model: nn.Module, mesh: Mesh, assignment: Assignment, init: Init | None) -> None:
    """Give every parameter and buffer on the meta device memory on ``mesh.device`` and values. Collective over the
    data-parallel axis.

    Raises:
        ConfigError: something is left without values; the message names every such parameter and buffer.
    """
    empty = {name: tensor for name, tensor in _tensors(model) if tensor.is_meta}
    if not empty:
        return
    unit_nbytes = [sum(param.nbytes for param in unit.params.values()) for unit in assignment.units]
    keeper = Keeper(mesh["dp"], mesh.device, max(unit_nbytes, default=0))
    for name, tensor in empty.items():
        keeper.adopt_empty(tensor, name)
    keys = {id(tensor) for tensor in empty.values()}
    try:
        with torch.no_grad(), _unchanged(model):
            for module, inside_hf in _targets(model, keys):
                _initialise(module, inside_hf, init, keys)
        keeper.settle()
        _check_written(model, empty, keeper)
    finally:
        for tensor in empty.values():
            piece = find_piece(tensor)
            if piece is not None and piece.is_empty:
                stop_noticing(tensor)
                detach_piece(tensor)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters that are away have their values already: inside, what is written to them is dropped."""
    pieces: list[Piece] = [find_piece(param) for param in model.parameters() if _is_away(param)]  # type: ignore[misc]
    for piece in pieces:
        piece.is_given = True
    try:
        yield
        for keeper in {piece.keeper: None for piece in pieces}:
            keeper.settle()
    finally:
        for piece in pieces:
            piece.is_given = False


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_hf(module: nn.Module) -> bool:
    return hasattr(module, "initialize_weights") and hasattr(module, "_initialize_weights")


def _targets(model: nn.Module, keys: set[int]) -> list[tuple[nn.Module, bool]]:
    """The modules to call, children first, and whether a Hugging Face model around them has been called before."""
    found: dict[nn.Module, bool] = {}

    def visit(module: nn.Module, inside: bool) -> None:
        if _is_hf(module) and not inside and any(id(tensor) in keys for _, tensor in _tensors(module)):
            found[module] = False
            inside = True
        for child in module.children():
            visit(child, inside)
        own = _own_tensors(module)
        if any(id(tensor) in keys for tensor in own) or (not own and not inside and _holds_only(module, keys)):
            found.setdefault(module, inside)

    visit(model, False)
    return list(found.items())


def _holds_only(container: nn.Module, keys: set[int]) -> bool:
    """Whether a module without own tensors, whose method may adjust its children, touches nothing that has values."""
    params = list(container.parameters())
    return bool(params) and all(id(param) in keys for param in params)


def _initialise(module: nn.Module, inside_hf: bool, init: Init | None, keys: set[int]) -> None:
    own = _own_tensors(module)
    if init is not None:
        call: Callable[[], Any] | None = partial(init, module) if own else None
    elif _is_hf(module) and not inside_hf:
        _flag_what_has_values(module, keys)
        call = getattr(module, "initialize_weights")  # noqa: B009  # torch types it as a tensor
    elif inside_hf and not any(map(_is_empty, own)):
        call = None
    else:
        call = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if call is None:
        return
    given = [tensor for tensor in own if id(tensor) not in keys and not _is_away(tensor)]
    values = [tensor.clone() for tensor in given]
    call()
    for tensor, value in zip(given, values, strict=True):
        tensor.copy_(value)


def _is_empty(tensor: torch.Tensor) -> bool:
    piece = find_piece(tensor)
    return piece is not None and piece.is_empty


def _is_away(tensor: torch.Tensor) -> bool:
    piece = find_piece(tensor)
    return piece is not None and piece.own is not None


def _flag_what_has_values(model: nn.Module, keys: set[int]) -> None:
    """Hugging Face's initialisation passes over what it finds flagged; a model that was built on the meta device by
    other means than its own carries wrong flags.
    """
    for _, tensor in _tensors(model):
        if id(tensor) not in keys:
            setattr(tensor, _HF_FLAG, True)
        elif _HF_FLAG in tensor.__dict__:
            delattr(tensor, _HF_FLAG)
    for module in model.modules():
        if _HF_FLAG in module.__dict__:
            delattr(module, _HF_FLAG)


def _check_written(model: nn.Module, empty: dict[str, torch.Tensor], keeper: Keeper) -> None:
    """Every rank looks at its pieces, and all learn what any rank has found."""
    replaced = {id(tensor) for _, tensor in _tensors(model)}
    bad = [id(tensor) in replaced and _lacks_values(tensor) for tensor in empty.values()]
    flags = comm.max_over_ranks(
        torch.tensor(bad, dtype=torch.int32, device="cpu"), keeper.axis, "parameters without values"
    )
    names = [name for name, flag in zip(empty, flags.tolist(), strict=True) if flag]
    if names:
        raise ConfigError(_message(model, names))


def _lacks_values(tensor: torch.Tensor) -> bool:
    piece = find_piece(tensor)
    if piece is None:
        return is_unwritten(tensor)
    return piece.is_empty or is_unwritten(tensor if piece.own is None else piece.own)


def _message(model: nn.Module, names: list[str]) -> str:
    parameters = {name for name, _ in model.named_parameters()}
    described = []
    for name in names:
        owner = model.get_submodule(name.rpartition(".")[0])
        described.append(f"{'parameter' if name in parameters else 'buffer'} {name!r} of {type(owner).__name__}")
    return (
        f"{len(names)} tensors on the meta device were not, or not wholly, initialised: {'; '.join(described)}. Give "
        "their modules a reset_parameters() that writes all of them, pass shard(init=<function of a module>), or read "
        "them by shardcore.load_safetensors before shardcore.shard. Values that a constructor computes (buffers such "
        "as masks and frequencies) stay there if the model is built under shardcore.empty_init() instead of "
        'torch.device("meta"), and parameters that it computes under shardcore.sharded_init()'
    )
