"""Linear layers and embeddings of which each rank of the tensor axis holds a part, as plain local tensors.

A layer that is built here draws its whole weights, as torch's own does, and keeps its part: the same seed gives the
same model on any number of ranks. ``adopt`` turns a layer that exists into a parallel one, in place: the module, its
parameters and its hooks stay the same objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import attach_pieces, find_pieces
from shardcore.tensor.columns import Columns, gather_input
from shardcore.tensor.functions import gather_from_ranks, reduce_to_sequence, split_to_ranks, sum_over_ranks
from shardcore.tensor.gradients import sum_gradient
from shardcore.tensor.pieces import Pieces, Range, even_ranges
from shardcore.tensor.saving import speak_of_whole_parameters

Ranges = Sequence[Sequence[Range]]


def as_axis(axis: Axis | Mesh) -> Axis:
    """The tensor axis of a mesh, or the axis itself."""
    return axis["tp"] if isinstance(axis, Mesh) else axis


def cut(param: torch.Tensor, axis: Axis, dim: int, ranges: Ranges) -> None:
    """Leave this rank's part of a parameter in it, once. It stays the same object."""
    if find_pieces(param) is not None:
        return  # tied to one that was cut; the plan has checked that both mean the same part
    pieces = Pieces(axis, tuple(param.shape), dim, tuple(tuple(each) for each in ranges))
    keep_part(param, pieces)
    attach_pieces(param, pieces)


def keep_part(param: torch.Tensor, pieces: Pieces) -> None:
    """Leave in a parameter, and its gradient, what ``pieces`` say of this rank. It stays the same object."""
    gradient, param.grad = param.grad, None
    param.data = pieces.local(param.data)
    if gradient is not None:
        param.grad = pieces.local(gradient)


def _even(length: int, axis: Axis, what: str) -> list[list[Range]]:
    if length < axis.size:
        raise ConfigError(f"{what} of {length} cannot be split over the {axis.size} ranks of axis {axis.name!r}")
    return [[each] for each in even_ranges(length, axis.size)]


