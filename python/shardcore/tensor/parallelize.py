"""``shardcore.tensor.parallelize``: split an ordinary model over the tensor axis, in place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import attach_pieces, find_pieces, find_root, mark_sequence_split
from shardcore.tensor.blocks import SEQUENCE_DIM, gather_sequence_for, split_sequence_between, use_own_randomness
from shardcore.tensor.columns import Columns
from shardcore.tensor.experts import Experts
from shardcore.tensor.gradients import sum_gradient
from shardcore.tensor.guards import guard
from shardcore.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shardcore.tensor.pieces import Pieces
from shardcore.tensor.plan import Layer, TensorPlan, make_plan, replicated_in_sequence
from shardcore.tensor.randomness import generator_of
from shardcore.tensor.regions import Projection, Region
from shardcore.tensor.saving import speak_of_whole_parameters
from shardcore.tensor.transformers_model import LocalConfig, split_loss

if TYPE_CHECKING:
    from shardcore.mesh import DeviceMesh

_log = logging.getLogger("shardcore")
_REPORT = "_shardcore_tensor_report"


def parallelize(
    model: nn.Module,
    mesh: Mesh | Axis | DeviceMesh,
    plan: str | Mapping[str, str] = "auto",
    *,
    sequence: bool = False,
) -> nn.Module:
    """Split ``model`` over the tensor axis, in place, and its experts over the mesh's expert axis. Collective over all
    ranks. Call it before ``shardcore.shard``.

    All ranks of the axis end with parts of its first rank's weights, and share its stream of random numbers. Modules,
    parameters and hooks stay the same objects; each parameter then holds this rank's part. The model is called as
    before: ids, labels and activations outside of split blocks are the same on every rank of the axis.

    Args:
        model: an ordinary module, with weights (not on the meta device).
        mesh: a :class:`shardcore.Mesh`, its ``["tp"]`` axis, or a DeviceMesh of one dimension over all ranks.
        plan: ``"auto"`` follows a Hugging Face model's own plan, and what else is known to be safe; whatever is not
            stays whole, and the report says why. Or patterns of module names to ``"colwise"`` (split by outputs),
            ``"rowwise"`` (by inputs), ``"vocab"`` (an embedding, or an output projection whose result is gathered),
            ``"experts"`` (:class:`shardcore.tensor.Experts`), ``"sequence"`` (modules of blocks between which
            activations are split along the sequence), ``"replicate"``; also ``"colwise_gather_output"`` and
            ``"rowwise_split_input"``, for a layer amid whole activations.
            ``"*"`` in a pattern stands for anything; it may leave out the beginning of a name; the last one that
            matches counts.
        sequence: split activations between all blocks along the sequence.

    Returns:
        The same module. Rank 0 tells what was done: to the log "shardcore", or to stderr where the program has not set
        up logging. :func:`report` has the text.

    Raises:
        ConfigError: what cannot be done, with the module and the reason; on every rank, and nothing was changed.
        StateError: the model is sharded or split already.
        RankMismatchError: ranks gave different models or plans; or, at the model's first call, different data.
    """
    axis = _axis(mesh)
    experts = _expert_axis(axis)
    made = _agreed_plan(model, axis, experts, plan, sequence=sequence)
    object.__setattr__(model, _REPORT, made.report())
    if axis.size > 1 or experts.size > 1:
        _start_alike(model, axis, experts)
        _apply(made, axis, experts)
    if axis.rank == 0 and (axis.mesh is None or axis.mesh.rank == 0):
        _tell(made.report())
    return model


def _tell(text: str) -> None:
    if _log.hasHandlers():
        _log.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")


def report(model: nn.Module) -> str:
    """What :func:`parallelize` did with each module of ``model``, a line for each kind.

    Raises:
        StateError: the model was not parallelized.
    """
    text = model.__dict__.get(_REPORT)
    if text is None:
        raise StateError(f"{type(model).__name__} was not given to shardcore.tensor.parallelize")
    return str(text)


def _axis(mesh: Mesh | Axis | DeviceMesh) -> Axis:
    if isinstance(mesh, Axis):
        if mesh.name != "tp":
            raise ConfigError(f"parallelize(mesh=<axis {mesh.name!r}>): give the mesh or its tensor axis, mesh['tp']")
        return mesh
    if isinstance(mesh, Mesh):
        return mesh["tp"]
    if mesh.ndim != 1:
        raise ConfigError(
            f"parallelize: a DeviceMesh of {mesh.ndim} dimensions does not say which is the tensor axis; build "
            "shardcore.Mesh(tp=...)"
        )
    return Mesh(tp=mesh.size(), device=mesh.device_type)["tp"]


def _expert_axis(axis: Axis) -> Axis:
    if axis.mesh is not None:
        return axis.mesh["ep"]
    return Axis("ep", (axis.ranks[axis.rank],), 0, None)


def _agreed_plan(
    model: nn.Module, axis: Axis, experts: Axis, plan: str | Mapping[str, str], *, sequence: bool
) -> TensorPlan:
    """The plan that all ranks have made; a problem of one rank is raised by all. Collective over the axes."""
    made, problem = None, ""
    try:
        _check(model)
        made = make_plan(model, axis.size, plan, sequence=sequence, num_expert_ranks=experts.size)
        if axis.mesh is None and any(each.num_sharing > 1 for region in made.regions for each in region.entering):
            raise ConfigError("parallelize: heads are shared by ranks, for which the mesh of the axis must be known")
    except (ConfigError, StateError) as error:
        problem = f"{type(error).__name__}: {error}"
        mine = error
    for each in (experts, axis):
        problems = comm.exchange(problem, each, "problems of the tensor plan")
        if not problem and any(problems):
            rank = next(i for i, text in enumerate(problems) if text)
            problem = f"rank {each.ranks[rank]} cannot split its model: {problems[rank]}"
            mine = ConfigError(problem)
    if made is None or problem:
        raise mine
    for each in (experts, axis):
        comm.agree_on("the tensor-parallel plan", made.digest(), made.report(), each, _first_difference)
    return made


def _first_difference(left: str, right: str) -> str | None:
    pairs = zip(left.splitlines(), right.splitlines(), strict=False)
    return next((f"{a.strip()!r} against {b.strip()!r}" for a, b in pairs if a != b), None)


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if find_root(module) is not None:
            raise StateError(
                f"module {name or 'root'!r} is sharded already; call shardcore.tensor.parallelize before "
                "shardcore.shard"
            )
    for name, param in model.named_parameters():
        if find_pieces(param) is not None:
            raise StateError(f"parameter {name!r} is split already; parallelize a model once")
        if param.is_meta:
            raise ConfigError(
                f"parallelize: parameter {name!r} is on the meta device, so there is nothing to take a part of; give "
                "the model its weights first"
            )


def _start_alike(model: nn.Module, axis: Axis, experts: Axis) -> None:
    """The first rank's weights and buffers, on every rank of both axes, and its stream of random numbers, on every rank
    of the tensor axis. Collective over the axes.
    """
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            dense = tensor.detach().contiguous()
            for each in (experts, axis):
                comm.broadcast(dense, each, 0, f"first value of {name}").wait()
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)
    for generator in {generator_of(torch.device("cpu")), generator_of(device)}:
        state = generator.get_state()
        comm.broadcast(state, axis, 0, "random state").wait()
        generator.set_state(state)


def _apply(made: TensorPlan, axis: Axis, expert_axis: Axis) -> None:
    in_sequence = tuple(f"{name}." for name, _ in made.sequence)
    for name, module in made.experts:
        experts = Experts.adopt(module, axis, expert_axis, unit=name)
        experts.in_sequence = bool(in_sequence) and name.startswith(in_sequence)
    if axis.size > 1:
        _split_over_tensor_axis(made, axis, in_sequence)
    for param in made.model.parameters():
        if find_pieces(param) is None:
            attach_pieces(param, Pieces.whole(axis, param.shape))
    guard(made.model, axis)
    for module in made.model.modules():
        speak_of_whole_parameters(module)  # those that share a split layer's parameter, too


def _split_over_tensor_axis(made: TensorPlan, axis: Axis, in_sequence: tuple[str, ...]) -> None:
    for region in made.regions:
        _split_region(region, axis, in_sequence=bool(in_sequence) and region.name.startswith(in_sequence))
    for layer in sorted(made.layers, key=lambda layer: not isinstance(layer.module, nn.Embedding)):
        head = _split_layer(layer, axis)
        if layer is made.loss_head and isinstance(head, ColumnParallelLinear):
            split_loss(made.model, head)
    if made.sequence:
        mark_sequence_split(made.model)
        _sum_sequence_gradients(made, axis)
        split_sequence_between(made.sequence, axis)


def _sum_sequence_gradients(made: TensorPlan, axis: Axis) -> None:
    """Whole parameters that see a part of the sequence only: norms, and biases that follow a sum."""
    done = {id(param) for region in made.regions for _, module in region.inner for param in module.parameters()}
    for name, module in replicated_in_sequence(made):
        for own, param in module.named_parameters(recurse=False):
            is_weight = isinstance(module, RowParallelLinear) and own == "weight"
            if id(param) not in done and not is_weight:
                sum_gradient(param, axis, f"{name}.{own}")
                done.add(id(param))


def _split_region(region: Region, axis: Axis, *, in_sequence: bool) -> None:
    columns = []
    for each in region.entering:
        column = ColumnParallelLinear.adopt(each.module, axis, each.ranges, unit=each.name)
        column.input_is_gathered = in_sequence
        _sum_shared_gradients(column, each, axis)
        columns.append(column)
    shared = Columns(columns)
    for column in columns:
        column.columns = shared
    row = None
    if region.leaving is not None:
        row = RowParallelLinear.adopt(region.leaving.module, axis, region.leaving.ranges, unit=region.leaving.name)
        row.sequence_dim = SEQUENCE_DIM if in_sequence else None
    for name, value in region.attributes[axis.rank].items():
        owner: Any = region.module
        setattr(owner, name, LocalConfig(owner.config, value) if name == "config" else value)
    for name, module in region.inner:
        for own, param in module.named_parameters(recurse=False):
            sum_gradient(param, axis, f"{name}.{own}")
    if in_sequence:
        gather_sequence_for(region.module, axis, region.name)
    # A perceptron may lie in a block with other things; its inside begins where its first layer is called.
    first = region.module if region.kind == "attention" else columns[0]
    use_own_randomness(region.module, first, row, axis)


def _sum_shared_gradients(column: ColumnParallelLinear, each: Projection, axis: Axis) -> None:
    """Heads that several ranks hold get the gradients of all of their uses."""
    if each.num_sharing == 1:
        return
    assert axis.mesh is not None  # the plan has checked it
    sharing = axis.mesh.split("tp", each.num_sharing).inside
    for param in (column.weight, column.bias):
        if param is not None:
            pieces = find_pieces(param)
            assert pieces is not None
            sum_gradient(param, sharing, each.name, pieces.dim, pieces.shared_ranges())


def _split_layer(layer: Layer, axis: Axis) -> nn.Module:
    if isinstance(layer.module, nn.Embedding):
        return VocabParallelEmbedding.adopt(layer.module, axis, unit=layer.name)
    if layer.style == "rowwise":
        return RowParallelLinear.adopt(layer.module, axis, unit=layer.name, split_input=layer.whole_end)
    return ColumnParallelLinear.adopt(layer.module, axis, unit=layer.name, gather_output=layer.whole_end)
