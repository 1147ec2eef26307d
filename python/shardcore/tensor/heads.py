"""Which attention heads each rank takes."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.tensor.pieces import Range, even_ranges


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads by rank: ranges of query heads, and of the key-value heads that these use."""

    query: tuple[Range, ...]
    key_value: tuple[Range, ...]
    num_sharing: int = 1
    """How many neighbouring ranks hold the same key-value head."""


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> Heads | str:
    """Split heads so that each rank has whole groups, or a part of one; or why that cannot be.

    Query head i uses key-value head ``i // (num_heads / num_kv_heads)``. Ranks may differ by one group, or by one head
    within a group. A key-value head that several ranks use is held by each of them.
    """
    if num_heads % num_kv_heads:
        return f"{num_heads} heads are no multiple of {num_kv_heads} key-value heads"
    in_group = num_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        key_value = even_ranges(num_kv_heads, num_ranks)
        return Heads(tuple((start * in_group, stop * in_group) for start, stop in key_value), tuple(key_value))
    if num_ranks % num_kv_heads:
        return f"{num_kv_heads} key-value heads < {num_ranks} ranks, and do not divide them"
    sharing = num_ranks // num_kv_heads
    if in_group < sharing:
        return f"{num_heads} heads < {num_ranks} ranks"
    query = [part for kv in range(num_kv_heads) for part in even_ranges(in_group, sharing, kv * in_group)]
    return Heads(tuple(query), tuple((rank // sharing, rank // sharing + 1) for rank in range(num_ranks)), sharing)


def rows_of(heads: tuple[Range, ...], head_dim: int, offset: int = 0) -> list[Range]:
    """The rows of a projection that belong to ranges of heads."""
    return [(offset + start * head_dim, offset + stop * head_dim) for start, stop in heads]
