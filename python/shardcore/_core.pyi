"""
The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
"""

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem

__all__ = [
    "CPURule",
    "CPUStepTable",
    "ShardLayout",
    "ShardPlan",
    "convert",
    "first_difference",
    "groups",
    "plan_shards",
    "shard_layout",
    "sums_of_squares",
]

@final
class CPURule:
    """
    An update rule with its hyperparameters. Raises ``ConfigError`` for one that is out of range.
    """
    def __repr__(self, /) -> str: ...
    @staticmethod
    def adagrad(
        *,
        lr: SupportsFloat | SupportsIndex,
        lr_decay: SupportsFloat | SupportsIndex,
        weight_decay: SupportsFloat | SupportsIndex,
        eps: SupportsFloat | SupportsIndex,
        maximize: bool = False,
    ) -> CPURule:
        """
        Adagrad.
        """
    @staticmethod
    def adam(
        *,
        lr: SupportsFloat | SupportsIndex,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex],
        eps: SupportsFloat | SupportsIndex,
        weight_decay: SupportsFloat | SupportsIndex,
        decoupled: bool,
        maximize: bool = False,
    ) -> CPURule:
        """
        Adam; ``decoupled`` weight decay acts on the parameter (``AdamW``), else it is added to the gradient.
        """
    @staticmethod
    def lion(
        *,
        lr: SupportsFloat | SupportsIndex,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex],
        weight_decay: SupportsFloat | SupportsIndex,
        maximize: bool = False,
    ) -> CPURule:
        """
        Lion, with decoupled weight decay.
        """
    @staticmethod
    def sgd(
        *,
        lr: SupportsFloat | SupportsIndex,
        momentum: SupportsFloat | SupportsIndex,
        dampening: SupportsFloat | SupportsIndex,
        weight_decay: SupportsFloat | SupportsIndex,
        nesterov: bool,
        maximize: bool = False,
    ) -> CPURule:
        """
        Gradient descent; ``momentum=0`` keeps no state.
        """

@final
class CPUStepTable:
    """
    Tensors that are stepped together, with their memory looked up once and checked again at each step.

    ``rows`` are ``(number, group, step, param, low, first, second, copy)``: the parameter's number (the key of
    stochastic rounding), the index of its rule, a tensor of one fp32 that counts its steps, the fp32 parameter (or a
    bf16 one and its int16 remainders ``low``), its states in fp32 or bf16, and a bf16 or fp16 tensor that receives a
    copy. All are contiguous CPU tensors of equal length that share no memory.

    Raises ``ConfigError`` for any other tensor.
    """
    def __len__(self, /) -> int: ...
    def __new__(
        cls,
        /,
        rows: SupportsGetItem[
            int, tuple[SupportsIndex, SupportsIndex, Any, Any, Any | None, Any | None, Any | None, Any | None]
        ],
    ) -> CPUStepTable: ...
    def step(
        self,
        /,
        grads: SupportsGetItem[int, Any | None],
        rules: SupportsGetItem[int, CPURule],
        *,
        seeds: SupportsGetItem[int, SupportsIndex],
        grad_scale: SupportsFloat | SupportsIndex = 1.0,
        num_threads: SupportsIndex = 1,
    ) -> None:
        """
        Makes one step of every tensor that has a gradient, in one pass over each.

        ``grads`` has a tensor (fp32, bf16 or fp16) or ``None`` for each row, ``rules`` one rule for each group.
        Gradients are multiplied by ``grad_scale`` first. ``seeds``, one for each group, are those of stochastic
        rounding. The result does not depend on ``num_threads``.
        """

