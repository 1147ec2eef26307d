"""How regions are recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from shardcore.activation.keeping import Keeper, make_home
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import find_tensor_axis

POLICIES = ("full", "selective")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the regions of one model, or of one process, are recomputed.

    Raises:
        ConfigError: everything that is wrong, at once.
    """

    policy: str = "full"
    """``"full"`` keeps a region's inputs; ``"selective"`` also the outputs of matrix products and fused attention."""
    offload: str | None = None
    """``"cpu"``: kept inputs rest in host memory."""
    partition: Axis | None = None
    """The tensor-parallel ranks among which kept inputs are divided."""
    contiguous: bool = False
    """Whether kept inputs lie in one buffer on the device. In host memory they always use the same pieces again."""
    num_checkpoints: int | None = None
    """Inputs of one size that the buffer has room for; None is 8. A second buffer is added where more are kept."""
    synchronize: bool = False
    """Whether the device is waited for before and after each region."""
    profile: bool = False
    """Whether the times of each region are logged."""
    keeper: Keeper | None = field(init=False, default=None, compare=False)
    """Keeps the inputs that do not just stay where they are."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("recomputation: " + "; ".join(problems))
        axis = self.partition if self.partition is not None and self.partition.size > 1 else None
        home = make_home(self.offload, contiguous=self.contiguous, num_checkpoints=self.num_checkpoints)
        if axis is not None or home is not None:
            object.__setattr__(self, "keeper", Keeper(home, axis))

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return replace(self)  # a copy of a model has stores of its own, over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ({each.name: getattr(self, each.name) for each in fields(self) if each.init},)

    @property
    def is_traceable(self) -> bool:
        """Whether a compiler can make a region part of its graph: not where the inputs rest elsewhere."""
        return self.keeper is None and not self.synchronize and not self.profile

    def _problems(self) -> list[str]:
        problems = []
        if self.policy not in POLICIES:
            problems.append(f"policy={self.policy!r}: expected {' or '.join(map(repr, POLICIES))}")
        if self.offload not in (None, "cpu"):
            problems.append(f"offload={self.offload!r}: expected None or 'cpu'")
        count = self.num_checkpoints
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            problems.append(f"num_checkpoints={count!r}: expected an integer of at least 1, or None")
        return problems


def _rebuild(values: dict[str, Any]) -> Settings:
    return Settings(**values)


def partition_axis(given: bool | Axis | Mesh, model: nn.Module | None = None) -> Axis | None:
    """The tensor-parallel axis that ``partition=`` names; True is the one that ``model`` is split over.

    Raises:
        ConfigError: there is none, or it is no axis at all.
    """
    if given is False:
        return None
    if isinstance(given, Mesh):
        return given["tp"]
    if isinstance(given, Axis):
        return given
    axis = find_tensor_axis(model.parameters()) if given is True and model is not None else None
    if axis is None:
        raise ConfigError(
            f"partition={given!r}: say among which ranks, partition=mesh['tp'] of the shardcore.Mesh whose tensor axis "
            "the model is split over; False keeps inputs whole"
        )
    return axis


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of torch's checkpoint, which would reach the function."""
    for name in ("use_reentrant", "preserve_rng_state", "context_fn"):
        if name in kwargs:
            raise ConfigError(
                f"checkpoint({name}=...): remove it; shardcore's regions are never re-entrant and always repeat their "
                "random numbers"
            )
