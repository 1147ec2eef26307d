"""What ``torch.distributed.checkpoint`` (DCP) keeps on disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def write_dcp(folder: Path, state: Mapping[str, Any], read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write a checkpoint that ``torch.distributed.checkpoint.load`` reads, on this process alone.

    Args:
        state: nested dicts and lists of plain values and tensors. Those on the meta device are read one by one, when
            their turn comes: ``read`` is called with each and returns its values.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return read(found) if isinstance(found, torch.Tensor) and found.is_meta else found

    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save in a single process")  # which is what no_dist asks for
        save(dict(state), storage_writer=writer, planner=Planner(), no_dist=True)
