"""What the rooms ``zero``, ``optim``, ``checkpoint`` ... may know of one another.

Sibling rooms never import each other. ``zero.shard`` leaves a :class:`ShardedRoot` on the module it sharded and a
:class:`ParameterSlot` on every parameter; others find them here by the two functions at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from shardcore.mesh import Axis, Mesh

_ROOT_ATTRIBUTE = "_shardcore_root"
_SLOT_ATTRIBUTE = "_shardcore_slot"
_PIPELINE_ATTRIBUTE = "_shardcore_is_pipeline"
_PIECES_ATTRIBUTE = "_shardcore_pieces"
_CONTEXT_ATTRIBUTE = "_shardcore_context_axis"
_EXPERTS_ATTRIBUTE = "_shardcore_experts"
_SEQUENCE_ATTRIBUTE = "_shardcore_splits_sequence"

RELEASED_VERSION = 1 << 31
"""Parameters whose memory is gone for a while show autograd counts of writes from here on; see ``zero.saved``."""

_random_sources: list[RandomSource] = []


class LossScale(Protocol):
    """The factor by which a loss is multiplied before backward, and the gradients divided before the update."""

    @property
    def scale(self) -> float:
        """The factor now."""

    def update(self, *, overflow: bool) -> None:
        """A step was applied, or skipped for an overflow."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""


class ShardedGroup(Protocol):
    """The parameters of one unit that share dtype and trainability, in one flat buffer (house: ShardGroup)."""

    @property
    def index(self) -> int:
        """Its place in the plan."""

    @property
    def trainable(self) -> bool:
        """Whether its parameters take gradients."""

    @property
    def slots(self) -> Sequence[ParameterSlot]:
        """Its parameters, in the order of the flat buffer."""

    @property
    def master(self) -> torch.Tensor:
        """[shard_numel] this rank's master weights (the parameters themselves where they are not 16-bit and not
        offloaded; no elements while they rest on a disk).
        """

    @property
    def own(self) -> torch.Tensor:
        """[shard_numel] this rank's shard of the parameters, in their dtype. Where these rest on a disk, it is valid
        until another group's is asked for.
        """

    @property
    def rests_on_disk(self) -> bool:
        """Whether ``own`` rests on a disk."""

    @property
    def own_is_shown(self) -> bool:
        """Whether ``own`` is memory of the parameters themselves, so that whoever writes to these writes to it."""

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU updates the masters."""

    @property
    def has_masters(self) -> bool:
        """Whether masters are kept beside the parameters."""

    @property
    def masters_are_away(self) -> bool:
        """Whether they rest on a disk, with the states, and are here in steps only."""

    def copy_of_own(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of ``own``: a view, but a copy where it rests on a disk. Any thread may call it."""

    @property
    def num_edits(self) -> int:
        """How often masters were to be taken from ``own`` anew."""

    @property
    def grad_shard(self) -> torch.Tensor:
        """[shard_numel] this rank's reduced gradient; meaningful after ``ShardedRoot.finish_gradients``."""

    def local_range(self, slot: ParameterSlot) -> tuple[int, int, int]:
        """(start, stop, shard_offset): this rank's piece as a range of the flattened parameter."""

    def adopt_edits_if_any(self) -> None:
        """Take values that the user wrote into whole parameters into the masters."""

    @property
    def shard_axis(self) -> Axis:
        """The ranks that hold one copy of the parameters together."""

    def range_of_rank(self, slot: ParameterSlot, position: int) -> tuple[int, int, int]:
        """As ``local_range``, for the rank at this position along the shard axis."""

    def begin_load(self) -> torch.Tensor:
        """The memory [shard_numel] that a checkpoint is loaded into: masters where these are here, else ``own``."""

    def end_load(self) -> None:
        """It was filled: the parameters show it from now on. Collective over the shard axis."""

    def publish(self, *, copied: bool = False) -> None:
        """Make the updated master weights the parameters: cast (unless ``copied``: the update has), and gather where
        parameters are whole. Collective.
        """


