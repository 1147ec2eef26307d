"""``shardcore.load_safetensors``: a checkpoint into a model, of which each rank reads its own part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from shardcore import comm
from shardcore.errors import CheckpointError
from shardcore.integrations.safetensors_file import StoredTensor, open_safetensors
from shardcore.zero import Target, Targets, targets_of

if TYPE_CHECKING:
    from shardcore.mesh import Axis, Mesh

_MOST_LISTED = 20


class Loaded(NamedTuple):
    """What a load with ``strict=False`` left out, as torch's ``load_state_dict`` returns it."""

    missing_keys: list[str]
    """Names in the model that the file has not; their tensors are as before."""
    unexpected_keys: list[str]
    """Names in the file that the model has not."""


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    rename: Callable[[str], str | None] | None = None,
) -> Loaded:
    """Read a safetensors checkpoint into ``model``. Collective over the data-parallel axis.

    Each rank reads only the byte ranges that it keeps: the shards of a model that is sharded, or, of parameters on the
    meta device, the pieces that ``shardcore.shard(model, mesh)`` later makes shards of. Such parameters need no other
    initialisation, and are not changed by any. Masters are refreshed; optimizer states stay. Besides what is kept, a
    rank holds at most 8 MiB, where values are converted or go to another device.

    Args:
        model: sharded or not, on the meta device wholly, partly or not at all.
        path: a ``.safetensors`` file, an index ``*.safetensors.index.json``, or a folder that holds either.
        mesh: for a model that is not sharded yet, the mesh that it will be sharded over; None means all ranks.
        strict: names that are only in the model, or only in the file, are errors. Of a tied parameter one name is
            enough; of several the last in the model's order counts, as in ``load_state_dict``.
        cast: convert where the file's dtype is not the model's; else that is an error.
        rename: the model's name for a name of the file, or None for what is to be left out.

    Returns:
        What was left out with ``strict=False``.

    Raises:
        CheckpointError: on every rank, all that any rank found wrong: files, names, shapes, dtypes, or an exception
            of any kind, as of ``rename``, which is the cause on its rank. The model is unchanged then, unless reading
            itself failed.
    """
    where = targets_of(model, mesh)
    chosen: list[tuple[Target, StoredTensor]] = []
    problems: list[str] = []
    left_out, cause = Loaded([], []), None
    try:
        stored, problems = _open(path, rename)
        if not problems:
            chosen, left_out = _match(where.targets, stored)
            problems = _complaints(chosen, left_out, stored, strict=strict, cast=cast)
            problems += _advice(model, left_out, strict=strict)
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of it, whatever it is
        problems, cause = [_told(error, f"matching {path} with the model", where.axis)], error
    _raise_together(problems, where.axis, f"{path} was not loaded", cause)
    _read(chosen, where)
    return left_out


def _open(
    path: str | os.PathLike[str], rename: Callable[[str], str | None] | None
) -> tuple[dict[str, StoredTensor], list[str]]:
    found = open_safetensors(path)
    if rename is None:
        return found, []
    stored: dict[str, StoredTensor] = {}
    problems = []
    for old, tensor in found.items():
        new = _renamed(rename, old, tensor)
        if new in stored:
            problems.append(f"rename gives {new!r} for both {stored[new].name!r} and {old!r}")
        elif new is not None:
            stored[new] = tensor
    return stored, problems


def _renamed(rename: Callable[[str], str | None], old: str, tensor: StoredTensor) -> str | None:
    where = f"rename({old!r}), for a tensor of {tensor.file.path},"
    try:
        new = rename(old)
    except Exception as error:
        raise CheckpointError(f"{where} raised {_named(error)}") from error
    if new is not None and not isinstance(new, str):
        raise CheckpointError(f"{where} returned {new!r}; expected the model's name, a str, or None to leave it out")
    return new


def _match(
    targets: list[Target], stored: Mapping[str, StoredTensor]
) -> tuple[list[tuple[Target, StoredTensor]], Loaded]:
    chosen, missing, known = [], [], set()
    for target in targets:
        present = [name for name in target.names if name in stored]
        known.update(present)
        if present:
            chosen.append((target, stored[present[-1]]))
        else:
            missing.append(target.names[0])
    return chosen, Loaded(missing, [name for name in stored if name not in known])


def _complaints(
    chosen: list[tuple[Target, StoredTensor]],
    left_out: Loaded,
    stored: Mapping[str, StoredTensor],
    *,
    strict: bool,
    cast: bool,
) -> list[str]:
    problems = []
    if strict:
        unexpected = [(name, stored[name].name) for name in left_out.unexpected_keys]
        problems += _listed("missing in the file", left_out.missing_keys)
        problems += _listed(
            "unexpected in the file",
            [name if name == old else f"{name!r} (renamed from {old!r})" for name, old in unexpected],
        )
    shapes = [(t, s) for t, s in chosen if t.shape != s.shape]
    problems += _listed(
        "of another shape", [f"{t.names[0]} (file {list(s.shape)}, model {list(t.shape)})" for t, s in shapes]
    )
    dtypes = [(t, s) for t, s in chosen if t.dtype != s.dtype and not cast]
    found = _listed("of another dtype", [f"{t.names[0]} (file {s.dtype}, model {t.dtype})" for t, s in dtypes])
    return problems + [f"{text}; cast=True converts" for text in found]


def _advice(model: nn.Module, left_out: Loaded, *, strict: bool) -> list[str]:
    """A library may store a model by other names than its modules have, and turn them into these as it loads."""
    if not (strict and left_out.missing_keys and left_out.unexpected_keys and hasattr(model, "from_pretrained")):
        return []
    call = f"{type(model).__name__}.from_pretrained"
    advice = (
        f"if {call} would convert the file as it loads (experts stored one by one, older names): call it inside "
        "shardcore.sharded_init(); else give rename="
    )
    return [advice]


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = f", and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return [f"{len(names)} {what}: {', '.join(names[:_MOST_LISTED])}{rest}"]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _told(error: Exception, doing: str, axis: Axis) -> str:
    """What the other ranks are told of an error of this one; a CheckpointError names its file itself."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"rank {axis.ranks[axis.rank]}, {doing}: {_named(error)}"


def _raise_together(problems: list[str], axis: Axis, what: str, cause: Exception | None = None) -> None:
    """Raise on every rank what any rank complains of; ``cause`` is the exception of this rank, if it has one."""
    told = comm.exchange(problems, axis, "problems of a checkpoint")
    ranks_of: dict[str, list[int]] = {}
    for rank, texts in zip(axis.ranks, told, strict=True):
        for text in texts:
            ranks_of.setdefault(text, []).append(rank)
    if not ranks_of:
        return
    lines = [text if len(ranks) == axis.size else f"{text} (ranks {ranks})" for text, ranks in ranks_of.items()]
    raise CheckpointError("\n  ".join([f"{what}:", *lines])) from cause


def _read(chosen: list[tuple[Target, StoredTensor]], where: Targets) -> None:
    problems, cause = [], None
    doing = "writing to the model"
    try:
        for target, tensor in chosen:
            doing = f"loading {target.names[0]} from {tensor.file.path}"
            target.write(tensor.read)
    except Exception as error:  # noqa: BLE001  # as above
        problems, cause = [_told(error, doing, where.axis)], error
    _raise_together(problems, where.axis, "the model is loaded in part only", cause)
    where.publish()
