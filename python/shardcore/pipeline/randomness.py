"""Random numbers of a layer, keyed by what it computes: the same for every schedule, placement and recomputation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Which random numbers: those of one micro-batch in one step.

    ``microbatch`` counts over the whole global batch: the i-th micro-batch of data-parallel rank r of W is i * W + r.
    """

    seed: int
    step: int
    microbatch: int

    def seed_layer(self, name: str, device: torch.device) -> None:
        """Set torch's generators to what the layer called ``name`` starts from."""
        value = zlib.crc32(name.encode())
        for part in (self.seed, self.step, self.microbatch):
            value = _mix(value ^ (part & _MASK))
        torch.default_generator.manual_seed(value)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(value)


@contextmanager
def restored_randomness(device: torch.device) -> Iterator[None]:
    """torch's generators are afterwards as they were before."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield


def build_seed(seed: int, name: str) -> int:
    """From what a layer built from a spec draws its first weights, whichever rank builds it."""
    return _mix(zlib.crc32(name.encode()) ^ (seed & _MASK))


def _mix(value: int) -> int:
    """A bijection of 64 bits in which every bit of the input changes half of the output (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
