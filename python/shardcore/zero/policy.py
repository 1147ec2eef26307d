"""What is whole, for how long, in which dtype: the stage and the precision as values.

The stage is never a class: every stage runs the same groups, hooks and optimizer, which ask the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from shardcore.errors import ConfigError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_NAMES: dict[str | torch.dtype, str] = {
    spelling: name for name, dtype in _DTYPES.items() for spelling in (name, str(dtype).removeprefix("torch."), dtype)
}
"""From every way to write a dtype to its name."""
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """In which dtype each state is kept.

    Dtypes are torch's, or names: ``"fp16"``, ``"bf16"``, ``"fp32"``, ``"fp64"``; they are kept as these names.
    """

    param: str | torch.dtype | None = None
    """Cast floating parameters to this; None keeps each parameter's own dtype. Buffers are never cast."""
    reduce: str | torch.dtype | None = None
    """Gradients travel between ranks in this dtype; None means the dtype they are summed in."""
    master: str | torch.dtype = "fp32"
    """16-bit parameters are updated in this dtype; gradients are summed in fp32 in any case."""
    loss_scale: str | float | None = None
    """``"dynamic"``, a fixed factor, or None: dynamic where parameters are fp16, else 1."""
    skip_nonfinite: bool | None = None
    """Skip a step whose gradients hold an inf or NaN on any rank; None: where parameters are 16-bit."""

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "master"):
            value = getattr(self, name)
            if value is None and name != "master":
                continue
            if not isinstance(value, (str, torch.dtype)) or value not in _NAMES:
                raise ConfigError(
                    f"Precision({name}={value!r}) is not a floating dtype; use one of {', '.join(sorted(_DTYPES))}, or "
                    "one of torch's, such as torch.bfloat16"
                )
            object.__setattr__(self, name, _NAMES[value])
        scale = self.loss_scale
        is_factor = isinstance(scale, (int, float)) and 0 < scale < inf
        if scale is not None and scale != "dynamic" and not is_factor:
            raise ConfigError(f"Precision(loss_scale={scale!r}): expected 'dynamic', a finite number above 0, or None")

    @classmethod
    def of(cls, given: Precision | str | torch.dtype | None) -> Precision:
        """The precision that a ``precision=`` argument means; a dtype is that of the parameters.

        Raises:
            ConfigError: it is none of these, or no floating dtype.
        """
        if given is None or isinstance(given, Precision):
            return given or cls()
        if isinstance(given, (str, torch.dtype)):
            return cls(param=given)
        raise ConfigError(
            f"precision={given!r}: expected shardcore.Precision(...), or the dtype of the parameters, such as 'bf16'"
        )

    @property
    def param_dtype(self) -> torch.dtype | None:
        """What floating parameters are cast to; None casts nothing."""
        return None if self.param is None else _DTYPES[_NAMES[self.param]]

    def master_dtype(self, param: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of dtype ``param`` is updated."""
        return _DTYPES[_NAMES[self.master]] if param in _SIXTEEN_BIT else param

    def sum_dtype(self, param: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are summed over micro-batches and ranks: at least fp32."""
        return torch.promote_types(param, torch.float32)

    def reduce_dtype(self, param: torch.dtype) -> torch.dtype:
        """The dtype in which gradients travel."""
        return self.sum_dtype(param) if self.reduce is None else _DTYPES[_NAMES[self.reduce]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One row of the table of stages: what is whole all the time, and what only while it is used."""

    stage: int

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ConfigError(
                f"stage={self.stage!r}: expected 0 (replicated), 1 (optimizer states sharded), 2 (and gradients) or 3 "
                "(and parameters)"
            )

    @property
    def shards_states(self) -> bool:
        """Each rank updates only its shard."""
        return self.stage >= 1

    @property
    def shards_grads(self) -> bool:
        """Whole gradients exist only until they are reduced."""
        return self.stage >= 2

    @property
    def shards_params(self) -> bool:
        """Whole parameters exist only while they are used."""
        return self.stage >= 3
