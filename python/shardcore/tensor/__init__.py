"""Tensor and sequence parallelism: each rank of the axis ``tp`` holds a part of the weights, as plain local tensors.
Expert parallelism: each rank of ``ep`` holds some of the experts. Context parallelism: each rank of ``cp`` has a part
of every sequence.
"""

from shardcore.tensor.context import context_parallel
from shardcore.tensor.experts import Experts, MixtureOfExperts
from shardcore.tensor.functions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_to_sequence,
    split_to_ranks,
    sum_over_ranks,
)
from shardcore.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shardcore.tensor.loss import cross_entropy
from shardcore.tensor.parallelize import parallelize, report
from shardcore.tensor.ring import ring_attention
from shardcore.tensor.sequences import part_of_sequence, positions_of_part
from shardcore.tensor.ulysses import heads_to_sequence, sequence_to_heads, ulysses_attention

__all__ = [
    "ColumnParallelLinear",
    "Experts",
    "MixtureOfExperts",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "context_parallel",
    "copy_to_ranks",
    "cross_entropy",
    "gather_from_ranks",
    "gather_sequence",
    "heads_to_sequence",
    "parallelize",
    "part_of_sequence",
    "positions_of_part",
    "reduce_to_sequence",
    "report",
    "ring_attention",
    "sequence_to_heads",
    "split_to_ranks",
    "sum_over_ranks",
    "ulysses_attention",
]