class ShardedRoot(Protocol):
    """A sharded model: its groups and the bookkeeping of one optimizer window."""

    module: torch.nn.Module
    device: torch.device
    shard_axis: Axis
    data_axis: Axis
    skip_nonfinite: bool
    precision: Any
    offload: Any
    """Where states rest: a :class:`shardcore.offload.Offload`."""
    sums_over_tokens: bool
    num_tokens: MutableMapping[ShardedOptimizerMark, float | torch.Tensor]
    num_passes: int
    before_changes: list[Callable[[], None]]
    """Called, and forgotten, before weights or states next change: somebody is still reading them."""
    optimizers: list[weakref.ref[ShardedOptimizerMark]]

    @property
    def groups(self) -> Sequence[ShardedGroup]:
        """All groups, in the order of the plan."""

    @property
    def loss_scale(self) -> float:
        """The factor that plain backwards apply to the loss."""

    @property
    def window_correction(self) -> float:
        """By what the gradients of a partial accumulation window are multiplied; 1 for a full one."""

    def finish_gradients(self) -> list[list[bool]]:
        """Reduce what is not reduced yet; per trainable group and slot: has any rank a gradient? Collective."""

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window."""

    def clear_gradients_of(self, slots: Sequence[ParameterSlot], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters."""

    def check_here(self, *states: str, what: str) -> None:
        """Raise if one of these states was moved away by ``offload_states``."""

    def come_to_rest(self, what: str) -> None:
        """Between steps: nothing is under way or away, and masters have what was written to parameters."""

    def about_to_change(self) -> None:
        """Weights or states are about to change: let those finish who read them."""

    def live_optimizers(self) -> list[ShardedOptimizerMark]:
        """The optimizers made for this model that still exist."""

    def set_loss_scale(self, scale: LossScale) -> None:
        """Use this scale for plain ``loss.backward()`` from now on."""


class RandomSource(Protocol):
    """Random numbers beside torch's default generators, such as those of one rank of a tensor-parallel group. A
    ``torch.Generator`` is one.
    """

    def get_state(self) -> Any:
        """What :meth:`set_state` brings back."""

    def set_state(self, state: Any, /) -> object:
        """Continue from there."""


class PipelinePart(Protocol):
    """What a pipeline's module, which holds one rank's stages, tells the optimizer."""

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was made for."""

    @property
    def pipeline_axis(self) -> Axis:
        """The axis over which the stages lie."""

    num_steps: int
    """Steps taken; random numbers depend on it."""

    def tied_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of this rank that other stages hold, too, by names that are the same on all ranks."""

    def counts_in_norm(self, param: torch.nn.Parameter) -> bool:
        """Whether this rank counts the parameter in the global norm; one rank does for each."""


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """What an optimizer keeps of one parameter on this rank, or a part of that: elements [start, stop), flattened."""

    slot: ParameterSlot
    options: int
    """Number of the parameter group."""
    start: int
    stop: int
    states: dict[str, torch.dtype]
    """Names of what it keeps for each element; the master weights, under ``MASTER``, where these are not here."""
    values: dict[str, Any]
    """What is one value for all elements."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a state that is to be loaded: elements [start, stop) of the flattened parameter, into ``out``."""

    slot: ParameterSlot
    name: str
    start: int
    stop: int
    out: torch.Tensor


MASTER = "master weight"
"""The name of master weights among the states that an optimizer reads and writes for a checkpoint."""


Runs = tuple[int, int, int]
"""(first, length, stride): the elements of a flattened tensor in runs of ``length`` every ``stride`` from ``first``."""


class TensorPieces(Protocol):
    """Which part of a parameter this rank of the tensor axis holds; a replicated one has parts that are the whole. Or
    which experts this rank of the expert axis holds.
    """

    @property
    def axis(self) -> Axis:
        """The tensor axis, or the expert axis."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds everything."""

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of ``full_shape``."""

    def assemble(self, local: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor of ``full_shape`` of which every rank gives its part. Collective over the axis."""

    def counted_flat_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the flattened part that no earlier rank of the axis holds."""

    def flat_parts(self) -> list[tuple[int, int, int, Runs | None]]:
        """Where the flattened part stands in the flattened whole: (start, stop, begin, runs) of each range of it, whose
        elements are those from ``begin`` on, of the whole or of these runs of it.
        """


class ShardedOptimizerMark:
    """Base of the optimizers that step sharded parameters; any other optimizer over them is refused."""

    param_groups: list[dict[str, Any]]
    num_steps: int
    num_skipped_steps: int

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the losses whose gradients it takes."""
        raise NotImplementedError

    def holds(self, param: torch.nn.Parameter) -> bool:
        """Whether this optimizer updates the parameter."""
        raise NotImplementedError

    def has_unscaled(self, root: Any) -> bool:
        """Whether it has taken the loss scale out of its gradients since the last backward or clearing."""
        raise NotImplementedError

    def scale_again(self, root: Any) -> None:
        """A backward is about to add to gradients: put back the loss scale where it was taken out of them."""
        raise NotImplementedError

    def states(self) -> list[torch.Tensor]:
        """The tensors of its states on this rank."""
        raise NotImplementedError

    def local_state(self, slot: ParameterSlot, *, alone: bool = False) -> dict[str, Any]:
        """This rank's state of one parameter: views of its piece (copies where it rests on a disk), and whatever is one
        value for all.
        """
        raise NotImplementedError

    def local_master(self, slot: ParameterSlot) -> torch.Tensor:
        """A copy of this rank's piece of a master weight that rests on a disk."""
        raise NotImplementedError

    def set_local_state(self, slot: ParameterSlot, name: str, value: torch.Tensor) -> None:
        """Replace this rank's state of this name, or, under ``MASTER``, the master weight that rests on a disk."""
        raise NotImplementedError

    def held_pieces(self) -> list[HeldPiece]:
        """All that it keeps on this rank, in the order in which :meth:`read_pieces` shows it."""
        raise NotImplementedError

    def read_pieces(self, act: Callable[[HeldPiece, dict[str, torch.Tensor]], None]) -> None:
        """Call ``act`` with each piece and its states [stop - start], while they are in memory."""
        raise NotImplementedError

    def kept_states(self) -> list[tuple[list[str], list[str]]]:
        """For each parameter group, the names of states of an element, and of values for all elements."""
        raise NotImplementedError

    def write_pieces(
        self, values: Callable[[ParameterSlot], dict[str, Any] | None] | None, fill: Callable[[list[Fill]], None]
    ) -> None:
        """Replace all states: ``values`` gives those that are one for all elements, or None for a parameter without
        state; ``fill`` is called to fill the others. Without ``values`` only master weights on a disk are replaced.
        """
        raise NotImplementedError


@dataclass(eq=False, slots=True, weakref_slot=True)
class ParameterSlot:
    """Where one parameter lives: its group, its index there, and its full name in the model."""

    group: Any
    index: int
    name: str
    aliases: tuple[str, ...]
    param: torch.nn.Parameter
    numel: int
    offset: int
    """Start in the group's flat buffer, in elements."""
    shape: torch.Size = field(init=False)
    """What the parameter has had since it was sharded."""

    def __post_init__(self) -> None:
        """Take note of the shape."""
        self.shape = self.param.shape


def attach_root(module: torch.nn.Module, root: ShardedRoot) -> None:
    """Leave ``root`` on the module; kept out of ``module.__dict__``'s submodules and of ``state_dict``."""
    object.__setattr__(module, _ROOT_ATTRIBUTE, root)


def find_root(module: torch.nn.Module) -> Any | None:
    """The :class:`ShardedRoot` that ``zero.shard`` left on ``module``, or None, also of what is no module."""
    return getattr(module, "__dict__", {}).get(_ROOT_ATTRIBUTE)


def not_sharded(module: Any) -> str:
    """What to say of a module that ``zero.shard`` was not called with, or of what is none, and what to give instead."""
    name = type(module).__name__
    if not hasattr(module, "named_modules"):
        return f"expected the model that shardcore.shard was called with, got {name} in its place"
    inside = next((path for path, child in module.named_modules() if find_root(child) is not None), None)
    if inside is not None:
        return f"{name} is not sharded itself, but its part {inside!r} is; give that"
    slot = next((slot for slot in map(find_slot, module.parameters()) if slot is not None), None)
    if slot is not None:
        whole = type(slot.group.root.module).__name__
        return f"{name} is a part of a sharded {whole}; give the whole model, which shardcore.shard was called with"
    return f"{name} is not sharded; call shardcore.shard(model, ...) first, and pass that model"


def attach_pipeline(part: PipelinePart) -> None:
    """Mark a module as one rank's stages of a pipeline."""
    object.__setattr__(part, _PIPELINE_ATTRIBUTE, True)


