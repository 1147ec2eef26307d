"""What ``shard`` is given: of the right kind, buildable, and the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardcore import comm
from shardcore.errors import ConfigError

if TYPE_CHECKING:
    from shardcore.mesh import Mesh
    from shardcore.zero.communication import Communication
    from shardcore.zero.policy import Policy, Precision
    from shardcore.zero.prefetch import PrefetchLimits

T = TypeVar("T")

_NOT_BUILT = {"tp": "tensor parallelism", "cp": "context parallelism", "ep": "expert parallelism"}


def expect(name: str, value: object, kind: type[T]) -> T:
    """``value``, if it is of this class.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"shard({name}={value!r}): expected a {kind.__name__}")
    return value


def check_arguments(
    mesh: Mesh,
    policy: Policy,
    precision: Precision,
    communication: Communication,
    prefetch: PrefetchLimits | None,
    segment_nbytes: int | None,
) -> None:
    """Raise unless something uses the mesh's axes and all ranks give the same. Collective over the data-parallel axis.

    Raises:
        ConfigError: the mesh has an axis that nothing uses yet.
        RankMismatchError: ranks give different settings; the message names one, and both values.
    """
    _check_axes(mesh)
    settings = {
        "stage": policy.stage,
        "precision": precision,
        "communication": communication,
        "prefetch": prefetch,
        "segment_nbytes": segment_nbytes,
    }
    comm.agree_on_settings("shardcore.shard(...)", settings, mesh["dp"])


def _check_axes(mesh: Mesh) -> None:
    """Refuse axes that nothing uses yet: their ranks would all do the same work, on the same data."""
    for name, what in _NOT_BUILT.items():
        num_ranks = mesh.ep if name == "ep" else mesh[name].size
        if num_ranks > 1:
            raise ConfigError(
                f"the mesh has {name}={num_ranks}, but {what} is not built yet: those ranks would repeat each other's "
                f"work. Make the mesh without {name}, so that all ranks are data-parallel"
            )
