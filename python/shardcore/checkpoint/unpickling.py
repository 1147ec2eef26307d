"""Pickles of others, read so that nothing in them runs.

A pickle names functions and classes, and calls them. Here only those on a short list are what they say; every other
name gives a class without behaviour, which keeps what it was to be made of.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardcore.errors import CheckpointError

_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("builtins", "set"),
    ("__builtin__", "set"),
}


class Inert:
    """What stands for an object of a class that is not on the list."""

    kind = ""
    """The dotted name in the file."""

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = object.__new__(cls)
        made.arguments = arguments
        made.fields = dict(named)
        made.state = None
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.fields: dict[str, Any]
        """The attributes that it was to have."""
        self.state: Any
        """The same, as the file has it."""

    def __setstate__(self, state: Any) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)

    def __call__(self, *arguments: Any, **named: Any) -> Inert:
        """What was to be called is not."""
        return Inert(*arguments, **named)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of what was a dict are dropped."""

    def append(self, item: Any) -> None:
        """Items of what was a list are dropped."""

    def extend(self, items: Any) -> None:
        """Items of what was a list are dropped."""


def _rebuild_plain(function: Any, _kind: Any, arguments: tuple[Any, ...], _attributes: Any) -> Any:
    """A tensor that was saved with attributes of its own, without these; the function came from the list, too."""
    return function(*arguments)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_plain
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        return type(name, (Inert,), {"kind": f"{module}.{name}"})


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, __name__="shardcore's reader of foreign pickles")


def read_pickled(path: Path) -> Any:
    """What ``torch.save`` wrote; tensors are on the CPU and read from the file when they are used.

    Raises:
        CheckpointError: it is no such file, or is damaged; the message names it.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLE)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; it was never saved, or not copied with the others") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {error}") from error


def read_slice(path: Path, offset: int, nbytes: int) -> Any:
    """What ``torch.save`` wrote into a part of a file, in memory.

    Raises:
        CheckpointError: as :func:`read_pickled`.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = io.BytesIO(file.read(nbytes))
        return torch.load(content, map_location="cpu", weights_only=False, pickle_module=_PICKLE)
    except Exception as error:
        what = f"bytes {offset} to {offset + nbytes} of {path}"
        raise CheckpointError(f"{what} cannot be read as what torch.save writes: {error}") from error


def read_plain(path: Path) -> Any:
    """What ``pickle.dump`` wrote.

    Raises:
        CheckpointError: it is no such file, or is damaged; the message names it.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a pickle: {error}") from error
