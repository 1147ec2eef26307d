"""Any Python value as a short description and a list of tensors, and back: what crosses between stages.

The description is a pickle in which each tensor is a number, so tuples, dicts, dataclasses, None, bools and objects of
the user's own classes travel as they are, whatever they hold tensors in. It is made anew for each message: shapes may
differ from one micro-batch to the next.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from shardcore import comm
from shardcore.errors import ConfigError

Kind = tuple[torch.dtype, tuple[int, ...], bool]
"""dtype, shape, and whether a gradient comes back for it."""


def dump(value: Any, where: str) -> tuple[bytes, list[torch.Tensor]]:
    """The description and the tensors of ``value``; a tensor that occurs twice is one tensor.

    Raises:
        ConfigError: something in it can be neither pickled nor sent; ``where`` names the stage.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {type(value).__name__} holds what cannot be passed to another stage ({error}); pass tensors and "
            "plain values in tuples, lists, dicts or dataclasses"
        ) from error
    for tensor in pickler.tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ConfigError(
                f"{where}: a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be passed to another "
                "stage; pass dense tensors"
            )
    kinds: list[Kind] = [(t.dtype, tuple(t.shape), t.requires_grad) for t in pickler.tensors]
    return pickle.dumps((kinds, buffer.getvalue())), pickler.tensors


def receive(message: comm.Message) -> tuple[bytes, list[torch.Tensor]]:
    """The inner description and the tensors of a message, as leaves that require a gradient where the sender's do."""
    kinds, inner = pickle.loads(message.description)
    tensors = comm.unpack(message.payload, [(dtype, shape) for dtype, shape, _ in kinds])
    for tensor, (_, _, requires_grad) in zip(tensors, kinds, strict=True):
        tensor.requires_grad_(requires_grad)
    return inner, tensors


def hand_over(description: bytes, tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """As :func:`receive`, between stages of one rank: the same memory, cut off from the sender's graph."""
    return pickle.loads(description)[1], [t.detach().requires_grad_(t.requires_grad) for t in tensors]


def load(inner: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with these tensors in it."""
    return _Unpickler(io.BytesIO(inner), tensors).load()


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
