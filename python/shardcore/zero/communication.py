"""How a sharded model spends less on its network: fewer bits, fewer bytes between nodes. Off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from shardcore import comm
from shardcore.errors import ConfigError

if TYPE_CHECKING:
    from shardcore.mesh import Mesh, Split
    from shardcore.zero.policy import Policy

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """What travels between ranks, and over which links. Beside it, ``Precision(reduce="bf16")`` sends 16-bit gradients.

    Quantised values share an fp32 scale per 256 elements; an inf or NaN makes its 256 neighbours NaN, never a number.
    fp64 parameters always travel in full.
    """

    gather: Literal["int8"] | None = None
    """Stage 3 gathers parameters for forward and backward in this form (ZeRO++ qwZ). Shards, masters, ``summon`` and
    state dicts stay exact.
    """
    gather_frozen: Literal["int8"] | None = None
    """The same for parameters that are not trained; None follows ``gather``."""
    reduce: Literal["int8", "int4"] | None = None
    """Gradients are reduced over the shard axis in this form, and added up in fp32 (ZeRO++ qgZ)."""
    error_feedback: bool = True
    """What quantising takes from a gradient is added to the next one, for 2 bytes of memory per trained parameter."""
    secondary: int | Literal["node"] | None = None
    """Stage 3 keeps a second shard of the parameters, cut over so many neighbouring ranks (``"node"``: those of a
    node), from the first gather after an update on; later gathers, backward's among them, stay among these ranks
    (ZeRO++ hpZ, "Hierarchical weight partition"). Costs the parameters' bytes divided by this number, on each rank.
    """
    hierarchical: bool = False
    """Where the shard axis spans nodes, gather and reduce in two steps, across the nodes and inside each, so that each
    shard crosses between two nodes once. Reductions add up inside the node first.
    """

    def __post_init__(self) -> None:
        for name, allowed in (
            ("gather", ("int8",)),
            ("gather_frozen", ("int8",)),
            ("reduce", ("int8", "int4")),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ConfigError(
                    f"Communication({name}={value!r}): expected {' or '.join(map(repr, allowed))}, or None for values "
                    "in full"
                )
        secondary = self.secondary
        if secondary not in (None, "node") and (
            isinstance(secondary, bool) or not isinstance(secondary, int) or secondary < 1
        ):
            raise ConfigError(
                f"Communication(secondary={secondary!r}): expected a number of ranks of at least 1, 'node' or None"
            )

    def check(self, policy: Policy) -> None:
        """Refuse what the stage has no use for.

        Raises:
            ConfigError: a setting without effect at this stage.
        """
        for name, least, why in (
            ("gather", 3, "below it parameters are whole and exact on every rank"),
            ("gather_frozen", 3, "below it parameters are whole and exact on every rank"),
            ("secondary", 3, "below it parameters are not gathered for backward"),
            ("reduce", 1, "stage 0 has no shards to reduce into"),
        ):
            if getattr(self, name) is not None and policy.stage < least:
                raise ConfigError(
                    f"Communication({name}={getattr(self, name)!r}) needs stage {least} or above, got stage "
                    f"{policy.stage}: {why}; leave it out"
                )

    def coding(self, dtype: torch.dtype, trainable: bool) -> comm.Coding:
        """In how many bits a group of parameters of this dtype travels."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return comm.Coding()
        gather = self.gather if trainable else self.gather_frozen or self.gather
        return comm.Coding(
            gather_bits=None if gather is None else _BITS[gather],
            reduce_bits=None if self.reduce is None else _BITS[self.reduce],
            feeds_back=self.error_feedback,
        )

    def node_split(self, mesh: Mesh) -> Split | None:
        """The shard axis by nodes, where two steps send less between them than one. Collective over all ranks.

        Raises:
            ConfigError: it is not known which ranks share a node.
        """
        if not self.hierarchical:
            return None
        num_inside = mesh.num_in_node("shard")
        return mesh.split("shard", num_inside) if 1 < num_inside < mesh["shard"].size else None

    def secondary_split(self, mesh: Mesh) -> Split | None:
        """The shard axis by blocks of ranks that hold a second shard together. Collective over all ranks.

        Raises:
            ConfigError: blocks that do not divide the shard axis, or are larger.
        """
        if self.secondary is None:
            return None
        num_ranks = mesh.num_in_node("shard") if self.secondary == "node" else self.secondary
        num_shards = mesh["shard"].size
        if num_shards % num_ranks:
            divisors = [n for n in range(1, num_shards + 1) if num_shards % n == 0]
            raise ConfigError(
                f"Communication(secondary={self.secondary!r}): {num_ranks} ranks do not divide the {num_shards} ranks "
                f"of axis 'shard'; choose one of {divisors}, best the ranks of a node"
            )
        return mesh.split("shard", num_ranks) if 1 < num_ranks < num_shards else None
