"""Which state of a sharded model rests where: on the device, in host memory, or on a disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore import plan
from shardcore.errors import ConfigError

if TYPE_CHECKING:
    import torch

PathLike = str | os.PathLike[str]
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "params": (None, "cpu", "nvme"),
    "grads": (None, "cpu"),
    "states": (None, "cpu", "nvme"),
}
_LEAST = {"tile_numel": 1, "num_tiles": 1, "host_param_nbytes": 0, "queue_depth": 1, "block_nbytes": 4096}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """The homes of a sharded model's states. None leaves a state on the device.

    Raises:
        ConfigError: all that contradicts itself, at once.
    """

    params: str | None = None
    """``"cpu"`` or ``"nvme"``: this rank's shard of the parameters rests there (stage 3)."""
    grads: str | None = None
    """``"cpu"``: reduced gradients go to host memory in each backward. None: at the update, where that runs there."""
    states: str | None = None
    """``"cpu"`` or ``"nvme"``: master weights and optimizer states rest there, and the CPU updates them."""
    path: PathLike | Sequence[PathLike] | None = None
    """Folder for ``"nvme"``, or several on a disk each, which are striped. Files in it have no names."""
    ratio: float = 1.0
    """With ``states="cpu"``: the part of all elements whose states are offloaded. The others stay on the device, which
    updates them while the CPU updates its own. Whole groups of parameters, as near to it as they come.
    """
    pin: bool = True
    """Register host memory with CUDA, where there is CUDA."""
    tile_numel: int = 1 << 22
    """Elements of a shard that move between host memory and disk as one, and are updated as one."""
    num_tiles: int = 4
    """Tiles that host memory has room for with ``states="nvme"``; tiles beyond three save disk traffic."""
    host_param_nbytes: int | None = None
    """With ``params="nvme"``: bytes of host memory for shards of parameters on their way, of this rank; at least the
    largest shard has room. None: three of the largest.
    """
    queue_depth: int = 32
    """Transfers to and from the disk that are under way at once."""
    block_nbytes: int = 1 << 20
    """Bytes of a transfer at most, and of a stripe; whole pages."""

    def __post_init__(self) -> None:
        problems = [*self._wrong_values(), *self._contradictions()]
        if problems:
            raise ConfigError("; ".join(f"Offload({problem}" for problem in problems))

    @property
    def folders(self) -> list[Path]:
        """The folders for ``"nvme"``."""
        if self.path is None:
            return []
        if isinstance(self.path, str | os.PathLike):
            return [Path(self.path)]
        return [Path(path) for path in self.path]

    def homes(self, device: torch.device) -> plan.Homes:
        """What decides how much host memory is taken beside this device."""
        return plan.Homes(
            params=self.params,
            grads=self.grads,
            states=self.states,
            ratio=self.ratio,
            tile_numel=self.tile_numel,
            num_tiles=self.num_tiles,
            host_param_nbytes=self.host_param_nbytes,
            device_is_host=device.type == "cpu",
        )

    @property
    def is_active(self) -> bool:
        """Whether anything rests elsewhere than on the device."""
        return (self.params, self.grads, self.states) != (None, None, None)

    def _wrong_values(self) -> list[str]:
        problems = []
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                problems.append(f"{name}={value!r}): expected {' or '.join(map(repr, choices))}")
        is_number = isinstance(self.ratio, int | float) and not isinstance(self.ratio, bool)
        if not is_number or not 0 <= self.ratio <= 1:
            problems.append(f"ratio={self.ratio!r}): expected a number from 0 to 1")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "host_param_nbytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                problems.append(f"{name}={value!r}): expected an integer of at least {least}")
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        on_disk = [name for name in ("params", "states") if getattr(self, name) == "nvme"]
        if on_disk and not self.folders:
            problems.append(f'{on_disk[0]}="nvme"): give the folder of the disk, path=...')
        if not on_disk and self.path is not None:
            problems.append(f'path={str(self.path)!r}): nothing rests on a disk; add states="nvme", or leave it out')
        if self.params != "nvme" and self.host_param_nbytes is not None:
            problems.append(
                f'host_param_nbytes={self.host_param_nbytes!r}): no parameters rest on a disk; add params="nvme", or '
                "leave it out"
            )
        if self.ratio != 1 and self.states != "cpu":
            problems.append(f'ratio={self.ratio!r}): a part is offloaded with states="cpu" only; leave it out')
        if self.grads is not None and self.states is None:
            problems.append('grads="cpu"): the update needs them on the device; add states="cpu", or leave it out')
        return problems
