"""``checkpoint.save``: every rank writes its share of what it holds, and the first makes a checkpoint of the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore._core import abandon_checkpoint, begin_checkpoint, check_host_memory, checkpoint_aside
from shardcore.checkpoint.crew import Crew
from shardcore.checkpoint.holding import (
    Holding,
    Piece,
    Tensor,
    buffer_prints,
    hold,
    keepers,
    role_of_rank,
    root_of,
)
from shardcore.checkpoint.pending import Pending, remember, settle
from shardcore.checkpoint.sharing import share
from shardcore.checkpoint.ties import ties_of
from shardcore.checkpoint.training import Stateful, describe, gather_parts, merge, random_state
from shardcore.checkpoint.writing import Job, Options
from shardcore.errors import CheckpointError
from shardcore.mesh import Axis
from shardcore.protocols import ShardedOptimizerMark, ShardedRoot


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizerMark | None = None,
    scheduler: Stateful | None = None,
    client_state: Any = None,
    tag: str | None = None,
    async_: bool = False,
    keep_last: int | None = None,
    *,
    data: Stateful | None = None,
    parts: Mapping[str, Stateful] | None = None,
    exclude_frozen: bool = False,
    keep_every: int | None = None,
    save_latest: bool = True,
    read_back: bool = False,
) -> Path:
    """Save a training into the folder ``path/tag``. Collective over all ranks of the job.

    Everything is kept under the names of the unsharded model, so it loads on any mesh: weights (masters in full
    precision), buffers, optimizer states and options, loss scale, scheduler, random numbers of every rank. Gradients
    are not: save between steps. A checkpoint exists wholly or not at all, and earlier ones stay whole, whatever fails.

    Args:
        path: the run's folder, the same on every rank and seen by all.
        client_state: plain values (None, bool, int, float, str, list, tuple, dict), given back by :func:`load`; the
            first rank's counts.
        tag: the checkpoint's name, the same on every rank; None: ``step<number of steps>``.
        async_: return when the save has begun; it goes on while the model trains. The next ``optimizer.step()`` waits
            until this rank's share is copied to host memory, which must have room for it; until then parameters must
            not be written to by hand. The next save or load, and :func:`wait`, wait for the end, and raise what went
            wrong.
        keep_last: remove older checkpoints of the folder, once this one is complete; None keeps all.
        data: a sampler or loader whose ``state_dict`` is its position; the first rank's counts.
        parts: whatever else has a ``state_dict`` of plain values, by name; the first rank's counts.
        exclude_frozen: leave out parameters that are not trained, which then keep their values when it is loaded.
        keep_every: keep besides every so-many-th checkpoint of the run for good.
        save_latest: let the file ``latest`` name this one, so that :func:`load` finds it.
        read_back: read the files again and compare their checksums before the checkpoint counts as complete.

    Returns:
        The checkpoint's folder; with ``async_`` it is there once the save has ended.

    Raises:
        ConfigError: the model is not sharded.
        StateError: in a forward or backward, inside ``summon``, or while states are offloaded.
        RankMismatchError: ranks gave different paths, tags or options; or not all ranks called it.
        StorageError: on every rank, if the disk of any is full or refuses.
        CheckpointError: on every rank; what cannot be kept in a checkpoint, or files that read other than written.
    """
    root = root_of(model, "checkpoint.save")
    crew = Crew(everyone(root))
    tag = tag if tag is not None else f"step{optimizer.num_steps if optimizer is not None else 0}"
    options = Options(keep_last=keep_last, keep_every=keep_every, is_latest=save_latest, read_back=read_back)
    _agree(crew, path, tag, options)
    choices = {"async_": async_, "exclude_frozen": exclude_frozen, "optimizer": optimizer is not None}
    crew.agree("what to save", choices, "call checkpoint.save with the same arguments on every rank")
    settle(crew)
    crew.do("preparing to save", lambda: root.come_to_rest("checkpoint.save"))
    prints, ties = buffer_prints(model, root), ties_of(model, crew)
    holding = crew.do("looking at the model", lambda: hold(model, root, optimizer, prints, ties, not exclude_frozen))
    _hold_random_state(holding, root, crew)
    others = gather_parts(scheduler, data, parts)
    mine = crew.do("describing the training", lambda: describe(model, root, optimizer, others, client_state))
    if mine["optimizer"]:
        for group in mine["optimizer"]["groups"]:
            group["params"] = [holding.name_of(name) for name in group["params"]]
    training = merge(crew, holding, mine)
    job = Job(
        run=Path(path),
        tag=tag,
        options=options,
        file=f"rank-{crew.axis.ranks[crew.rank]:05d}.safetensors",
        holding=holding,
        plan=share(holding, crew),
        keepers=keepers(root, optimizer),
        training=training,
    )
    return _write_later(job, crew, root) if async_ else _write_now(job, crew)


def everyone(root: ShardedRoot) -> Axis:
    """All ranks of the job that the model is part of."""
    mesh = root.data_axis.mesh
    return root.data_axis if mesh is None else mesh.everyone


def _agree(crew: Crew, path: str | os.PathLike[str], tag: str, options: Options) -> None:
    said = [str(Path(path).absolute()), str(tag), repr(options)]
    crew.agree("where and how to save", said, "give the same path, tag and options on every rank")


def _hold_random_state(holding: Holding, root: ShardedRoot, crew: Crew) -> None:
    state = random_state(root.device)
    key = (role_of_rank(crew.axis.ranks[crew.rank]), "random state")
    # Before what the optimizer shows, whose turn comes last.
    holding.pieces.insert(0, Piece(key, 0, state.numel(), state))
    holding.tensors[key] = Tensor("U8", [state.numel()])


def _make_folder(run: Path, tag: str, crew: Crew) -> None:
    crew.tell("making the folder of a checkpoint", lambda: str(begin_checkpoint(run, tag)), first_only=True)
    crew.do("looking for the folder of a checkpoint", lambda: _check_is_shared(checkpoint_aside(run, tag)))


def _write_now(job: Job, crew: Crew) -> Path:
    """Write, and make a checkpoint of it. Collective."""
    try:
        _make_folder(job.run, job.tag, crew)
        written = crew.tell("writing a checkpoint", job.write)
        crew.tell("completing a checkpoint", lambda: job.commit(written), first_only=True)
    except Exception:
        if crew.rank == 0:
            abandon_checkpoint(job.run, job.tag)
        raise
    return job.run / job.tag


def _write_later(job: Job, crew: Crew, root: ShardedRoot) -> Path:
    """Begin to write; training goes on meanwhile. Collective."""
    crew.do("memory for a checkpoint", lambda: check_host_memory("the copy of what is saved", job.nbytes))
    _make_folder(job.run, job.tag, crew)
    for piece in job.holding.pieces:
        if piece.may_change and isinstance(piece.source, torch.Tensor):
            piece.source = piece.source.clone()
    pending = Pending(checkpoint_aside(job.run, job.tag), crew.axis)
    root.before_changes.append(pending.wait_for_copy)
    remember(crew, pending)
    pending.start(job)
    return job.run / job.tag


def _check_is_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"this rank does not see the folder {folder} that the first rank made: save to a path on a file system "
            "that all ranks share"
        )


def wait(model: nn.Module) -> None:
    """Wait until the save that ``async_`` began has ended. Collective over all ranks of the job.

    Raises:
        Exception: on every rank, what went wrong with it on any; earlier checkpoints are whole.
    """
    settle(Crew(everyone(root_of(model, "checkpoint.wait"))))