def find_pipeline(module: Any) -> PipelinePart | None:
    """The module itself if it is one rank's stages of a pipeline, else None."""
    return module if getattr(module, "__dict__", {}).get(_PIPELINE_ATTRIBUTE) else None


def attach_pieces(param: torch.Tensor, pieces: TensorPieces) -> None:
    """Note which part of it the parameter is."""
    setattr(param, _PIECES_ATTRIBUTE, pieces)


def find_pieces(param: torch.Tensor) -> Any | None:
    """The :class:`TensorPieces` of a parameter of a tensor-parallel model, or None."""
    return param.__dict__.get(_PIECES_ATTRIBUTE)


def attach_experts(param: torch.Tensor, pieces: TensorPieces) -> None:
    """Note that a parameter is that of experts, and which of them it has."""
    setattr(param, _EXPERTS_ATTRIBUTE, pieces)


def find_experts(param: torch.Tensor) -> Any | None:
    """The :class:`TensorPieces` of a parameter of experts that lie over the expert axis, or None. Ranks of the axis
    hold other experts, so it is copied, sharded and averaged over the others only. The tensor axis splits its part.
    """
    return param.__dict__.get(_EXPERTS_ATTRIBUTE)


def find_expert_axis(params: Iterable[torch.Tensor]) -> Axis | None:
    """The axis over which the experts of a model with these parameters lie, or None."""
    pieces = next((each for each in map(find_experts, params) if each is not None), None)
    return None if pieces is None else pieces.axis


def splits_of(param: torch.Tensor) -> list[TensorPieces]:
    """How a parameter was cut on its way from the whole to what this rank has, outermost first."""
    return [each for each in (find_experts(param), find_pieces(param)) if each is not None]


def whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, of which this rank may have a part."""
    splits = splits_of(param)
    return tuple(splits[0].full_shape) if splits else tuple(param.shape)


def part_of_whole(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of the whole parameter's values: a view, or a copy."""
    for pieces in splits_of(param):
        whole = pieces.local(whole)
    return whole


def mark_sequence_split(model: torch.nn.Module) -> None:
    """Note that activations between the model's blocks are split along the sequence."""
    object.__setattr__(model, _SEQUENCE_ATTRIBUTE, True)


def splits_sequence(model: Any) -> bool:
    """Whether activations between the model's blocks are split along the sequence."""
    return bool(getattr(model, "__dict__", {}).get(_SEQUENCE_ATTRIBUTE))


def mark_context_split(model: torch.nn.Module, axis: Axis) -> None:
    """Note that the ranks of the axis call the model with parts of the same sequences."""
    object.__setattr__(model, _CONTEXT_ATTRIBUTE, axis)


def find_context_axis(model: torch.nn.Module) -> Axis | None:
    """The axis whose ranks share sequences in the model, or in a part of it; None if there is none."""
    return next((axis for module in model.modules() if (axis := module.__dict__.get(_CONTEXT_ATTRIBUTE))), None)


def find_tensor_axis(params: Iterable[torch.Tensor]) -> Axis | None:
    """The tensor axis over which a model with these parameters is split, or None."""
    pieces = next((each for each in map(find_pieces, params) if each is not None), None)
    return None if pieces is None else pieces.axis


def attach_slot(slot: ParameterSlot) -> None:
    """Leave the slot on its parameter.

    Weakly: autograd nodes that the model holds refer to the parameter, and the garbage collector cannot see through
    them. A strong reference from the parameter back to its model would close a cycle that is never freed.
    """
    setattr(slot.param, _SLOT_ATTRIBUTE, weakref.ref(slot))


def find_slot(param: torch.Tensor) -> ParameterSlot | None:
    """The slot of a sharded parameter, or None for any other tensor (also where the sharded model is gone)."""
    reference: weakref.ref[ParameterSlot] | None = param.__dict__.get(_SLOT_ATTRIBUTE)
    return None if reference is None else reference()


def register_random_source(source: RandomSource) -> None:
    """What is computed again from now on draws the same numbers from ``source`` as the first time."""
    if source not in _random_sources:
        _random_sources.append(source)


def random_sources() -> Sequence[RandomSource]:
    """Those that were registered, in order."""
    return _random_sources
