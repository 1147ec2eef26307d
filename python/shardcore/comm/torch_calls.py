"""torch.distributed's own calls, for the drop-in room that offers them under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def torch_call(name: str) -> Any:
    """What torch.distributed calls ``name``."""
    return getattr(dist, name)


def world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD
