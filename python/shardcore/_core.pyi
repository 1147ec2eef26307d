"""
The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem
from torch import Tensor

__all__ = [
    "Action",
    "CPURule",
    "CPUStepTable",
    "CheckpointReader",
    "CheckpointWriter",
    "HostLink",
    "HostMemory",
    "IoEngine",
    "IoHandle",
    "PipelineSchedule",
    "PrefetchCoordinator",
    "PrefetchPlan",
    "ShardLayout",
    "ShardPlan",
    "Simulation",
    "SwapFile",
    "Synthesis",
    "abandon_checkpoint",
    "begin_checkpoint",
    "check_boundaries",
    "check_host_memory",
    "checkpoint_aside",
    "choose_checkpoint",
    "commit_checkpoint",
    "convert",
    "dequantize",
    "evaluation_schedule",
    "first_difference",
    "from_megatron_layout",
    "groups",
    "latest_checkpoint",
    "list_checkpoints",
    "partition_layers",
    "partition_marked",
    "partition_uniform",
    "pipeline_schedule",
    "place_tiles",
    "plan_shards",
    "plan_swap",
    "prefetch",
    "quantization_block",
    "quantize",
    "reshard",
    "schedule_names",
    "shard_layout",
    "share_writes",
    "sums_of_squares",
    "synthesize",
    "to_megatron_layout",
    "verify_checkpoint",
]

@final
class Action:
    """
    One thing a rank does: what, with which stage, for which micro-batch. ``str(action)`` reads ``"2F0"``.

    ``kind`` is one of ``F`` (forward), ``B`` (whole backward), ``I`` (input gradient), ``W`` (weight gradient),
    ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``, ``UNSHARD``, ``RESHARD``, ``REDUCE``, ``TIED_REDUCE`` and ``OPTIM``.
    A receive has the stage that receives. Frozen, comparable, hashable and picklable.
    """

    __match_args__: Final[tuple[str, str, str]]
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        kind: str,
        stage: SupportsIndex,
        microbatch: SupportsIndex | None = None,
        *,
        slot: SupportsIndex = ...,
        with_next: bool = False,
    ) -> Action:
        """
        ``microbatch`` is ``None`` for kinds that have none. ``slot`` and ``with_next`` are as the properties.
        """
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @staticmethod
    def from_text(text: str) -> Action:
        """
        Reads what ``str`` writes: ``"2F0"``, ``"0F3@1"`` with a slot, ``"0F3&"`` joined with the action behind it.
        """
    @property
    def kind(self, /) -> str:
        """
        What is done, such as ``"F"`` or ``"SEND_B"``.
        """
    @property
    def microbatch(self, /) -> int | None:
        """
        The micro-batch (with sequence slices: ``microbatch * num_slices + slice``); ``None`` where the kind has none.
        """
    @property
    def slot(self, /) -> int:
        """
        The receive slot that this action fills or reads, on lowered programs; 0 elsewhere.
        """
    @property
    def stage(self, /) -> int:
        """
        The stage, counted over all chains of the placement.
        """
    @property
    def with_next(self, /) -> bool:
        """
        Whether it runs as one composite with the action behind it (an overlapped forward and backward).
        """

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
class CheckpointReader:
    """
    A complete checkpoint, opened for reading: its mark, its index and the sizes of its files are checked.

    Raises ``CheckpointError`` naming the file and its bytes if it is damaged, or if it was never finished.
    """
    def __new__(cls, /, folder: str | PathLike[str]) -> CheckpointReader: ...
    def check_header(self, /, file: SupportsIndex) -> None:
        """
        Raises ``CheckpointError`` if the header of the file with this number is not as it was written.
        """
    def index(self, /) -> str:
        """
        The index, as its JSON document.
        """
    @staticmethod
    def of_safetensors(folder: str | PathLike[str], names: SupportsGetItem[int, str]) -> CheckpointReader:
        """
        Safetensors files that anyone may have written, as if they were a checkpoint: all tensors have the role
        ``"weight"``, and there are no checksums.

        Raises ``CheckpointError`` for what is no such file, and for a name in two of them.
        """
    def read(
        self,
        /,
        wants: SupportsGetItem[
            int,
            tuple[
                SupportsIndex,
                SupportsIndex,
                SupportsIndex,
                Tensor,
                tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None,
            ],
        ],
    ) -> None:
        """
        Reads ``(tensor, start, stop, out, runs)``: elements of the flattened tensor with this number in the index, into
        the memory of ``out``, which has exactly these elements and is contiguous on the CPU. With ``runs``, ``(first,
        length, stride)``, they are counted in the part of it that runs of ``length`` elements every ``stride`` from
        ``first`` on make up. Every block is checked.

        Raises ``CheckpointError`` naming the file and its bytes for a block that is not as it was written.
        """

@final
class CheckpointWriter:
    """
    A safetensors file that is being written: ``entries`` are ``(name, dtype, shape)``, whose bytes come by ``put`` in
    this order. It must not exist, and gets its whole space at once.

    Raises ``StorageError`` if the disk is full, with the arithmetic, or refuses.
    """
    def __new__(
        cls,
        /,
        path: str | PathLike[str],
        entries: SupportsGetItem[int, tuple[str, str, SupportsGetItem[int, SupportsIndex]]],
        metadata: SupportsGetItem[int, tuple[str, str]],
    ) -> CheckpointWriter: ...
    def finish(self, /, read_back: bool) -> tuple[int, int, str, list[tuple[int, str]]]:
        """
        Writes the rest, syncs the file and compares it with what was written: size and header; with ``read_back``
        all of it.

        Returns ``(nbytes, header_nbytes, header_crc32, [(offset, crc32 of its blocks) of each entry])``.
        """
    def put(self, /, tensor: Tensor) -> None:
        """
        The next bytes of the file: those of a contiguous CPU tensor, which are copied before this returns.
        """

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
        source: Tensor,
        pulls: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, Tensor]],
    ) -> int:
        """
        Starts an exchange and returns its number.

        ``source`` is what peers may read until the exchange is complete. ``pulls`` lists ``(peer, offset, into)``: fill
        the tensor ``into`` with the bytes from ``offset`` on of what ``peer`` gives. ``tag`` says what is exchanged;
        ranks with different tags at one number fail and read nothing. With ``num_slots`` exchanges under way this waits
        for the first of them, and looks for no failure of other ranks: wait for it before.
        """
    @staticmethod
    def num_slots() -> int:
        """
        How many exchanges may be under way at once.
        """
    @property
    def num_started(self, /) -> int:
        """
        Number of exchanges that were started.
        """
    def wait(self, /, sequence: SupportsIndex, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Waits until all ranks have what they need from the exchange; False if that takes longer than ``timeout_s``.

        Raises ``RankMismatchError`` if a rank runs another exchange, or its process has ended.
        """

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
class PipelineSchedule:
    """
    What each rank of a pipeline does, in which order.

    Made by ``pipeline_schedule``, ``evaluation_schedule``, ``synthesize``, the ``from_...`` methods, or from programs
    of your own: one list of actions (or of their texts, ``["0F0", "0B0"]``) for each rank. ``placement`` is the rank
    of every stage. Micro-batches of a step, slices of a sequence and chains of a bidirectional pipeline are counted by
    ``num_microbatches``, ``num_slices`` and ``num_chains``. ``gating`` says when the parts of a composite start:
    ``"all"`` inputs are there, or each part's ``"own"``. ``comm`` is the strictest communication under which the
    lowered program is declared to run. Programs with more than compute are lowered; ``lowering`` is what for, as the
    property of that name gives it (``None``: what their actions say, so gathers mean ``zero_stage`` 3, sums over shared
    weights one tied group, and the bounds are those that the programs reach).

    The constructor checks that every action is in range; ``check`` whether the order can be executed. Frozen,
    comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        programs: Iterable[Iterable[Action | str]],
        placement: SupportsGetItem[int, SupportsIndex],
        num_microbatches: SupportsIndex,
        *,
        name: str = "custom",
        num_slices: SupportsIndex = ...,
        num_chains: SupportsIndex = ...,
        gating: str = "all",
        comm: str = "blocking",
        lowering: Mapping[str, Any] | None = None,
    ) -> PipelineSchedule: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    def check(
        self,
        /,
        comm: str | None = None,
        memory_cap: float | Sequence[float] | None = None,
        activation: float | Iterable[float] = ...,
        stash: float | Iterable[float] | None = None,
        *,
        capacity: SupportsIndex | None = None,
    ) -> None:
        """
        Checks that the programs can be executed; on a fault the error shows the grid with the failing cell marked.

        Always: each action is there once, on its rank, behind what it needs, and no ranks wait for each other; and what
        the programs gather, reduce, sum over shared weights and step is what they were lowered for, each in its place.
        ``comm`` adds communication under one way to deliver messages: ``"buffered"`` (a send never waits),
        ``"directed"`` (one channel per directed edge), ``"pair-fifo"`` (one per pair of ranks), ``"one-fifo"`` (one
        queue per rank), ``"blocking"`` (each message waits for its partner), or ``"batched"`` (what stands between two
        computations is posted together; a schedule cannot declare that, only be checked for it). Instead, ``capacity``
        bounds the messages of an edge that have not met their receive (0: the sender waits for each). A schedule
        that is not lowered is lowered for that. ``None`` is what the schedule declares.

        With ``memory_cap`` no rank may hold more than that (a list: each rank), where ``activation`` and ``stash`` are
        as in ``simulate``.

        Raises ``PlanError`` with the first fault.
        """
    @property
    def comm(self, /) -> str:
        """
        The strictest communication under which the lowered program is declared to run.
        """
    def digest(self, /) -> str:
        """
        SHA-256 of the schedule as 64 hexadecimal digits: equal schedules have equal digests, on every platform.
        """
    def explain(self, /) -> str:
        """
        The schedule as an aligned text table, one line a rank; a long one shows both ends.

        ``held`` is the most micro-batches that the rank's stages hold at once, one counted at each stage that holds it;
        ``Simulation.peak`` is in the unit of ``activation``, by default one micro-batch on all stages of a rank.
        """
    @classmethod
    def from_json(cls, /, text: str) -> PipelineSchedule:
        """
        Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no schedule.
        """
    @classmethod
    def from_text(cls, /, text: str) -> PipelineSchedule:
        """
        Reads exactly what ``to_text`` wrote; anything more or less is a ``PlanError`` naming its line and column.
        """
    @classmethod
    def from_torch_csv(cls, /, text: str, *, name: str = "torch") -> PipelineSchedule:
        """
        Reads the CSV of ``torch.distributed.pipelining``, with or without communication.

        Torch runs the parts of an overlapped pair one after the other, so the schedule has ``gating`` ``"own"``.

        Raises ``PlanError`` naming the line and column of the first fault.
        """
    @property
    def gating(self, /) -> str:
        """
        When the parts of a composite may start: ``"all"`` inputs are there, or each part's ``"own"``.
        """
    @property
    def is_lowered(self, /) -> bool:
        """
        Whether the programs hold communication.
        """
    def lower(
        self,
        /,
        *,
        zero_stage: SupportsIndex | None = None,
        reduce: str = "once",
        optimizer: str = "absent",
        tied: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]] = ...,
        receives_ahead: SupportsIndex | None = None,
        max_unsharded: SupportsIndex = ...,
        costs: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> PipelineSchedule:
        """
        Adds communication, and what sharding and optimizer need, to a schedule of compute actions.

        ``zero_stage`` (0 to 3) adds reductions of gradients, at 3 also gathers of parameters; ``None`` neither.
        ``reduce`` is ``"once"`` behind a stage's last weight gradient or ``"per-microbatch"`` (at stages 2 and 3).
        ``optimizer`` is ``"absent"``, ``"barrier"`` (behind all gradients of the rank) or ``"post-validation"`` (each
        stage as soon as its gradients are reduced). ``tied`` has groups of stages that share weights.
        ``receives_ahead`` bounds the receives of a stage and direction that are posted and not yet used (``None``: 2,
        or as many as the programs need if those are more), ``max_unsharded`` the stages that a rank gathers at once.

        ``costs``, spelled as for ``pipeline_schedule``, are what a run takes: each receive is posted when its message
        leaves, so at these costs the lowered programs take no longer than the schedule itself, as far as the receives
        ahead cover the latency; and never longer than without ``costs``. By default every computation takes the same
        time and a hop a quarter of it.

        Raises ``PlanError`` for a schedule that is lowered already or cannot be executed, for fewer receives ahead than
        it needs, and for options that do not fit each other.
        """
    @property
    def lowering(self, /) -> dict[str, Any] | None:
        """
        What the schedule was lowered for, as keyword arguments of ``lower``; ``None`` for one that is not lowered.
        """
    @property
    def name(self, /) -> str:
        """
        Name of the generator, or the user's.
        """
    @property
    def num_chains(self, /) -> int:
        """
        Copies of the model between which the micro-batches are divided: 2 for a bidirectional pipeline, else 1.
        """
    @property
    def num_chunks(self, /) -> int:
        """
        The most stages that one micro-batch crosses on one rank.
        """
    @property
    def num_microbatches(self, /) -> int:
        """
        Micro-batches of one step.
        """
    @property
    def num_ranks(self, /) -> int:
        """
        Number of ranks.
        """
    @property
    def num_slices(self, /) -> int:
        """
        Slices into which a sequence is cut (``seq-1f1b``); 1 elsewhere.
        """
    @property
    def num_stages(self, /) -> int:
        """
        Number of stages over all chains.
        """
    @property
    def placement(self, /) -> list[int]:
        """
        The rank of every stage.
        """
    def program(self, /, rank: SupportsIndex) -> list[Action]:
        """
        The actions of one rank, in their order. Raises ``PlanError`` for a rank out of range.
        """
    def simulate(
        self,
        /,
        forward: float | Iterable[float],
        input_grad: float | Iterable[float],
        weight_grad: float | Iterable[float],
        hop: SupportsFloat | SupportsIndex = ...,
        activation: float | Iterable[float] = ...,
        stash: float | Iterable[float] | None = None,
        *,
        fused_backward: float | Iterable[float] | None = None,
        latency: dict[tuple[SupportsIndex, SupportsIndex], SupportsFloat | SupportsIndex] | None = None,
        message: float | Iterable[float] | None = None,
        bandwidth: SupportsFloat | SupportsIndex | None = None,
        overlap: bool = True,
        composite: SupportsFloat | SupportsIndex = ...,
    ) -> Simulation:
        """
        Simulates the programs and says when everything runs, what is idle and what is held.

        A cost or size is a number, per rank and micro-batch (the stages of a rank share it evenly), or a list with
        one entry per stage. Times are ``forward``, ``input_grad`` and ``weight_grad``; a whole backward takes
        ``fused_backward``, or the sum of the two gradients. ``hop`` is the latency between two ranks. ``activation`` is
        held from the forward to the input gradient (or the whole backward), ``stash`` from there to the weight gradient
        (``None``: the same).

        Links may be described more closely: ``latency`` of single edges ``{(sender, receiver): time}``, the size of
        each stage's output in ``message`` (or of all of them) with the one ``bandwidth`` of all edges (neither goes
        without the other), ``overlap=False`` where a rank waits for each message that it sends or receives. A message
        is what one forward sends: with sequence slices (``seq-1f1b``) that of one slice, whereas times, activations and
        stashes are of whole micro-batches. ``composite`` scales the time of a composite against the sum of its parts.

        Raises ``PlanError`` for costs that do not fit or whose sum no double can hold, and for programs that cannot go
        on.
        """
    def stages(self, /, rank: SupportsIndex) -> list[int]:
        """
        The stages of one rank, ascending. Raises ``PlanError`` for a rank out of range.
        """
    def to_json(self, /) -> str:
        """
        The schedule as a compact JSON document, which ``from_json`` and ``first_difference`` read.
        """
    def to_text(self, /) -> str:
        """
        The schedule as text for people and files: a header, then one line a rank. ``from_text`` reads it.
        """
    def to_torch_csv(self, /, *, waits: bool = True) -> str:
        """
        The schedule as the CSV of ``torch.distributed.pipelining``, which its ``_load_csv`` reads.

        Torch from 2.15 on ``waits`` for sends and reductions in the file; for torch before, pass ``waits=False``.

        Raises ``PlanError`` for what torch has no form for: two chains, sequence slices, forward-only programs, tied
        reductions and optimizer steps.
        """
    def with_programs(self, /, programs: Iterable[Iterable[Action | str]]) -> PipelineSchedule:
        """
        The same schedule with other programs: one list of actions (or of their texts) for each rank.

        Raises ``PlanError`` where an action is out of range.
        """

@final
class PrefetchCoordinator:
    """
    Answers the hooks of a running step: start these gathers, wait for this one, release those.

    The first step of a kind is recorded, and each use gathers its unit. From then on steps follow the plan of that
    trace. A use that the plan does not have next departs from it: uses left out are passed over, a use too many is
    gathered on demand, and the plan goes on where it meets the step again. What departed is planned anew for the next
    step.

    Whatever the hooks do, a unit is started only while it is away, waited for before it is used, and released once, and
    gathered units never take more than the budget. Ranks with the same hooks run the same gathers in the same order.
    Units are counted from 0. A unit is whatever is gathered as one; a hook that needs several enters each.

    Hooks obey an answer in this order: release (after waiting, if the gather is still under way), start, wait.

    ``units`` are ``(name, nbytes)``; the other arguments are those of ``prefetch``, so without any bound all units are
    gathered as a planned step begins. Raises ``PlanError`` for a unit
    larger than the budget and for numbers out of range.
    """
    def __new__(
        cls,
        /,
        units: Iterable[tuple[str, int]],
        budget: SupportsIndex | None = None,
        *,
        objective: str = "time",
        prefetch_nbytes: SupportsIndex | None = None,
        max_live_nbytes: SupportsIndex | None = None,
        max_reuse_nbytes: SupportsIndex | None = None,
        persistence_nbytes: SupportsIndex = ...,
    ) -> PrefetchCoordinator: ...
    def __repr__(self, /) -> str: ...
    def begin(self, /, kind: str = "train") -> tuple[list[int], list[int]]:
        """
        A step begins; gives ``(release, start)``. Steps of one ``kind``, such as ``"train"`` and ``"eval"``, share a
        plan. A step that is still running ends here.
        """
    def end(self, /) -> list[int]:
        """
        The step is over: plans it for the next of its kind, unless its plan is known, and gives the units to release,
        which are all that are left.
        """
    def enter(self, /, unit: SupportsIndex, phase: str) -> tuple[list[int], list[int], bool]:
        """
        A use of ``unit`` in ``"forward"`` or ``"backward"`` begins; gives ``(release, start, wait)``: units to release,
        units whose gathers to start, and whether to wait for the gather of this one.

        Raises ``PlanError``, and changes nothing, if the unit does not fit into the budget beside those in use.
        """
    @property
    def last_departure(self, /) -> str | None:
        """
        Where the last step that departed first did so, in words.
        """
    def leave(self, /, unit: SupportsIndex, phase: str) -> list[int]:
        """
        The use of ``unit`` in this phase that began last ends; gives the units to release.
        """
    @property
    def live(self, /) -> int:
        """
        Bytes that are gathered or on their way now.
        """
    @property
    def num_departures(self, /) -> int:
        """
        How many steps departed from their plan.
        """
    def plan(self, /, kind: str = "train") -> PrefetchPlan | None:
        """
        The plan that the next step of this kind follows; ``None`` if there is none yet.
        """
    def reset(self, /) -> list[int]:
        """
        The step has failed: as ``end``, but what it recorded is forgotten.
        """
    @property
    def units(self, /) -> list[tuple[str, int]]:
        """
        The units as ``(name, nbytes)``.
        """

@final
class PrefetchPlan:
    """
    Which gathers start at which use of a step, and which units are released after which.

    Made by ``prefetch``. Units are named, uses are counted from 0, times are in seconds (or whatever unit the trace's
    are in). Frozen, comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    @property
    def budget(self, /) -> int | None:
        """
        The budget in bytes; ``None`` for no limit.
        """
    @property
    def bytes_gathered(self, /) -> int:
        """
        Bytes of all gathers.
        """
    @property
    def bytes_on_demand(self, /) -> int:
        """
        Bytes of all gathers if each use gathered its unit and released it after.
        """
    def digest(self, /) -> str:
        """
        SHA-256 of the plan as 64 hexadecimal digits: equal plans have equal digests, on every platform.
        """
    def explain(self, /) -> str:
        """
        The plan as an aligned text table, one line a use; a long one shows both ends.
        """
    @property
    def exposed(self, /) -> float:
        """
        All stalls together: the part of the gathers that computation does not hide.
        """
    @property
    def exposed_on_demand(self, /) -> float:
        """
        All stalls if each use gathered its unit and released it after.
        """
    @classmethod
    def from_json(cls, /, text: str) -> PrefetchPlan:
        """
        Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no plan or contradicts itself.
        """
    @property
    def gathers(self, /) -> list[tuple[str, int, int]]:
        """
        All gathers as ``(unit, start, need)`` in the order in which they start: with the use ``start``, complete when
        the use ``need`` begins.
        """
    @property
    def kept(self, /) -> list[bool]:
        """
        For each use whether its unit stays gathered after it, until its next use.
        """
    @property
    def live(self, /) -> list[int]:
        """
        For each use the bytes that are gathered or on their way while it lasts.
        """
    @property
    def makespan(self, /) -> float:
        """
        Seconds from the first gather to the end of the last use.
        """
    @property
    def objective(self, /) -> str:
        """
        What the plan makes small: ``"bytes"`` or ``"time"``.
        """
    @property
    def peak(self, /) -> int:
        """
        The most bytes that are gathered or on their way at one moment.
        """
    @property
    def stalls(self, /) -> list[float]:
        """
        For each use the seconds for which it waits for its unit.
        """
    def to_json(self, /) -> str:
        """
        The plan as a compact JSON document, which ``from_json`` and ``first_difference`` read.
        """
    @property
    def trace(self, /) -> list[tuple[str, str, float, int]]:
        """
        The uses as ``(unit, phase, seconds, span)``, in order; see ``prefetch``.
        """
    @property
    def units(self, /) -> list[tuple[str, int]]:
        """
        The units as ``(name, nbytes)``.
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
class Simulation:
    """
    When the actions of a schedule run, what is idle and what is held. Made by ``PipelineSchedule.simulate``.

    Times and sizes are in the units of the costs. Frozen, comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[()]]:
        """
        A copy simulates again, which gives the same numbers.
        """
    def __repr__(self, /) -> str: ...
    @property
    def bubble_makespan(self, /) -> float:
        """
        The idle part of the ranks' time if each takes the makespan, 0 to 1.
        """
    @property
    def bubble_span(self, /) -> float:
        """
        The idle part of the ranks' time if each takes the span, 0 to 1: the bubble rate of the zero-bubble papers.
        """
    @property
    def busy(self, /) -> list[float]:
        """
        The time that each rank computes.
        """
    def intervals(self, /, rank: SupportsIndex) -> list[tuple[float, float]]:
        """
        ``(start, end)`` of each action of a rank, in the order of its program. Raises ``PlanError`` for a rank out of
        range.
        """
    @property
    def makespan(self, /) -> float:
        """
        The last end over all ranks, from time 0: what a step with a barrier costs.
        """
    def memory(self, /, rank: SupportsIndex) -> list[tuple[float, float]]:
        """
        What a rank holds over time: ``(time, held)``, each until the next. Raises ``PlanError`` for a rank out of
        range.
        """
    @property
    def peak(self, /) -> list[float]:
        """
        The most that each rank holds.
        """
    @property
    def span(self, /) -> float:
        """
        The longest time over the ranks from a rank's first start to its last end.
        """
    def to_ascii(self, /, *, max_width: SupportsIndex = ...) -> str:
        """
        A grid as text: ranks are rows, time goes to the right, to scale.

        A grid of more than ``max_width`` columns goes on in further bands of lines; of one too long for labels the
        start is shown. Raises ``PlanError`` for a negative width.
        """
    def to_perfetto(self, /, *, microseconds: SupportsFloat | SupportsIndex = ...) -> str:
        """
        A trace that <https://ui.perfetto.dev> opens (JSON of Chrome's trace events): one track per rank, arrows for
        messages, a counter for memory. One unit of time is shown as ``microseconds``.

        Raises ``PlanError`` for microseconds that are not above 0, or so many that no double holds the last time.
        """
    def to_svg(self, /) -> str:
        """
        A self-contained SVG picture: the grid, and below it what each rank holds.
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

@final
class Synthesis:
    """
    A schedule that was made for given costs, and how far it can be from the best. Made by ``synthesize``.

    Frozen, comparable, hashable and picklable.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[PipelineSchedule, float, float, float, str]]: ...
    def __repr__(self, /) -> str: ...
    @staticmethod
    def _restored(
        schedule: PipelineSchedule,
        value: SupportsFloat | SupportsIndex,
        lower_bound: SupportsFloat | SupportsIndex,
        gap: SupportsFloat | SupportsIndex,
        found_by: str,
    ) -> Synthesis:
        """
        What pickle restores.
        """
    @property
    def found_by(self, /) -> str:
        """
        What found it: the name of a schedule, ``one-by-one`` (one micro-batch after another), ``breadth-first`` (all
        forwards stage by stage, then all backwards), ``list-scheduling`` or ``local-search``.
        """
    @property
    def gap(self, /) -> float:
        """
        How much longer the schedule takes than the bound, as a part of the bound: 0.03 is 3%.
        """
    @property
    def lower_bound(self, /) -> float:
        """
        No schedule on this placement takes less under these costs and this cap.
        """
    @property
    def schedule(self, /) -> PipelineSchedule:
        """
        The best schedule found.
        """
    @property
    def value(self, /) -> float:
        """
        What the schedule takes: its makespan or span, as asked for.
        """

