"""Any Python value as a short description and a list of tensors, and back: what crosses between stages.

The description is a pickle in which each tensor is a number, so tuples, dicts, dataclasses, None, bools and objects of
the user's own classes travel as they are, whatever they hold tensors in. It is made anew for each message: shapes may
differ from one micro-batch to the next.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shardcore import comm
from shardcore.errors import ConfigError

Kind = tuple[torch.dtype, tuple[int, ...], bool]
"""dtype, shape, and whether a gradient comes back for it."""

_ONE_TENSOR, _GRADIENTS = b"T", b"G"
"""How a description begins that is no pickle."""


def dump(value: Any, where: str) -> tuple[bytes, list[torch.Tensor]]:
    """The description and the tensors of ``value``; a tensor that occurs twice is one tensor.

    Raises:
        ConfigError: something in it can be neither pickled nor sent; ``where`` names the stage.
    """
    inner, tensors = _take_apart(value, where)
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{where}: a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be passed to another "
                "stage; pass dense tensors"
            )
    return _described(tuple((t.dtype, tuple(t.shape), t.requires_grad) for t in tensors), inner), tensors


def receive(message: comm.Message) -> tuple[bytes, list[torch.Tensor]]:
    """The inner description and the tensors of a message, as leaves that require a gradient where the sender's do."""
    kinds, inner = _read(message.description)
    tensors = comm.unpack(message.payload, [(dtype, shape) for dtype, shape, _ in kinds])
    for tensor, (_, _, requires_grad) in zip(tensors, kinds, strict=True):
        tensor.requires_grad_(requires_grad)
    return inner, tensors


def hand_over(description: bytes, tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """As :func:`receive`, between stages of one rank: the same memory, cut off from the sender's graph."""
    return _read(description)[1], [t.detach().requires_grad_(t.requires_grad) for t in tensors]


def load(inner: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with these tensors in it."""
    if inner == _ONE_TENSOR:
        return tensors[0], {}
    if inner.startswith(_GRADIENTS):
        rest = iter(tensors)
        return [next(rest) if is_there else None for is_there in inner[1:]]
    return _Unpickler(io.BytesIO(inner), tensors).load()


def _take_apart(value: Any, where: str) -> tuple[bytes, list[torch.Tensor]]:
    """The two most frequent values, a tensor without skips and a list of gradients, have a form of their own."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is torch.Tensor and value[1] == {}:
        return _ONE_TENSOR, [value[0]]
    if type(value) is list and all(each is None or type(each) is torch.Tensor for each in value):
        return _GRADIENTS + bytes(each is not None for each in value), [each for each in value if each is not None]
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {type(value).__name__} holds what cannot be passed to another stage ({error}); pass tensors and "
            "plain values in tuples, lists, dicts or dataclasses"
        ) from error
    return buffer.getvalue(), pickler.tensors


@lru_cache(maxsize=1024)
def _described(kinds: tuple[Kind, ...], inner: bytes) -> bytes:
    return pickle.dumps((kinds, inner))


@lru_cache(maxsize=1024)
def _read(description: bytes) -> tuple[tuple[Kind, ...], bytes]:
    found: tuple[tuple[Kind, ...], bytes] = pickle.loads(description)
    return found


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """A tensor's number."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """The tensor of a number."""
        tensor: torch.Tensor = self._tensors[pid]
        return tensor
