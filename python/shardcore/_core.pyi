"""
The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
"""

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex, final

from _typeshed import Incomplete, SupportsGetItem

__all__ = ["HostLink", "ShardLayout", "ShardPlan", "first_difference", "groups", "plan_shards", "shard_layout"]

@final
class HostLink:
    """
    This rank's end of a link between the ranks of one axis, all on one machine.

    Exchanges are numbered in the order in which they are made, the same on all ranks. Tensors are contiguous and on
    the CPU; the link keeps them alive until their exchange is complete.
    """
    def __new__(cls, /, rank: SupportsIndex) -> HostLink:
        """
        A link of the rank at position ``rank``, not connected yet.

        Raises ``StateError`` where the kernel refuses what it needs.
        """
    def card(self, /) -> str:
        """
        What peers need to connect to this rank: ASCII text of less than 256 characters.
        """
    def close(self, /) -> None:
        """
        Ends the link; what is under way stays incomplete.
        """
    def connect(self, /, cards: SupportsGetItem[int, str]) -> None:
        """
        Connects to the ranks that gave these cards (in rank order, this rank's among them).

        Raises ``StateError`` if a peer is on another machine or may not be read.
        """
    def exchange(
        self,
        /,
        tag: SupportsIndex,
        source: Incomplete,
        pulls: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, Incomplete]],
    ) -> int:
        """
        Starts an exchange and returns its number.

        ``source`` is what peers may read until the exchange is complete. ``pulls`` lists ``(peer, offset, into)``: fill
        the tensor ``into`` with the bytes from ``offset`` on of what ``peer`` gives. ``tag`` says what is exchanged;
        ranks with different tags at one number fail and read nothing.
        """
    def wait(self, /, sequence: SupportsIndex, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Waits until all ranks have what they need from the exchange; False if that takes longer than ``timeout_s``.

        Raises ``RankMismatchError`` if a rank runs another exchange, or its process has ended.
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
