"""``checkpoint.load``: every rank reads exactly what it holds, from whatever files it lies in."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.crew import Crew
from shardcore.checkpoint.deepspeed import looks_like_deepspeed
from shardcore.checkpoint.foreign import Foreign
from shardcore.checkpoint.holding import BUFFER, keepers, role_of_rank, root_of
from shardcore.checkpoint.matching import Match, match
from shardcore.checkpoint.pending import settle
from shardcore.checkpoint.report import Loaded, Report
from shardcore.checkpoint.resuming import check_optimizer, load_counters, load_options, load_states
from shardcore.checkpoint.saving import everyone
from shardcore.checkpoint.stored import Read, Stored, open_checkpoint, reads_of, weight_key
from shardcore.checkpoint.ties import ties_of
from shardcore.checkpoint.training import Stateful, gather_parts, restore_random_state
from shardcore.checkpoint.values import decode
from shardcore.errors import CheckpointError, RankMismatchError
from shardcore.protocols import MASTER, ShardedOptimizerMark, ShardedRoot, find_pipeline

_log = logging.getLogger("shardcore")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizerMark | None = None,
    scheduler: Stateful | None = None,
    tag: str | None = None,
    strict: bool = True,
    *,
    data: Stateful | None = None,
    parts: Mapping[str, Stateful] | None = None,
    rng: bool = True,
) -> Loaded:
    """Load a checkpoint into a sharded model, on any mesh, stage, precision and offload home. Collective over all
    ranks.

    Each rank reads only what it holds, and besides it a buffer of some MiB. What is None is not loaded: without an
    optimizer only weights and buffers are, and masters take them in full precision.

    Args:
        path: a run's folder, or one checkpoint in it.
        tag: which checkpoint of the folder; None: the one that ``latest`` names, or, where that one was never finished,
            the newest that is complete (``report.notes`` says so).
        strict: parameters, buffers or optimizer states that are missing in the checkpoint, or only there, are an error,
            raised before anything is changed. Otherwise they are left out, and the report has them.
        data: a sampler or loader that goes on where it was.
        parts: whatever else was saved under these names.
        rng: set the random number generators of every rank, where as many ranks saved.

    Returns:
        The client state, a dict, with ``.report``.

    Raises:
        CheckpointError: on every rank; there is no complete checkpoint, it is damaged (the message names the file and
            its bytes), or it does not fit the model: all that does not is named.
        RankMismatchError: ranks see different checkpoints, or not all ranks called it.
        StorageError: the disk failed.
        StateError: in a forward or backward, inside ``summon``, or while states are offloaded.
    """
    root = root_of(model, "checkpoint.load")
    crew = Crew(everyone(root))
    choices = {"strict": strict, "rng": rng, "optimizer": optimizer is not None, "scheduler": scheduler is not None}
    crew.agree("what to load", choices, "call checkpoint.load with the same arguments on every rank")
    settle(crew)
    stored, notes = crew.do("opening a checkpoint", lambda: _open(Path(path), tag))
    _agree(crew, stored)
    stored.learn(tie.names for tie in ties_of(model, crew).values())
    crew.do("preparing to load", lambda: root.come_to_rest("checkpoint.load"))
    crew.do("checking files", lambda: stored.check_headers(crew.rank, crew.axis.size))
    report = Report(path=stored.folder, world=int(stored.training.get("world", 0)), notes=notes)
    found = crew.do("matching names", lambda: match(model, root, stored))
    unexpected = _only_stored(crew, stored, found)
    problems = [*found.problems, *check_optimizer(optimizer, stored, report)]
    if strict:
        problems += _listed("missing in the checkpoint", found.missing) + _listed("only in it", unexpected)
        problems += _listed("without optimizer state in it", report.without_state)
    crew.do("comparing", lambda: _raise_if(problems, stored.folder))
    report.missing, report.unexpected = found.missing, unexpected
    _load_tensors(crew, model, root, optimizer, stored, found)
    others = gather_parts(scheduler, data, parts)
    crew.do("resuming", lambda: _resume(model, optimizer, stored, report, others))
    if rng:
        crew.do("setting random numbers", lambda: _load_random_state(crew, root, stored, report))
    if crew.rank == 0:
        for note in report.notes:
            _log.warning("%s", note)
    return Loaded(stored.client_state, report)


def _open(path: Path, tag: str | None) -> tuple[Stored, list[str]]:
    try:
        return open_checkpoint(path, tag)
    except CheckpointError as error:
        if not looks_like_deepspeed(path, tag):
            raise
        raise CheckpointError(
            f"{path} was saved by DeepSpeed: make a checkpoint of it first, on one process, by shardcore ckpt "
            f"import-deepspeed or shardcore.checkpoint.import_deepspeed({str(path)!r}, out), and load that"
        ) from error


def _agree(crew: Crew, stored: Stored) -> None:
    seen = [stored.folder.name, stored.index["sequence"]]
    told = crew.tell("which checkpoint to load", lambda: seen)
    if any(other != told[0] for other in told):
        text = ", ".join(f"rank {rank}: {name}" for rank, (name, _) in zip(crew.axis.ranks, told, strict=True))
        raise RankMismatchError(f"ranks see different checkpoints ({text}); give all of them the same path and tag")


def _only_stored(crew: Crew, stored: Stored, found: Match) -> list[str]:
    """Names that no rank's part of the model has."""
    told = crew.tell("names that were found", lambda: sorted(found.used))
    used = {name for names in told for name in names}
    return [name for name in (*stored.names("weight"), *stored.names(BUFFER)) if name not in used]


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"{len(names)} {what}: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"] if names else []


