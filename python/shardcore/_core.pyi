"""
The Rust core of shardcore. Import its names from the rooms, such as ``shardcore.plan``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem

__all__ = [
    "Action",
    "PipelineSchedule",
    "ShardLayout",
    "ShardPlan",
    "Simulation",
    "Synthesis",
    "check_boundaries",
    "evaluation_schedule",
    "first_difference",
    "from_megatron_layout",
    "groups",
    "partition_layers",
    "partition_marked",
    "partition_uniform",
    "pipeline_schedule",
    "plan_shards",
    "schedule_names",
    "shard_layout",
    "synthesize",
    "to_megatron_layout",
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
        slot: SupportsIndex = 0,
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
class PipelineSchedule:
    """
    What each rank of a pipeline does, in which order.

    Made by ``pipeline_schedule``, ``evaluation_schedule``, ``synthesize``, the ``from_...`` methods, or from programs
    of your own: one list of actions (or of their texts, ``["0F0", "0B0"]``) for each rank. ``placement`` is the rank
    of every stage. Micro-batches of a step, slices of a sequence and chains of a bidirectional pipeline are counted by
    ``num_microbatches``, ``num_slices`` and ``num_chains``. ``gating`` says when the parts of a composite start:
    ``"all"`` inputs are there, or each part's ``"own"``. ``comm`` is the strictest communication under which the
    lowered program is declared to run. Programs with more than compute are lowered; ``lowering`` is what for, as the
    property of that name gives it (``None``: communication only).

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
        programs: SupportsGetItem[int, SupportsGetItem[int, Action | str]],
        placement: SupportsGetItem[int, SupportsIndex],
        num_microbatches: SupportsIndex,
        *,
        name: str = "custom",
        num_slices: SupportsIndex = 1,
        num_chains: SupportsIndex = 1,
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
        memory_cap: SupportsFloat | SupportsIndex | None = None,
        activation: float | Iterable[float] = ...,
        stash: float | Iterable[float] | None = None,
        *,
        capacity: SupportsIndex | None = None,
    ) -> None:
        """
        Checks that the programs can be executed; on a fault the error shows the grid with the failing cell marked.

        Always: each action is there once, on its rank, behind what it needs, and no ranks wait for each other.
        ``comm`` adds communication under one way to deliver messages: ``"buffered"`` (a send never waits),
        ``"directed"`` (one channel per directed edge), ``"pair-fifo"`` (one per pair of ranks), ``"one-fifo"`` (one
        queue per rank), ``"blocking"`` (each message waits for its partner), or ``"batched"`` (what stands between two
        computations is posted together). ``capacity`` bounds the messages under way on a directed edge instead. A
        schedule that is not lowered is lowered for that. ``None`` is what the schedule declares.

        With ``memory_cap`` no rank may hold more than that, where ``activation`` and ``stash`` are as in ``simulate``.

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
        receives_ahead: SupportsIndex = 2,
        max_unsharded: SupportsIndex = 2,
    ) -> PipelineSchedule:
        """
        Adds communication, and what sharding and optimizer need, to a schedule of compute actions.

        ``zero_stage`` (0 to 3) adds reductions of gradients, at 3 also gathers of parameters; ``None`` neither.
        ``reduce`` is ``"once"`` behind a stage's last weight gradient or ``"per-microbatch"`` (at stages 2 and 3).
        ``optimizer`` is ``"absent"``, ``"barrier"`` (behind all gradients of the rank) or ``"post-validation"`` (each
        stage as soon as its gradients are reduced). ``tied`` has groups of stages that share weights.
        ``receives_ahead`` bounds the receives of a stage and direction that are posted and not yet used,
        ``max_unsharded`` the stages that a rank gathers at once.

        Raises ``PlanError`` for a schedule that is lowered already or cannot be executed, and for options that do not
        fit each other.
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
        hop: SupportsFloat | SupportsIndex = 0.0,
        activation: float | Iterable[float] = ...,
        stash: float | Iterable[float] | None = None,
        *,
        fused_backward: float | Iterable[float] | None = None,
        latency: dict[tuple[SupportsIndex, SupportsIndex], SupportsFloat | SupportsIndex] | None = None,
        message: SupportsGetItem[int, SupportsFloat | SupportsIndex] | None = None,
        bandwidth: SupportsFloat | SupportsIndex | None = None,
        overlap: bool = True,
        composite: SupportsFloat | SupportsIndex = 1.0,
    ) -> Simulation:
        """
        Simulates the programs and says when everything runs, what is idle and what is held.

        A cost or size is a number, per rank and micro-batch (a chunk takes ``1 / num_chunks`` of it), or a list with
        one entry per stage. Times are ``forward``, ``input_grad`` and ``weight_grad``; a whole backward takes
        ``fused_backward``, or the sum of the two gradients. ``hop`` is the latency between two ranks. ``activation`` is
        held from the forward to the input gradient (or the whole backward), ``stash`` from there to the weight gradient
        (``None``: the same).

        Links may be described more closely: ``latency`` of single edges ``{(sender, receiver): time}``, the size of
        each stage's output in ``message`` with the ``bandwidth`` of an edge, ``overlap=False`` where a rank waits for
        its messages. ``composite`` scales the time of a composite against the sum of its parts.

        Raises ``PlanError`` for costs that do not fit, and for programs that cannot go on.
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
    def to_torch_csv(self, /) -> str:
        """
        The schedule as the CSV of ``torch.distributed.pipelining``, which its ``_load_csv`` reads.

        Raises ``PlanError`` for what torch has no form for: two chains, sequence slices, forward-only programs, tied
        reductions and optimizer steps.
        """
    def with_programs(self, /, programs: SupportsGetItem[int, SupportsGetItem[int, Action | str]]) -> PipelineSchedule:
        """
        The same schedule with other programs: one list of actions (or of their texts) for each rank.

        Raises ``PlanError`` where an action is out of range.
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

    Times and sizes are in the units of the costs.
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
    def to_ascii(self, /, *, max_width: SupportsIndex = 160) -> str:
        """
        A grid as text: ranks are rows, time goes to the right, to scale. At most ``max_width`` columns are shown.
        """
    def to_perfetto(self, /, *, microseconds: SupportsFloat | SupportsIndex = 1000.0) -> str:
        """
        A trace that <https://ui.perfetto.dev> opens (JSON of Chrome's trace events): one track per rank, arrows for
        messages, a counter for memory. One unit of time is shown as ``microseconds``.
        """
    def to_svg(self, /) -> str:
        """
        A self-contained SVG picture: the grid, and below it what each rank holds.
        """

