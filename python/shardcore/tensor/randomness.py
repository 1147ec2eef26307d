"""Random numbers inside split regions: different on each rank, and the same again when a block is recomputed.

Ranks of a tensor axis share torch's stream, so that dropout on replicated activations is the same on all of them.
Inside a region a stream of the rank's own takes its place, which starts from a number drawn from the shared one: all
ranks draw it, and whoever restores the shared stream (recomputation does) gets the same numbers inside.
"""

from __future__ import annotations

import torch
from torch import nn

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds of neighbouring ranks lie far apart


class RankStream:
    """Switches a device's generator to this rank's stream and back."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: list[tuple[torch.Generator, torch.Tensor]] = []

    def enter(self, device: torch.device) -> None:
        """Draw from this rank's stream from now on."""
        generator = generator_of(device)
        seed = _draw(generator)
        self._shared.append((generator, generator.get_state()))
        generator.manual_seed((seed + _GOLDEN * (self._rank + 1)) & _MASK)

    def leave(self) -> None:
        """Draw from the stream before; nothing if none was entered."""
        if self._shared:
            generator, state = self._shared.pop()
            generator.set_state(state)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that dropout on this device draws from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _draw(generator: torch.Generator) -> int:
    """A number that moves the stream on; on CUDA from the stream's position, without waiting for the device."""
    if generator.device.type != "cuda":
        return int(torch.randint(2**62, (1,), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() * _GOLDEN + offset + 1) & _MASK


def drop_rates(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a block keeps the rates of its dropouts: (module, attribute)."""
    found: list[tuple[nn.Module, str]] = []
    for child in module.modules():
        is_layer = "Dropout" in type(child).__name__
        for name, value in vars(child).items():
            if type(value) in (int, float) and ("drop" in name or (is_layer and name == "p")):
                found.append((child, name))
    return found


def is_random(module: nn.Module, rates: list[tuple[nn.Module, str]]) -> bool:
    """Whether a block's forward draws random numbers now."""
    return module.training and any(getattr(owner, name) > 0 for owner, name in rates)