def abandon_checkpoint(run: str | PathLike[str], tag: str) -> None:
    """
    Removes that folder, after a save that failed.
    """

def begin_checkpoint(run: str | PathLike[str], tag: str) -> Path:
    """
    Makes the empty folder in which the files of a checkpoint are written. Returns its path.
    """

def check_boundaries(boundaries: SupportsGetItem[int, SupportsIndex], num_layers: SupportsIndex) -> list[int]:
    """
    Checks boundaries that someone chose by hand, and gives them back: from 0 to ``num_layers``, each beyond the one
    before.

    Raises ``PlanError`` naming the first boundary that is wrong.
    """

def check_host_memory(what: str, nbytes: SupportsIndex) -> None:
    """
    Checks that ``nbytes`` of host memory can be had now, and takes none. ``what`` begins the message.

    Raises ``StorageError`` with the arithmetic when the machine or a container has less.
    """

def checkpoint_aside(run: str | PathLike[str], tag: str) -> Path:
    """
    The folder that ``begin_checkpoint`` makes for this tag.
    """

def choose_checkpoint(place: str | PathLike[str], tag: str | None = None) -> tuple[Path, list[str]]:
    """
    The checkpoint that a path means: ``(its folder, what is worth telling)``.

    Raises ``CheckpointError`` if there is none that is complete.
    """

