"""Named streams of random numbers beside torch's, by DeepSpeed's (and Megatron's) names. On CPU and CUDA alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Mesh, default_device
from shardcore.protocols import register_random_source

_NAME = "model-parallel-rng"
_OFFSET = 2718
"""What Megatron adds to the seed of tensor-parallel streams, so that runs by either library draw alike."""


class CudaRNGStatesTracker:
    """Streams that take the place of the device's generator while they are forked to. Recomputation repeats them."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Where each stream stands."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Continue from there."""
        self._states = dict(states)

    get_state, set_state = get_states, set_states

    def add(self, name: str, seed: int) -> None:
        """Make a stream.

        Raises:
            ConfigError: the name or the seed is in use.
        """
        if name in self._states or seed in self._seeds:
            raise ConfigError(f"random tracker: the name {name!r} or the seed {seed} is in use; call reset() first")
        self._seeds.add(seed)
        device = default_device()
        self._states[name] = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = _NAME) -> Iterator[None]:
        """Inside, the device's generator draws from the stream.

        Raises:
            StateError: there is no such stream.
        """
        if name not in self._states:
            raise StateError(
                f"random tracker: there is no stream {name!r}; add(name, seed) or "
                "model_parallel_cuda_manual_seed(seed) makes one"
            )
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before)


_tracker = CudaRNGStatesTracker()
register_random_source(_tracker)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int, mpu: Any = None) -> None:
    """Seed torch's generators alike on all tensor-parallel ranks, and a stream of its own on each of them.

    Args:
        mpu: a :class:`shardcore.Mesh`, or an object with ``get_tensor_model_parallel_rank()`` or
            ``get_model_parallel_rank()``; None is one rank.
    """
    torch.manual_seed(seed)
    _tracker.reset()
    _tracker.add(_NAME, seed + _OFFSET + _rank_of(mpu))


def _rank_of(mpu: Any) -> int:
    if mpu is None:
        return 0
    if isinstance(mpu, Mesh):
        return mpu["tp"].rank
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        rank = getattr(mpu, name, None)
        if rank is not None:
            return int(rank())
    raise ConfigError(f"model_parallel_cuda_manual_seed(mpu={type(mpu).__name__}): it does not tell this rank")


def _generator() -> torch.Generator:
    device = default_device()
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
