"""Tensor and sequence parallelism: each rank of the axis ``tp`` holds a part of the weights, as plain local tensors."""

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

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_ranks",
    "cross_entropy",
    "gather_from_ranks",
    "gather_sequence",
    "parallelize",
    "reduce_to_sequence",
    "report",
    "split_to_ranks",
    "sum_over_ranks",
]