class ColumnParallelLinear(nn.Linear):
    """``y = x W^T + b`` whose outputs are split over the axis: each rank has rows of ``W`` and of ``b``.

    Input ``[..., in_features]``, the same on every rank; output ``[..., this rank's part of out_features]``. Backward
    sums the input gradient over the axis, while the weight gradient is computed.

    Args:
        axis: the tensor axis, or a mesh that has it.
        gather_output: return the whole output ``[..., out_features]`` on every rank.
        sequence_dim: the input is split along this dim, and gathered for this layer; its gradient is summed and split.

    Raises:
        ConfigError: fewer outputs than ranks.
    """

    axis: Axis
    unit: str = "column-parallel linear"
    """What the layer is called in messages and traces."""
    transposed: bool = False
    """The weight is [in_features, out_features]."""
    gather_output: bool = False
    sequence_dim: int | None = None
    input_is_gathered: bool = False
    """Its input comes from :func:`shardcore.tensor.columns.gather_input`, which sums the gradient."""
    columns: Columns
    lengths: list[int]
    """The number of outputs of each rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis | Mesh,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ranges = _even(out_features, as_axis(axis), "out_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gather_output, self.sequence_dim = gather_output, sequence_dim
        self._take_part(as_axis(axis), ranges)

    @classmethod
    def adopt(
        cls,
        linear: nn.Module,
        axis: Axis,
        ranges: Ranges | None = None,
        *,
        unit: str = "",
        gather_output: bool = False,
    ) -> ColumnParallelLinear:
        """Turn ``linear`` (nn.Linear, or transformers' Conv1D) into one of these, in place. Not collective.

        Args:
            ranges: for each rank, the outputs that it holds; None splits them evenly.
        """
        out_dim = _become(linear, cls)
        module: Any = linear
        module.unit = unit or cls.unit
        module.gather_output = gather_output
        num_outputs = _whole_shape(module.weight)[out_dim]
        module._take_part(axis, ranges or _even(num_outputs, axis, f"{module.unit}: out_features"))
        adopted: ColumnParallelLinear = module
        return adopted

    def _take_part(self, axis: Axis, ranges: Ranges) -> None:
        self.axis = axis
        self.columns = Columns([self])
        self.lengths = [sum(stop - start for start, stop in each) for each in ranges]
        cut(self.weight, axis, 1 if self.transposed else 0, ranges)
        if self.bias is not None:
            cut(self.bias, axis, 0, ranges)
        self.out_features = self.lengths[axis.rank]
        speak_of_whole_parameters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs; the whole where ``gather_output``. Collective over the axis, forward or backward."""
        if self.sequence_dim is not None:
            x = gather_input(x, self.axis, self.sequence_dim, self.unit)
        y = self.columns.output(self, x)
        return gather_from_ranks(y, self.axis, -1, self.unit, self.lengths) if self.gather_output else y

    def extra_repr(self) -> str:
        """As nn.Linear's, and the part."""
        return f"{super().extra_repr()}, part {self.axis.rank} of {self.axis.size} by columns"


class RowParallelLinear(nn.Linear):
    """``y = x W^T + b`` whose inputs are split over the axis: each rank has columns of ``W``; ``b`` is whole.

    Input ``[..., this rank's part of in_features]``; output ``[..., out_features]``, summed over the axis, to which
    the bias is added once.

    Args:
        axis: the tensor axis, or a mesh that has it.
        split_input: the input is whole on every rank, and the layer takes its part of it.
        sequence_dim: each rank keeps its part of the sum along this dim only. The bias then sees a part of the
            sequence: its gradient is summed over the axis.

    Raises:
        ConfigError: fewer inputs than ranks.
    """

    axis: Axis
    unit: str = "row-parallel linear"
    """What the layer is called in messages and traces."""
    transposed: bool = False
    """The weight is [in_features, out_features]."""
    split_input: bool = False
    sequence_dim: int | None = None
    lengths: list[int]
    """The number of inputs of each rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis | Mesh,
        bias: bool = True,
        *,
        split_input: bool = False,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ranges = _even(in_features, as_axis(axis), "in_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.split_input, self.sequence_dim = split_input, sequence_dim
        self._take_part(as_axis(axis), ranges)
        if sequence_dim is not None and self.bias is not None:
            sum_gradient(self.bias, self.axis, f"bias of {self.unit}")

    @classmethod
    def adopt(
        cls,
        linear: nn.Module,
        axis: Axis,
        ranges: Ranges | None = None,
        *,
        unit: str = "",
        split_input: bool = False,
    ) -> RowParallelLinear:
        """Turn ``linear`` (nn.Linear, or transformers' Conv1D) into one of these, in place. Not collective.

        Args:
            ranges: for each rank, the inputs that it takes; None splits them evenly.
        """
        out_dim = _become(linear, cls)
        module: Any = linear
        module.unit = unit or cls.unit
        module.split_input = split_input
        num_inputs = _whole_shape(module.weight)[1 - out_dim]
        module._take_part(axis, ranges or _even(num_inputs, axis, f"{module.unit}: in_features"))
        adopted: RowParallelLinear = module
        return adopted

    def _take_part(self, axis: Axis, ranges: Ranges) -> None:
        self.axis = axis
        self.lengths = [sum(stop - start for start, stop in each) for each in ranges]
        cut(self.weight, axis, 0 if self.transposed else 1, ranges)
        if self.bias is not None:
            attach_pieces(self.bias, Pieces.whole(axis, self.bias.shape))
        self.in_features = self.lengths[axis.rank]
        speak_of_whole_parameters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks. Collective over the axis.

        Raises:
            ConfigError: the input is not this rank's part.
        """
        if self.split_input:
            x = split_to_ranks(x, self.axis, -1, self.unit, self.lengths)
        if x.shape[-1] != self.in_features:
            raise ConfigError(
                f"{self.unit}: input of shape {tuple(x.shape)}, expected {self.in_features} features, this rank's part "
                f"of {sum(self.lengths)}: what feeds a row-parallel layer must be split as its weight is"
            )
        partial = F.linear(x, self.weight.t() if self.transposed else self.weight)
        if self.sequence_dim is None:
            y = sum_over_ranks(partial, self.axis, self.unit)
        else:
            y = reduce_to_sequence(partial, self.axis, self.sequence_dim, self.unit)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """As nn.Linear's, and the part."""
        return f"{super().extra_repr()}, part {self.axis.rank} of {self.axis.size} by rows"


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank holds rows. Input: ids, the same on every rank; output: their vectors, summed
    over the axis.

    Args:
        axis: the tensor axis, or a mesh that has it.

    Raises:
        ConfigError: fewer rows than ranks, or an option that needs the whole table (max_norm, scale_grad_by_freq,
            sparse).
    """

    axis: Axis
    unit: str = "vocabulary-parallel embedding"
    """What the layer is called in messages and traces."""
    vocabulary: int
    """The number of rows of all ranks."""
    start: int
    """The first row of this rank."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis | Mesh,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _even(num_embeddings, as_axis(axis), "num_embeddings")
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._take_part(as_axis(axis))

    @classmethod
    def adopt(cls, embedding: nn.Embedding, axis: Axis, *, unit: str = "") -> VocabParallelEmbedding:
        """Turn ``embedding`` into one of these, in place. Not collective."""
        problem = cannot_split(embedding)
        if problem:
            raise ConfigError(f"{unit or cls.unit}: {problem}")
        embedding.__class__ = cls
        module: Any = embedding
        module.unit = unit or cls.unit
        module._take_part(axis)
        adopted: VocabParallelEmbedding = module
        return adopted

    def _take_part(self, axis: Axis) -> None:
        self.axis = axis
        self.vocabulary = self.num_embeddings
        ranges = _even(self.vocabulary, axis, f"{self.unit}: num_embeddings")
        cut(self.weight, axis, 0, ranges)
        self.start, stop = ranges[axis.rank][0]
        self.num_embeddings = stop - self.start
        speak_of_whole_parameters(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[*ids.shape, embedding_dim]``. Collective over the axis.

        Raises:
            IndexError: on CPU, an id outside of the vocabulary.
        """
        if not ids.is_cuda and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            raise IndexError(
                f"{self.unit}: ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {self.vocabulary - 1}"
            )
        rows = ids - self.start
        elsewhere = (rows < 0) | (rows >= self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.start
        if padding is not None and not 0 <= padding < self.num_embeddings:
            padding = None
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), self.weight, padding)
        return sum_over_ranks(vectors.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis, self.unit)

    def extra_repr(self) -> str:
        """As nn.Embedding's, and the part."""
        return f"{super().extra_repr()}, rows from {self.start} of {self.vocabulary}"


def cannot_split(embedding: nn.Embedding) -> str:
    """Why an embedding cannot be split by its rows; empty where it can."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            return f"{option}={getattr(embedding, option)!r} needs the whole table on every rank"
    return ""


def _become(linear: nn.Module, cls: type[nn.Module]) -> int:
    """Give a linear layer another class. Returns the dim of its weight that counts outputs."""
    module: Any = linear
    module.transposed = is_transposed(linear)
    out_dim = 1 if module.transposed else 0
    if module.transposed:
        module.in_features, module.out_features = module.weight.shape
    linear.__class__ = cls
    return out_dim


def _whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    pieces = find_pieces(param)
    return tuple(param.shape) if pieces is None else pieces.full_shape


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight is [in_features, out_features], as that of transformers' Conv1D."""
    return not isinstance(linear, nn.Linear)