@final
class Synthesis:
    """
    A schedule that was made for given costs, and how far it can be from the best. Made by ``synthesize``.
    """
    def __repr__(self, /) -> str: ...
    @property
    def found_by(self, /) -> str:
        """
        What found it: the name of a schedule, ``list-scheduling`` or ``local-search``.
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

def check_boundaries(boundaries: SupportsGetItem[int, SupportsIndex], num_layers: SupportsIndex) -> list[int]:
    """
    Checks boundaries that someone chose by hand, and gives them back: from 0 to ``num_layers``, each beyond the one
    before.

    Raises ``PlanError`` naming the first boundary that is wrong.
    """

def evaluation_schedule(
    placement: SupportsGetItem[int, SupportsIndex], num_microbatches: SupportsIndex, *, num_chains: SupportsIndex = 1
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
    alignment: SupportsIndex = 256,
) -> list[ShardLayout]:
    """
    Splits parameters into layouts of one dtype and one trainability each, and those into segments.

    ``params`` are ``(name, numel, dtype, trainable)``. Layouts stand in the order of their first parameter, and inside
    one the order is kept. With ``segment_nbytes`` a layout ends before the parameter that would carry it past so many
    bytes (padding at the end not counted); a larger parameter gets a layout of its own and is never split.

    Raises ``PlanError`` for duplicate names and numbers out of range.
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
    input_grad, weight_grad)``, or with ``hop`` as a fourth, or a mapping of the names that ``simulate`` takes.

    Raises ``PlanError`` for an unknown name and for counts or costs that the schedule cannot have.
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

def schedule_names() -> list[str]:
    """
    The names that ``pipeline_schedule`` takes.
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

def synthesize(
    num_ranks: SupportsIndex,
    num_microbatches: SupportsIndex,
    forward: float | Iterable[float],
    input_grad: float | Iterable[float],
    weight_grad: float | Iterable[float],
    hop: SupportsFloat | SupportsIndex = 0.0,
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
    a whole backward takes in one piece; the schedule then fuses those for which it pays. ``placement`` is the rank of
    every stage, by default one stage a rank.

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
