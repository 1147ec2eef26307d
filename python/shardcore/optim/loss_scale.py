"""The factor that keeps fp16 gradients from vanishing: fixed, or found by doubling and halving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardcore.errors import StateError

_MANY = 50
"""Steps that a fixed scale lets overflow in a row; a dynamic one ends sooner, at its minimum."""


@dataclass(slots=True)
class ConstantScale:
    """A fixed factor; 1 where no scaling is needed. A step that overflows is skipped, the factor stays."""

    scale: float = 1.0
    overflows: int = 0
    """Steps in a row that overflowed."""

    def update(self, *, overflow: bool) -> None:
        """A step was applied or skipped.

        Raises:
            StateError: so many in a row overflowed that the model itself gives inf or NaN.
        """
        self.overflows = self.overflows + 1 if overflow else 0
        if self.overflows == _MANY:
            raise StateError(
                f"gradients were not finite in {_MANY} steps in a row, which were all skipped, and the loss scale is "
                f"fixed at {self.scale:g}: the loss or the model itself gives inf or NaN. Check the data and the "
                "learning rate" + ("" if self.scale == 1 else ', or use a smaller loss scale (or "dynamic")')
            )

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The factor of a checkpoint."""
        self.scale = float(state["scale"])


@dataclass(slots=True)
class DynamicScale:
    """Halves on overflow, once ``hysteresis`` overflows have come; doubles after ``window`` clean steps
    (Micikevicius et al., 2018).
    """

    scale: float = 2.0**16
    window: int = 1000
    """Clean steps in a row before the scale doubles."""
    hysteresis: int = 2
    """How many overflows are tolerated before the scale halves."""
    consecutive_hysteresis: bool = False
    """A clean step restores the tolerance at once; otherwise doubling does."""
    minimum: float = 1.0
    tolerance: int = -1
    """Overflows still tolerated; -1 at the start means ``hysteresis``."""
    clean_steps: int = 0

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            self.tolerance = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """A step was skipped (overflow) or applied.

        Raises:
            StateError: overflow at the minimum scale: the model itself produces inf or NaN, and no scale helps.
        """
        if overflow:
            self._shrink()
            return
        if self.consecutive_hysteresis:
            self.tolerance = self.hysteresis
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.tolerance = self.hysteresis
            self.scale *= 2

    def _shrink(self) -> None:
        self.clean_steps = 0
        if self.tolerance > 1:
            self.tolerance -= 1
            return
        if self.scale <= self.minimum:
            raise StateError(
                f"gradients overflow although the loss scale is at its minimum {self.minimum:g}: the loss or the "
                "model itself gives inf or NaN. Check the data and the learning rate, or train in bf16"
            )
        self.scale = max(self.scale / 2, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"scale": self.scale, "tolerance": self.tolerance, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.scale = float(state["scale"])
        self.tolerance = int(state["tolerance"])
        self.clean_steps = int(state["clean_steps"])
