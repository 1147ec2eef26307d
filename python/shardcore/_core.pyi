"""
The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
"""

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex, final

from _typeshed import SupportsGetItem
from torch import Tensor

__all__ = [
    "HostMemory",
    "IoEngine",
    "IoHandle",
    "ShardLayout",
    "ShardPlan",
    "SwapFile",
    "first_difference",
    "groups",
    "plan_shards",
    "shard_layout",
]

@final
class HostMemory:
    """
    Page-aligned host memory of exactly ``nbytes``, zeroed and committed, behind ``shardcore.offload.HostPool``.

    It is a writable Python buffer. ``take`` hands it out from start to end. With ``huge_pages`` it is aligned to
    them and the kernel is asked for them; with ``lock`` it is never swapped out.

    Raises ``StorageError`` with the arithmetic when the machine, a container or ``ulimit -l`` has less.
    """
    def __new__(cls, /, nbytes: SupportsIndex, *, huge_pages: bool = True, lock: bool = False) -> HostMemory: ...
    @property
    def address(self, /) -> int:
        """
        Address of the first byte.
        """
    @property
    def committed_nbytes(self, /) -> int:
        """
        Bytes taken from the machine: ``nbytes`` in whole pages.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Bytes that ``take`` hands out.
        """
    def on_release(self, /, callback: Any) -> None:
        """
        Calls ``callback()`` just before the memory is given back.
        """
    @staticmethod
    def required(pieces: SupportsGetItem[int, SupportsIndex]) -> int:
        """
        Bytes of a memory from which pieces of these sizes can be taken in this order.
        """
    def take(self, /, nbytes: SupportsIndex) -> int:
        """
        Hands out the next ``nbytes`` and says where they start; pieces start at multiples of 512.

        Raises ``StorageError`` with the arithmetic when fewer are left.
        """
    @property
    def taken_nbytes(self, /) -> int:
        """
        Bytes handed out, with the gaps between pieces.
        """

@final
class IoEngine:
    """
    Reads and writes tensors, many at a time, while Python goes on. Any size, any offset, any dtype; any thread may
    submit.

    ``queue_depth`` transfers of up to ``block_nbytes`` are under way at once. ``backend`` is ``"io_uring"``,
    ``"threads"`` or ``"auto"`` (``io_uring`` where the kernel allows it). ``direct`` says whether bytes go past the
    page cache (``O_DIRECT``): ``"auto"`` where the file system allows it, ``"on"`` (an error where it does not) or
    ``"off"``.

    Requests on the same bytes of a file take effect in the order of their submission. A finished write is seen by
    every reader; it survives a power failure only after an ``fsync``. A context manager: leaving it closes the
    engine. An engine belongs to the process that made it; after a fork, make another.

    Raises ``ConfigError`` for a setting out of range, and ``StorageError`` if ``"io_uring"`` is refused.
    """
    def __enter__(self, /) -> IoEngine: ...
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any, /) -> None:
        """
        Closes the engine. An error that is under way already is not replaced by another; it gets a note.
        """
    def __new__(
        cls,
        /,
        *,
        queue_depth: SupportsIndex = 32,
        block_nbytes: SupportsIndex = 1048576,
        backend: str = "auto",
        direct: str = "auto",
    ) -> IoEngine: ...
    def __repr__(self, /) -> str: ...
    @property
    def backend(self, /) -> str:
        """
        What carries transfers out: ``"io_uring"`` or ``"threads"``.
        """
    @property
    def block_nbytes(self, /) -> int:
        """
        Bytes of a transfer at most.
        """
    def close(self, /) -> None:
        """
        Waits for all requests and ends the engine; a second call does nothing.

        Raises the error of a request that failed and for which nobody waited.
        """
    @property
    def direct(self, /) -> str:
        """
        Whether bytes go past the page cache: ``"auto"``, ``"on"`` or ``"off"``, as given.
        """
    @property
    def queue_depth(self, /) -> int:
        """
        Transfers under way at once.
        """
    def read(self, /, path: str | PathLike[str] | SwapFile, tensor: Tensor, offset: SupportsIndex = 0) -> IoHandle:
        """
        Starts to read the tensor's bytes from ``offset`` (bytes) of a file, which must have them all.

        As for ``write``; until the handle is done, the tensor's values are undefined.
        """
    def register(self, /, memory: HostMemory) -> bool:
        """
        Lets the kernel look the memory up and pin it once, instead of at each transfer; the engine keeps it until
        ``close``.

        Returns whether the kernel did. It may refuse (``ulimit -l``); transfers work all the same.
        """
    def write(self, /, path: str | PathLike[str] | SwapFile, tensor: Tensor, offset: SupportsIndex = 0) -> IoHandle:
        """
        Starts to write the tensor's bytes at ``offset`` (bytes) of a file, which is made if missing and never cut.

        The tensor is contiguous and on the CPU. Until the handle is done, do not change it, and do not resize its
        storage; dropping it is fine. Raises ``StorageError`` for a tensor or an offset that cannot be; what goes wrong
        with the file is raised by ``Handle.wait``, or by ``close`` if nobody waits.
        """

@final
class IoHandle:
    """
    A request under way. Dropping it neither cancels nor waits: the engine finishes the request.
    """
    def __repr__(self, /) -> str: ...
    def done(self, /) -> bool:
        """
        Whether the request has ended, well or badly.
        """
    def wait(self, /) -> None:
        """
        Waits for the end of the request; other Python threads go on, and Ctrl-C is honoured.

        Raises ``StorageError`` with ``filename``, ``offset`` and ``errno`` if it failed. A later call does the same
        again.
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

@final
class SwapFile:
    """
    A file of fixed size that has its space from the start, for data which only this process needs.

    ``folders`` are made if missing; with several, stripes of ``stripe_nbytes`` (whole pages) alternate between
    them. The file has no name, so nothing is left behind however the process ends; what a process left that was
    killed while making one is removed, and named in ``swept``. Pass it to ``IoEngine.write`` and ``read`` in place
    of a path.

    Raises ``StorageError``, with the arithmetic if a disk is too small.
    """
    def __new__(
        cls,
        /,
        engine: IoEngine,
        folders: SupportsGetItem[int, str | PathLike[str]],
        nbytes: SupportsIndex,
        *,
        stripe_nbytes: SupportsIndex = 1048576,
    ) -> SwapFile: ...
    def __repr__(self, /) -> str: ...
    @property
    def nbytes(self, /) -> int:
        """
        Bytes of the file.
        """
    @property
    def swept(self, /) -> list[Path]:
        """
        Files of killed processes that were found in the folders and removed.
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