def commit_checkpoint(
    run: str | PathLike[str],
    tag: str,
    index: str,
    *,
    is_latest: bool,
    keep_last: SupportsIndex | None = None,
    keep_every: SupportsIndex | None = None,
) -> tuple[Path, list[str]]:
    """
    Makes a checkpoint of the files in that folder and the index, and lets ``latest`` name it if ``is_latest``. Then
    removes older ones: all but the ``keep_last`` newest, and those whose number is a multiple of ``keep_every``.

    Returns its path and the tags that were removed.
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

def dequantize(
    codes: SupportsGetItem[int, Any],
    scales: SupportsGetItem[int, Any],
    targets: SupportsGetItem[int, Any],
    *,
    bits: SupportsIndex,
    add: bool = False,
    num_threads: SupportsIndex = 1,
) -> None:
    """
    Reads codes back: each times the scale of its block, into the targets, or added to what these hold.

    Tensors are those of ``quantize``; the targets are fp32, bf16 or fp16. Raises ``ConfigError`` for others.
    """

def evaluation_schedule(
    placement: SupportsGetItem[int, SupportsIndex], num_microbatches: SupportsIndex, *, num_chains: SupportsIndex = ...
) -> PipelineSchedule:
    """
    Builds the forward-only program of a placement, for evaluation.

    ``placement`` is the rank of every stage, in ``num_chains`` copies of the model. Any number of micro-batches works.
    Raises ``PlanError`` for a placement that leaves a rank without a stage.
    """

def first_difference(first: str, second: str) -> str | None:
    """
    Names the first difference between two documents that ``to_json`` wrote; ``None`` when they are equal.

    The answer reads like ``unit 3 "layers.3", group 0, entry 1 "mlp.weight", numel: 4096 in the first, 4100 in the
    second``. Raises ``PlanError`` if a text is not JSON.
    """

def from_megatron_layout(text: str) -> tuple[list[str], list[int]]:
    """
    Reads Megatron's layout string, such as ``"Et*3|(tt|)*29,m|L"``: the layers and the boundaries of their stages.

    Layers are ``"embedding"``, ``"decoder"``, ``"mtp"`` and ``"loss"``; boundaries are as those of
    ``partition_layers``. Raises ``PlanError`` naming the character at which the string goes wrong.
    """

def groups(
    params: Iterable[tuple[str, int, str, bool]],
    num_shards: SupportsIndex,
    *,
    segment_nbytes: SupportsIndex | None = None,
    alignment: SupportsIndex = ...,
) -> list[ShardLayout]:
    """
    Splits parameters into layouts of one dtype and one trainability each, and those into segments.

    ``params`` are ``(name, numel, dtype, trainable)``. Layouts stand in the order of their first parameter, and inside
    one the order is kept. With ``segment_nbytes`` a layout ends before the parameter that would carry it past so many
    bytes (padding at the end not counted); a larger parameter gets a layout of its own and is never split.

    Raises ``PlanError`` for duplicate names and numbers out of range.
    """

def latest_checkpoint(run: str | PathLike[str]) -> str | None:
    """
    The tag in ``latest``; None if there is none.
    """

def list_checkpoints(run: str | PathLike[str]) -> list[tuple[str, Path, int | None, str | None]]:
    """
    All checkpoints of a run as ``(tag, path, number or None, what is wrong or None)``, the oldest first.
    """

def partition_layers(
    weights: SupportsGetItem[int, SupportsFloat | SupportsIndex],
    num_parts: SupportsIndex,
    *,
    cut_nbytes: SupportsGetItem[int, SupportsIndex] | None = None,
) -> list[int]:
    """
    Cuts layers into consecutive parts whose heaviest is as light as can be.

    ``weights`` is the weight of every layer: parameters, floating-point operations, measured times. The answer are
    ``num_parts + 1`` boundaries: part ``i`` holds the layers ``boundaries[i]`` up to ``boundaries[i + 1]``. No part is
    empty. Ties are broken by the bytes that cross the cuts, where ``cut_nbytes`` gives them for the place behind each
    layer but the last, and then by how even the parts are.

    Raises ``PlanError`` for fewer layers than parts, and for weights that are negative or not finite.
    """

def partition_marked(
    marked: SupportsGetItem[int, bool],
    num_parts: SupportsIndex,
    *,
    cut_nbytes: SupportsGetItem[int, SupportsIndex] | None = None,
) -> list[int]:
    """
    Spreads marked layers evenly over consecutive parts, as ``partition_layers`` does where a marked layer weighs 1 and
    any other nothing.

    Raises ``PlanError`` for fewer layers than parts, and if no layer is marked.
    """

def partition_uniform(num_layers: SupportsIndex, num_parts: SupportsIndex) -> list[int]:
    """
    Cuts layers into consecutive parts whose lengths differ by at most one, the longer ones at the end.

    Raises ``PlanError`` for fewer layers than parts.
    """

def pipeline_schedule(
    name: str,
    num_ranks: SupportsIndex,
    num_microbatches: SupportsIndex,
    num_chunks: SupportsIndex | None = None,
    costs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> PipelineSchedule:
    """
    Builds a named schedule.

    ``name`` is one of ``1f1b``, ``gpipe``, ``eager-1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``, ``zb-h2``,
    ``interleaved-zb``, ``zb-v``, ``v-half``, ``v-min``, ``dualpipe``, ``dualpipe-v`` and ``seq-1f1b``. Any number of
    micro-batches works, also fewer than ranks. ``num_chunks`` is the number of stages on each rank (for ``seq-1f1b``
    the number of slices of a sequence); ``None`` is the schedule's own. ``costs`` guide the V schedules: ``(forward,
    input_grad, weight_grad)``, or with ``hop`` as a fourth, or a mapping of the names that ``simulate`` takes. Times
    that a mapping leaves out are 1, ``hop`` is 0, and the sizes are as in ``simulate``.

    Raises ``PlanError`` for an unknown name and for counts or costs that the schedule cannot have.
    """

def place_tiles(
    tiles: SupportsGetItem[int, tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex]]],
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """
    Lays tiles out in a file: each is ``(numel, itemsizes)``, the bytes of an element of each of its parts.

    The answer are ``(offset, nbytes, parts)`` of each tile, ``parts`` being the byte of the tile where each part
    starts, and the bytes of the file. Tiles start at multiples of 4096 bytes, parts at multiples of 512.

    Raises ``PlanError`` for more than 2^63 - 1 bytes.
    """

def plan_shards(
    units: Iterable[tuple[str, Iterable[tuple[str, int, str, bool]]]],
    num_shards: SupportsIndex,
    *,
    segment_nbytes: SupportsIndex | None = None,
    alignment: SupportsIndex = ...,
) -> ShardPlan:
    """
    Plans the shards of a model that is cut into wrap units.

    ``units`` are ``(unit_name, params)`` in the order of use, ``params`` as in ``groups``, which is applied to each
    unit. A parameter belongs to exactly one unit.

    Raises ``PlanError`` for a name in two units and for whatever ``groups`` refuses.
    """

def plan_swap(
    order: SupportsGetItem[int, SupportsIndex], residents: SupportsGetItem[int, SupportsIndex | None]
) -> tuple[list[tuple[str, int, int]], list[int | None]]:
    """
    Plans a step that updates the tiles ``order`` one after the other, while others come from a disk and go to it.

    ``residents`` has the tile in each slot of host memory before the step, or ``None``; those are newer than what is on
    the disk. The answer are the actions ``(what, tile, slot)`` in order, ``what`` being ``"read"``, ``"update"`` or
    ``"write"``, and the residents after the step. A read waits for the write from its slot, an update for its read.
    Steps that go through their tiles in opposite directions by turns move the fewest bytes.

    Raises ``PlanError`` for no slot, and for a tile that is given twice.
    """

def prefetch(
    trace: Iterable[tuple[str | int, str] | tuple[str | int, str, float] | tuple[str | int, str, float, int]],
    sizes: Mapping[str, int] | Mapping[int, int] | Iterable[int],
    budget: SupportsIndex | None = None,
    *,
    objective: str = "bytes",
    latency: SupportsFloat | SupportsIndex = ...,
    bandwidth: SupportsFloat | SupportsIndex | None = None,
    prefetch_nbytes: SupportsIndex | None = None,
    max_live_nbytes: SupportsIndex | None = None,
    max_reuse_nbytes: SupportsIndex | None = None,
    persistence_nbytes: SupportsIndex = ...,
) -> PrefetchPlan:
    """
    Plans the gathers and releases of a step.

    ``trace`` holds the uses in order, each as ``(unit, phase)``, ``(unit, phase, seconds)`` or
    ``(unit, phase, seconds, span)``: a name or number, ``"forward"`` or ``"backward"``, the time from its start to the
    start of the next use (default 1), and over how many uses it lasts, itself included (default 1; more where other
    units are used inside it). ``sizes`` gives the bytes of each unit: a mapping, or a list where units are numbers.
    ``budget`` bounds the bytes of all gathered units, in use or not; without one (and without the settings below) all
    units are gathered as the step begins, and kept.

    Units are kept between two uses where that saves most bytes. All others are gathered as early as the budget permits,
    in the order of need. ``objective="time"`` keeps less where gathering ahead hides more.

    ``latency`` (seconds) and ``bandwidth`` (bytes a second) are what a gather costs. Without a bandwidth, gathering a
    unit of average size takes as long as an average use. They decide about the times that the plan predicts, and with
    ``objective="time"`` about the plan.

    DeepSpeed's settings, in bytes: ``prefetch_nbytes`` (``stage3_prefetch_bucket_size``: no further gather starts while
    so much is gathered ahead; 0 for none ahead), ``max_live_nbytes`` (``stage3_max_live_parameters``: as the budget,
    but what is in use may exceed it), ``max_reuse_nbytes`` (``stage3_max_reuse_distance``: keep a unit only if the uses
    in between are of no more bytes) and ``persistence_nbytes`` (``stage3_param_persistence_threshold``: keep units up
    to this size to the end of the step).

    Raises ``PlanError`` if the units in use at one moment exceed the budget (the message names the smallest workable
    one), for a unit without a size and for numbers out of range.
    """

def quantization_block() -> int:
    """
    Numbers that share a scale.
    """

def quantize(
    sources: SupportsGetItem[int, Any],
    codes: SupportsGetItem[int, Any],
    scales: SupportsGetItem[int, Any],
    *,
    bits: SupportsIndex,
    residuals: SupportsGetItem[int, Any] | None = None,
    num_threads: SupportsIndex = 1,
) -> None:
    """
    Quantises each source into codes of ``bits`` bits (8, or 4: two in a byte) and one fp32 scale per block.

    All are contiguous CPU tensors: sources fp32, bf16 or fp16, codes uint8, scales fp32. A bf16 residual is added to
    its source first and becomes what rounding took away. What is written shares no memory with anything else here.
    Raises ``ConfigError`` for other tensors.
    """

def reshard(old: ShardLayout, new: ShardLayout) -> list[tuple[int, int, int, int, int]]:
    """
    The copies that fill the shards of ``new`` from those of ``old``, ordered by where they go.

    Each is ``(src_rank, src_offset, dst_rank, dst_offset, numel)``, in elements. Every element of every parameter is
    copied once, and no padding. The layouts may differ in the number of shards, in the order of the parameters and in
    the dtype.

    Raises ``PlanError`` if they do not hold the same parameters with the same numbers of elements.
    """

def schedule_names() -> list[str]:
    """
    The names that ``pipeline_schedule`` takes.
    """

def shard_layout(
    params: Iterable[tuple[str, int, str, bool]], num_shards: SupportsIndex, *, alignment: SupportsIndex = ...
) -> ShardLayout:
    """
    Lays parameters of one dtype and one trainability out in one flat buffer of equal shards.

    ``params`` are ``(name, numel, dtype, trainable)``. They keep their order, and each starts 16-byte aligned; the
    buffer is padded at its end to ``num_shards * alignment`` bytes, so all shards are equal and aligned. ``alignment``
    is a power of two of at least 16.

    Raises ``PlanError`` for mixed dtypes or trainabilities (use ``groups``), duplicate names and numbers out of range.
    """

def share_writes(
    held: SupportsGetItem[int, SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]],
    itemsizes: SupportsGetItem[int, SupportsIndex],
) -> list[list[tuple[int, int, int]]]:
    """
    Divides the writing of tensors that several ranks hold: every element once, about as many bytes on every rank.

    ``held[rank]`` are the pieces ``(tensor, start, stop)`` of a rank, ranges of flattened tensors; ``itemsizes`` are
    the bytes of an element of each tensor. Returns for each rank the parts ``(piece, start, stop)`` that it writes,
    ``piece`` being a place in its own list, in the order of that list.

    Raises ``PlanError`` for pieces that end before they begin, or are of no tensor.
    """

def sums_of_squares(tensors: SupportsGetItem[int, Any], *, num_threads: SupportsIndex = 1) -> list[float]:
    """
    The sum of squares of each tensor (fp32, bf16 or fp16, on the CPU), in fp64.

    Does not depend on ``num_threads``. It is inf or NaN exactly where an element of the tensor is.
    """

def synthesize(
    num_ranks: SupportsIndex,
    num_microbatches: SupportsIndex,
    forward: float | Iterable[float],
    input_grad: float | Iterable[float],
    weight_grad: float | Iterable[float],
    hop: SupportsFloat | SupportsIndex = ...,
    activation: float | Iterable[float] = ...,
    stash: float | Iterable[float] | None = None,
    memory_cap: float | Sequence[float] | None = None,
    objective: str = "makespan",
    fused_backward: float | Iterable[float] | None = None,
    *,
    placement: SupportsGetItem[int, SupportsIndex] | None = None,
) -> Synthesis:
    """
    Makes a schedule for given costs, under a memory cap.

    Costs and sizes are as in ``PipelineSchedule.simulate``. ``memory_cap`` is the most that a rank may hold (a list:
    each rank), in the unit of ``activation``; ``objective`` is ``"makespan"`` or ``"span"``. ``fused_backward`` is what
    a whole backward takes in one piece (``None``: as much as its gradients in a row); the schedule fuses those for
    which it pays, in time or in memory, since one piece needs no stash. ``placement`` is the rank of every stage, by
    default one stage a rank.

    The result is never worse than a named schedule on that placement under the same cap, comes with a certified lower
    bound, and is the same on every machine; planning again after a profile is one call.

    Raises ``PlanError`` for costs that do not fit and for a cap under which a rank cannot hold one micro-batch.
    """

def to_megatron_layout(layers: SupportsGetItem[int, str], boundaries: SupportsGetItem[int, SupportsIndex]) -> str:
    """
    Writes the layout string that Megatron's ``--pipeline-model-parallel-layout`` takes.

    Layers and boundaries are as ``from_megatron_layout`` gives them. Raises ``PlanError`` for an unknown layer, an
    order that Megatron refuses, and boundaries that are none.
    """

def verify_checkpoint(folder: str | PathLike[str]) -> list[tuple[Path, int, int, str]]:
    """
    Reads every byte of a checkpoint. Returns the damages as ``(file, first byte, byte after the last, what)``.
    """