@final
class ShardLayout:
    """
    Where each parameter of one group lies in a flat buffer, and which piece of it each rank holds.

    Made by ``shard_layout``, ``groups`` and ``plan_shards``. All numbers count elements unless their name ends in
    ``nbytes``. Frozen, comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    @property
    def alignment(self, /) -> int:
        """
        Alignment of every shard in bytes.
        """
    def digest(self, /) -> str:
        """
        SHA-256 of the layout as 64 hexadecimal digits: equal layouts have equal digests, on every platform.
        """
    @property
    def dtype(self, /) -> str:
        """
        Canonical name of the element type, such as ``"bf16"``.
        """
    def entries(self, /) -> list[tuple[str, int, int]]:
        """
        The parameters as ``(name, numel, offset)``, in the order of the buffer.
        """
    def explain(self, /) -> str:
        """
        The layout as an aligned text table, one line a parameter; a long one shows both ends.
        """
    @classmethod
    def from_json(cls, /, text: str) -> ShardLayout:
        """
        Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no layout or contradicts itself.
        """
    def gaps(self, /) -> list[tuple[int, int]]:
        """
        The padding: maximal runs ``(start, stop)`` of the flat buffer that belong to no parameter.
        """
    @property
    def itemsize(self, /) -> int:
        """
        Bytes of one element.
        """
    @property
    def names(self, /) -> list[str]:
        """
        Names of the parameters, in the order of the buffer.
        """
    @property
    def num_shards(self, /) -> int:
        """
        Number of shards, one per rank.
        """
    @property
    def numel(self, /) -> int:
        """
        Elements of all parameters, without padding.
        """
    def offset(self, /, name: str) -> int:
        """
        Where a parameter starts in the flat buffer. Raises ``PlanError`` for an unknown name.
        """
    @property
    def padded_numel(self, /) -> int:
        """
        Elements of the whole flat buffer: ``num_shards * shard_numel``.
        """
    def ranges(self, /, rank: SupportsIndex) -> list[tuple[str, int, int, int]]:
        """
        What one rank holds: ``(name, start, stop, shard_offset)``, in the order of its shard.

        ``start`` and ``stop`` count in the flattened parameter, ``shard_offset`` in the rank's shard. A range is never
        empty: parameters of which the rank holds nothing are left out. Raises ``PlanError`` for a rank out of range.
        """
    @property
    def shard_numel(self, /) -> int:
        """
        Elements of one shard; every rank's is equal.
        """
    def to_json(self, /) -> str:
        """
        The layout as a compact JSON document, which ``from_json`` reads.
        """
    @property
    def trainable(self, /) -> bool:
        """
        Whether the parameters take gradients.
        """

@final
class ShardPlan:
    """
    The groups of all wrap units of a model, and the order in which their gradients are reduced.

    Made by ``plan_shards``. Frozen, comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    @property
    def alignment(self, /) -> int:
        """
        Alignment of every shard in bytes.
        """
    def digest(self, /) -> str:
        """
        SHA-256 of the plan as 64 hexadecimal digits: equal plans have equal digests, on every platform.
        """
    def explain(self, /) -> str:
        """
        The plan as an aligned text table, one line a group; a long one shows both ends.
        """
    @classmethod
    def from_json(cls, /, text: str) -> ShardPlan:
        """
        Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no plan or contradicts itself.
        """
    @property
    def groups(self, /) -> list[tuple[int, ShardLayout]]:
        """
        All groups as ``(unit_index, layout)``, in the order of their units.
        """
    @property
    def num_shards(self, /) -> int:
        """
        Number of shards, one per rank.
        """
    @property
    def reduce_order(self, /) -> list[int]:
        """
        Indices of the trainable groups in the order in which their gradients are reduced: the last unit's come first.
        """
    @property
    def segment_nbytes(self, /) -> int | None:
        """
        The limit on a segment in bytes; ``None`` for no limit.
        """
    def to_json(self, /) -> str:
        """
        The plan as a compact JSON document, which ``from_json`` and ``first_difference`` read.
        """
    @property
    def units(self, /) -> list[str]:
        """
        Names of the units, in order.
        """

def convert(
    sources: SupportsGetItem[int, Any],
    targets: SupportsGetItem[int, Any],
    *,
    scale: SupportsFloat | SupportsIndex = 1.0,
    num_threads: SupportsIndex = 1,
) -> None:
    """
    Copies each source, times ``scale``, into its target of any other float type, rounded to nearest.

    Sources and targets are fp32, bf16 or fp16 tensors on the CPU, pairwise of equal length; targets are contiguous and
    share no memory with anything here.
    """

def first_difference(first: str, second: str) -> str | None:
    """
    Names the first difference between two documents that ``to_json`` wrote; ``None`` when they are equal.

    The answer reads like ``unit 3 "layers.3", group 0, entry 1 "mlp.weight", numel: 4096 in the first, 4100 in the
    second``. Raises ``PlanError`` if a text is not JSON.
    """

def groups(
    params: Iterable[tuple[str, int, str, bool]],
    num_shards: SupportsIndex,
    *,
    segment_nbytes: SupportsIndex | None = None,
    alignment: SupportsIndex = 256,
) -> list[ShardLayout]:
    """
    Splits parameters into layouts of one dtype and one trainability each, and those into segments.

    ``params`` are ``(name, numel, dtype, trainable)``. Layouts stand in the order of their first parameter, and inside
    one the order is kept. With ``segment_nbytes`` a layout ends before the parameter that would carry it past so many
    bytes (padding at the end not counted); a larger parameter gets a layout of its own and is never split.

    Raises ``PlanError`` for duplicate names and numbers out of range.
    """

def plan_shards(
    units: Iterable[tuple[str, Iterable[tuple[str, int, str, bool]]]],
    num_shards: SupportsIndex,
    *,
    segment_nbytes: SupportsIndex | None = None,
    alignment: SupportsIndex = 256,
) -> ShardPlan:
    """
    Plans the shards of a model that is cut into wrap units.

    ``units`` are ``(unit_name, params)`` in the order of use, ``params`` as in ``groups``, which is applied to each
    unit. A parameter belongs to exactly one unit.

    Raises ``PlanError`` for a name in two units and for whatever ``groups`` refuses.
    """

def shard_layout(
    params: Iterable[tuple[str, int, str, bool]], num_shards: SupportsIndex, *, alignment: SupportsIndex = 256
) -> ShardLayout:
    """
    Lays parameters of one dtype and one trainability out in one flat buffer of equal shards.

    ``params`` are ``(name, numel, dtype, trainable)``. They keep their order, and each starts 16-byte aligned; the
    buffer is padded at its end to ``num_shards * alignment`` bytes, so all shards are equal and aligned. ``alignment``
    is a power of two of at least 16.

    Raises ``PlanError`` for mixed dtypes or trainabilities (use ``groups``), duplicate names and numbers out of range.
    """

def sums_of_squares(tensors: SupportsGetItem[int, Any], *, num_threads: SupportsIndex = 1) -> list[float]:
    """
    The sum of squares of each tensor (fp32, bf16 or fp16, on the CPU), in fp64.

    Does not depend on ``num_threads``. It is inf or NaN exactly where an element of the tensor is.
    """
