"""Safetensors files of others, read as a checkpoint that has weights alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from shardcore._core import CheckpointReader
from shardcore.checkpoint.holding import WEIGHT
from shardcore.checkpoint.stored import Stored
from shardcore.errors import CheckpointError

_INDEX = ".safetensors.index.json"


class Foreign(Stored):
    """One file, or Hugging Face's several with an index. Names are what ``rename`` makes of theirs.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """

    def __init__(self, path: str | os.PathLike[str], rename: Callable[[str], str | None] | None = None) -> None:
        folder, names = _files(Path(path))
        super().__init__(folder, CheckpointReader.of_safetensors(folder, names))
        known = {name: rename(name) if rename is not None else name for _, name in self.tensors}
        self._name_of = {new: old for old, new in known.items() if new is not None}
        self._buffer_of = {new: (WEIGHT, old) for new, old in self._name_of.items()}
        self.left_out = [old for old, new in known.items() if new is None]
        """Names that ``rename`` wants nothing of."""


def _files(path: Path) -> tuple[Path, list[str]]:
    """(folder, names of the files)."""
    if not path.is_dir():
        return (path.parent, _listed(path)) if path.name.endswith(_INDEX) else (path.parent, [path.name])
    indices = sorted(path.glob(f"*{_INDEX}"))
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(indices) == 1:
        return path, _listed(indices[0])
    if len(files) == 1:
        return path, files
    raise CheckpointError(f"{path} holds {len(files)} safetensors files and {len(indices)} indices; name one of them")


def _listed(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files in other folders; they lie beside it")
    return names
