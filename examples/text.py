"""Real text as bytes: by default the source code of the Python that runs this, which is on every machine."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

# Installed packages differ from machine to machine; tests hold tables of odd characters rather than text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Windows(Dataset[torch.Tensor]):
    """Text cut into windows of ``length + 1`` bytes; neighbours share one, so every byte is predicted once."""

    def __init__(self, text: bytes, length: int) -> None:
        self.content = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )
        self.length = length

    def __len__(self) -> int:
        return max(0, self.content.numel() - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.length
        return self.content[start : start + self.length + 1].long()


def load(path: Path | None) -> tuple[bytes, bytes]:
    """Training and validation text.

    Files go whole to one side, about one in twenty to validation, by a checksum of their names: so the split is the
    same on every rank and in every run. Where that leaves one side empty, validation takes the last twentieth.

    Args:
        path: a file, or a folder whose files are read in the order of their names; None: the standard library.
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    train, valid = [], []
    for file in [root] if root.is_file() else _files(root, python_only=path is None):
        checksum = zlib.crc32(file.relative_to(root).as_posix().encode())
        (valid if checksum % 20 == 0 else train).append(file.read_bytes())
    if train and valid:
        return b"".join(train), b"".join(valid)
    text = b"".join(train or valid)
    if not text:
        raise SystemExit(f"there is no text in {root}; name a file or a folder with --text")
    cut = len(text) - len(text) // 20
    return text[:cut], text[cut:]


def _files(root: Path, python_only: bool) -> Iterator[Path]:
    """Files below ``root`` in the order of their paths, hidden ones left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and not (python_only and name in LEFT_OUT))
        for name in sorted(names):
            if name[0] != "." and (not python_only or name.endswith(".py")):
                yield Path(folder, name)