def _raise_if(problems: list[str], folder: Path) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise CheckpointError(
            f"{folder} does not fit the model; nothing was loaded:\n  {lines}\nstrict=False leaves out what is missing "
            "on either side"
        )


def _load_tensors(
    crew: Crew,
    model: nn.Module,
    root: ShardedRoot,
    optimizer: ShardedOptimizerMark | None,
    stored: Stored,
    found: Match,
) -> None:
    """Weights, buffers and optimizer states."""
    all_keepers = keepers(root, optimizer)
    on_disk = {p.slot for keeper in all_keepers for p in keeper.held_pieces() if MASTER in p.states}

    def read() -> None:
        for reads in _reads_of_weights(root, found, on_disk):
            stored.read(reads)
        for key, tensor in found.others.items():
            _load_whole(stored, key, tensor)
        _load_own_buffers(crew, stored, found)

    crew.do("reading weights (the model is loaded in part only)", read)

    def read_states() -> None:
        for keeper in all_keepers:
            load_states(keeper, stored, found, with_states=keeper is optimizer)

    crew.do("reading optimizer states (the model is loaded in part only)", read_states)
    for group in root.groups:
        if on_disk.intersection(group.slots):  # states were written with their parameters
            group.publish(copied=True)
        else:
            group.end_load()


def _reads_of_weights(root: ShardedRoot, found: Match, on_disk: set[Any]) -> Iterator[list[Read]]:
    """What can be read at once: all that is in memory, and each group whose parameters rest on a disk."""
    together = []
    for group in root.groups:
        memory, reads = group.begin_load(), []
        for slot in group.slots:
            name = found.weights.get(slot.name)
            start, stop, offset = group.local_range(slot)
            if name is not None and slot not in on_disk:
                out = memory[offset : offset + stop - start]
                reads += reads_of(weight_key(name), slot.param, (start, stop), out)
        if group.rests_on_disk:
            yield reads
        else:
            together.extend(reads)
    yield together


def _load_whole(stored: Stored, key: tuple[str, str], tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_contiguous():
            stored.read([Read(key, 0, tensor.numel(), tensor.detach().view(-1))])
        else:
            tensor.copy_(stored.whole(key))


def _load_own_buffers(crew: Crew, stored: Stored, found: Match) -> None:
    """What this rank had in a buffer, where that differed from the first rank's and as many ranks saved."""
    if stored.training.get("world") != crew.axis.size:
        return
    role = role_of_rank(crew.axis.ranks[crew.rank])
    for (kind, name), tensor in found.others.items():
        own = (role, f"{BUFFER} {name}")
        if kind == BUFFER and own in stored.tensors:
            _load_whole(stored, own, tensor)


def _resume(
    model: nn.Module,
    optimizer: ShardedOptimizerMark | None,
    stored: Stored,
    report: Report,
    parts: Mapping[str, Stateful],
) -> None:
    """Everything but tensors and random numbers."""
    if optimizer is not None and stored.training["optimizer"]:
        load_options(optimizer, stored, report)
        load_counters(optimizer, stored, report)
    for name, part in parts.items():
        state = stored.part(name)
        if state is not None:
            part.load_state_dict(state)
        else:
            report.notes.append(f"the checkpoint has no state of the {name}, which begins anew")
    pipeline = find_pipeline(model)
    if pipeline is not None and stored.training["pipeline"]:
        pipeline.num_steps = int(stored.training["pipeline"]["num_steps"])


def _load_random_state(crew: Crew, root: ShardedRoot, stored: Stored, report: Report) -> None:
    key = (role_of_rank(crew.axis.ranks[crew.rank]), "random state")
    if report.world != crew.axis.size or key not in stored.tensors:
        report.notes.append(
            f"random number generators go on as they are: {report.world} ranks saved theirs, and {crew.axis.size} load"
        )
        return
    state = json.loads(bytes(stored.whole(key).tolist()))
    restore_random_state(state, decode(state["python"]), root.device)


def from_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> Report:
    """Load the weights of safetensors files (one, or Hugging Face's several with an index) into a sharded model.
    Collective over all ranks. Each rank reads only what it holds; values are converted, masters refreshed, optimizer
    states stay. A model that is not sharded yet is filled by ``shardcore.load_safetensors``.

    Args:
        path: a file, an index, or a folder with either.
        strict: names that are only in the model, or only in the files, are an error; of a tied parameter one is enough.
        rename: the model's name for a name of the files, or None for what is to be left out.

    Raises:
        CheckpointError: on every rank; files are missing or damaged, or do not fit the model: all that does not is
            named.
        StateError: in a forward or backward, inside ``summon``, or while states are offloaded.
    """
    root = root_of(model, "checkpoint.from_hf")
    crew = Crew(everyone(root))
    settle(crew)
    stored = crew.do("opening files", lambda: Foreign(path, rename))
    stored.learn(tie.names for tie in ties_of(model, crew).values())
    crew.do("preparing to load", lambda: root.come_to_rest("checkpoint.from_hf"))
    found = crew.do("matching names", lambda: match(model, root, stored))
    found.used.update(stored.left_out)
    unexpected = _only_stored(crew, stored, found)
    problems = found.problems
    if strict:
        problems = problems + _listed("missing in the files", found.missing) + _listed("only in them", unexpected)
    crew.do("comparing", lambda: _raise_if(problems, Path(path)))
    _load_tensors(crew, model, root, None, stored, found)
    return Report(path=Path(path), missing=found.missing, unexpected=unexpected)
