"""Which samples each rank reads, in an order that survives a stop and another number of ranks."""

from __future__ import annotations

from shardcore.data.rank_loader import RankLoader
from shardcore.data.rank_sampler import DataMesh, RankSampler, SamplerState, sampler

__all__ = ["DataMesh", "RankLoader", "RankSampler", "SamplerState", "sampler"]
