"""Checkpoints for ``torch.distributed.checkpoint`` (DCP), and from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardcore import comm
from shardcore.checkpoint.collected import Collected
from shardcore.checkpoint.holding import BUFFER, STATE, WEIGHT, Key
from shardcore.checkpoint.report import Report
from shardcore.checkpoint.rewriting import write_checkpoint
from shardcore.checkpoint.stored import Stored, open_checkpoint
from shardcore.checkpoint.training import values_by_name
from shardcore.checkpoint.unpickling import Inert, read_plain, read_slice
from shardcore.checkpoint.values import decode, encode, to_json
from shardcore.errors import CheckpointError

_METADATA = ".metadata"


def to_dcp(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> Path:
    """Write weights, buffers and optimizer state for ``torch.distributed.checkpoint.load``, laid out as
    ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict`` lays them out: ``{"model": {name: tensor},
    "optim": {"state": {name: {...}}, "param_groups": [...]}}``. Weights are the masters; tied ones stand under each of
    their names. On one process; one tensor at a time is in memory.

    Args:
        path: a run's folder, or one checkpoint in it.
        out: a folder, which is made; one that holds such a checkpoint is refused.
        model_key, optimizer_key: under which keys the two stand.

    Returns:
        The folder.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or ``out`` holds one already.
        StorageError: the disk is full or refuses.
    """
    stored, _ = open_checkpoint(Path(path), tag)
    folder = Path(out)
    if (folder / _METADATA).exists():
        raise CheckpointError(f"{folder} holds a checkpoint of DCP already; give another folder")
    keys: dict[int, Key] = {}

    def placeholder(key: Key) -> torch.Tensor:
        made = torch.empty(stored.shape(key), dtype=stored.dtype(key), device="meta")
        keys[id(made)] = key
        return made

    state: dict[str, Any] = {model_key: _model_state(stored, placeholder)}
    if stored.training["optimizer"]:
        state[optimizer_key] = _optimizer_state(stored, placeholder)
    comm.write_dcp(folder, state, lambda tensor: stored.whole(keys[id(tensor)]))
    return folder


def _model_state(stored: Stored, placeholder: Callable[[Key], torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {(WEIGHT, name): [name, *info["aliases"]] for name, info in stored.training["weights"].items()}
    names |= {(BUFFER, name): [name, *aliases] for name, aliases in stored.training["buffers"].items()}
    return {alias: placeholder(key) for key, known in names.items() if key in stored.tensors for alias in known}


def _optimizer_state(stored: Stored, placeholder: Callable[[Key], torch.Tensor]) -> dict[str, Any]:
    described = stored.training["optimizer"]
    state = {}
    for name, content in values_by_name(described).items():
        whole = {kind: placeholder((STATE + kind, name)) for kind in stored.states_of(name)}
        state[name] = {**whole, **{key: decode(value) for key, value in content.items()}}
    groups = [
        {**{key: decode(value) for key, value in group["options"].items()}, "params": list(group["params"])}
        for group in described["groups"]
    ]
    return {"state": state, "param_groups": groups}


def import_dcp(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
    tag: str | None = None,
    num_files: int = 1,
) -> Report:
    """Make a checkpoint out of one of DCP's, laid out as :func:`to_dcp` says, of whatever ranks and placements. On one
    process; nothing that its files name is run, and one tensor at a time is in memory.

    Args:
        path: its folder, which has the file ``.metadata``.
        out: the folder of a run, which is made.
        model_key: under which key the model's state stands; "" where it is all that was saved.
        tag: of the new checkpoint; None: the folder's name.

    Returns:
        The new checkpoint's folder in ``path``; what it was not known how to take over, in ``notes``.

    Raises:
        CheckpointError: it is none, or is damaged, or has nothing under ``model_key``.
        StorageError: the disk is full or refuses.
    """
    files = _Files(Path(path))
    found = Collected(str(path))
    _collect_model(files, model_key, found)
    steps = _collect_optimizer(files, optimizer_key, found)
    others = sorted({place[0] for place in files.places.values()} - {model_key, optimizer_key})
    if model_key and others:
        found.notes.append(f"what stands under {', '.join(map(str, others))} is not taken over")
    found.training |= {
        "model": "imported from torch.distributed.checkpoint", "torch": torch.__version__, "stage": None, "mesh": {},
        "world": 1, "pipeline": None, "parts": {}, "client_state": {},
    }  # fmt: skip
    folder = write_checkpoint(found, Path(out), tag or Path(path).absolute().name, num_files)
    found.notes.append(f"{steps} steps were counted from the states of the optimizer")
    return Report(path=folder, world=1, notes=found.notes)


class _Files:
    """The folder of a checkpoint, and where in its files everything is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = read_plain(folder / _METADATA)
        try:
            self._known: dict[str, Inert] = metadata.fields["state_dict_metadata"]
            told = metadata.fields.get("planner_data") or {name: (name,) for name in self._known}
            self.places: dict[str, tuple[Any, ...]] = {name: tuple(told.get(name, (name,))) for name in self._known}
            self._parts: dict[str, list[tuple[Inert, Inert]]] = {}
            for index, place in metadata.fields["storage_data"].items():
                self._parts.setdefault(index.fields["fqn"], []).append((index, place))
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / _METADATA} is not as DCP writes it: {error!r}") from error

    def below(self, key: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """(its own name, path below the key) of everything there."""
        for name, place in self.places.items():
            if not key or (place[0] == key and len(place) > 1):
                yield name, place[1:] if key else place

    def shape_of(self, name: str) -> tuple[list[int], torch.dtype] | None:
        """Of a tensor; None for what is none."""
        fields = self._known[name].fields
        if "size" not in fields:
            return None
        return list(fields["size"]), fields["properties"].state[0]

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, from the boxes in which it was saved."""
        shape, dtype = self.shape_of(name) or ([], torch.float32)
        whole = torch.empty(shape, dtype=dtype)
        filled = 0
        for index, place in self._parts.get(name, []):
            box = self._read(place)
            offsets = index.fields.get("offset") or [0] * len(shape)
            target = whole
            for dim, (offset, extent) in enumerate(zip(offsets, box.shape, strict=True)):
                target = target.narrow(dim, offset, extent)
            target.copy_(box)
            filled += box.numel()
        if filled != whole.numel():
            raise CheckpointError(f"{self.folder}: {filled} of the {whole.numel()} elements of {name} are there")
        return whole

    def value(self, name: str) -> Any:
        """What is no tensor."""
        return self._read(self._parts[name][0][1])

    def _read(self, place: Inert) -> Any:
        if place.fields.get("transform_descriptors"):
            raise CheckpointError(f"{self.folder} was saved with extensions (compressed), which is not read")
        path = self.folder / place.fields["relative_path"]
        return read_slice(path, int(place.fields["offset"]), int(place.fields["length"]))


def _collect_model(files: _Files, key: str, found: Collected) -> None:
    for name, place in files.below(key):
        known = files.shape_of(name)
        if known is None:
            found.notes.append(f"{name} is no tensor; it is left out")
            continue
        new = ".".join(map(str, place))
        found.add_lazy((WEIGHT, new), *known, lambda name=name: files.tensor(name))  # type: ignore[misc]
        dtype = str(known[1]).removeprefix("torch.")
        found.training["weights"][new] = {"aliases": [], "dtype": dtype, "trainable": False}
    if not found.tensors:
        tops = sorted({str(place[0]) for place in files.places.values()})
        raise CheckpointError(f"{files.folder} has nothing under {key!r}; its keys are {', '.join(tops[:20])}")


def _collect_optimizer(files: _Files, key: str, found: Collected) -> int:
    """Enter the optimizer's state; returns the number of steps that it tells."""
    groups: dict[int, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, place in files.below(key) if key else ():
        if place[0] == "param_groups" and len(place) == 3:
            groups.setdefault(int(place[1]), {})[str(place[2])] = name
        elif place[0] == "state" and len(place) == 3:
            _collect_state(files, name, (str(place[1]), str(place[2])), found, values)
    names = set(values)
    for kept, info in found.training["weights"].items():
        info["trainable"] = kept in names
    steps = {float(each["step"]) for each in values.values() if "step" in each}
    found.training["optimizer"] = _described(files, groups, values, int(max(steps, default=0))) if names else None
    return int(max(steps, default=0))


def _collect_state(
    files: _Files, name: str, place: tuple[str, str], found: Collected, values: dict[str, dict[str, Any]]
) -> None:
    parameter, state = place
    kept = values.setdefault(parameter, {})
    known = files.shape_of(name)
    if known is not None and known[0]:
        found.add_lazy((STATE + state, parameter), *known, lambda: files.tensor(name))
    else:
        kept[state] = files.tensor(name) if known is not None else torch.tensor(float(files.value(name)))


def _described(
    files: _Files, groups: dict[int, dict[str, Any]], values: dict[str, dict[str, Any]], num_steps: int
) -> dict[str, Any]:
    known: dict[str, list[Any]] = {}
    for parameter, each in values.items():
        content = {key: encode(value, f"state {key} of {parameter}") for key, value in each.items()}
        known.setdefault(to_json(content), [content, []])[1].append(parameter)
    described = []
    for _, places in sorted(groups.items()):
        options = {key: files.value(name) for key, name in places.items()}
        params = [str(param) for param in options.pop("params", [])]
        encoded = {key: encode(value, f"option {key}") for key, value in options.items() if key != "param_names"}
        described.append({"options": encoded, "params": params})
    if not described:
        described = [{"options": {}, "params": list(values)}]
    return {
        "class": "an optimizer", "groups": described, "num_steps": num_steps, "num_skipped_steps": 0,
        "loss_scale": {"kind": "ConstantScale", "state": {"scale": 1.0}}, "values": list(known.values()),
    }  # fmt: skip
