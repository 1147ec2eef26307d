"""From DeepSpeed's files to the tensors of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardcore.checkpoint.collected import Collected
from shardcore.checkpoint.deepspeed.folders import Files, find_folder
from shardcore.checkpoint.deepspeed.optimizer import Optimizer
from shardcore.checkpoint.deepspeed.partitions import Partitioned, check_count, param_groups, partitioned, step_in
from shardcore.checkpoint.deepspeed.run import describe_run
from shardcore.checkpoint.holding import BUFFER, STATE, WEIGHT
from shardcore.checkpoint.unpickling import read_pickled
from shardcore.errors import CheckpointError

Rename = Callable[[str], str | None]


def collect(path: Path, tag: str | None = None, rename: Rename | None = None) -> Collected:
    """Everything of one checkpoint of DeepSpeed's; tensors stay in their files until they are read.

    Args:
        path: a run's folder, or one checkpoint in it.
        rename: the model's name for a name of the files, or None for what is to be left out.

    Raises:
        CheckpointError: there is none, files are missing or damaged, or it is of a kind that is not read.
    """
    files = find_folder(path, tag)
    try:
        reader = _Reader(files, rename or (lambda name: name), Collected(str(files.folder)))
        for stage in files.stages:
            reader.models.append(_model(files.models, (stage, 0)))
        for one in reader.universal() if files.is_universal else reader.partitions():
            reader.enter(one)
        reader.enter_frozen_parts()
        reader.enter_whole()
        describe_run(reader.found, reader.models[0], reader.optimizer, files)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{files.folder} is not as DeepSpeed writes checkpoints: {error!r}") from error
    return reader.found


@dataclass(slots=True)
class _Reader:
    files: Files
    rename: Rename
    found: Collected
    models: list[dict[str, Any]] = field(default_factory=list)
    """The model files of the first data-parallel rank, by pipeline stage."""
    optimizer: Optimizer = field(default_factory=Optimizer)

    def partitions(self) -> Iterator[Partitioned]:
        """Trained parameters, out of every rank's file."""
        for stage, model in zip(self.files.stages, self.models, strict=True):
            if not model.get("param_shapes"):
                self.found.notes.append("stage 0 keeps optimizer states without names of parameters; they begin anew")
                continue
            ranks = [_optimizer_state(path) for path in self.files.optims_of(stage)]
            check_count(ranks, self.found.what)
            self.optimizer.take(param_groups(ranks[0]), ranks[0])
            yield from partitioned(ranks, model["param_shapes"], self.found.what)

    def universal(self) -> Iterator[Partitioned]:
        """Trained parameters, out of a folder for each."""
        root = self.files.folder / "zero"
        common = read_pickled(root / "optimizer_state.pt") if (root / "optimizer_state.pt").exists() else {}
        self.optimizer.take(list(common.get("param_groups", [])), common)
        groups = [model.get("param_shapes") or [] for model in self.models]
        known = {name: (i, shape) for each in groups for i, named in enumerate(each) for name, shape in named.items()}
        for path in sorted(root.rglob("fp32.pt")):
            name = path.parent.relative_to(root).as_posix()
            if known and name not in known:  # not trained: the model's file has it, too
                continue
            weight = _universal(path)
            number, shape = known.get(name, (0, weight.shape))
            shape = weight.shape if prod(shape) != weight.numel() else shape
            beside = [file for file in sorted(path.parent.glob("*.pt")) if file.stem not in ("fp32", "step")]
            states = {file.stem: [_universal(file)] for file in beside}
            step = read_pickled(path.with_name("step.pt")) if path.with_name("step.pt").exists() else step_in(common)
            values = {} if step is None or not states else {"step": float(step)}
            yield Partitioned(number, name, list(shape), [weight], states, values)

    def enter(self, one: Partitioned) -> None:
        """Keep a trained parameter and its states."""
        name = self.rename(one.name)
        if name is None or (WEIGHT, name) in self.found.tensors:  # a tied one, of another pipeline stage
            return
        self._enter_weight(name, one.shape, one.master, trainable=True)
        for state, parts in one.states.items():
            self.found.add((STATE + state, name), one.shape, parts)
        self.optimizer.enter(one.group, name, one.values, bool(one.states))

    def enter_frozen_parts(self) -> None:
        """Stage 3 partitions frozen parameters, too."""
        if not self.files.is_stage_3:
            return
        for stage, model in zip(self.files.stages, self.models, strict=True):
            shapes = model.get("frozen_param_shapes") or {}
            files = [_model(self.files.models, (stage, rank)) for rank in self.files.ranks_of(stage)] if shapes else []
            for old, shape in shapes.items():
                name = self.rename(old)
                if name is not None:
                    parts = [each["frozen_param_fragments"][old].reshape(-1) for each in files]
                    self._enter_weight(name, list(shape), parts, trainable=False)

    def enter_whole(self) -> None:
        """What every rank has whole: buffers, frozen parameters; and the model's dtypes, and names of tied ones."""
        buffers = {name for model in self.models for name in model.get("buffer_names") or ()}
        is_trained = not any(model.get("param_shapes") for model in self.models)
        for model in self.models:
            for alias, name in (model.get("shared_params") or {}).items():
                self._alias(alias, name)
        for old, tensor in self._whole_tensors():
            name = self.rename(old)
            if name is None or name in self._aliases():
                continue
            if old in buffers:
                self.found.add((BUFFER, name), tensor.shape, [tensor])
                self.found.training["buffers"][name] = []
            elif (WEIGHT, name) in self.found.tensors:
                self.found.training["weights"][name]["dtype"] = str(tensor.dtype).removeprefix("torch.")
            elif not self._is_tied(name, old, tensor):
                self._enter_weight(name, list(tensor.shape), [tensor], trainable=is_trained)

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the model's own state; of a pipeline, under the places of its layers."""
        if not self.files.layers:
            yield from _tensors(self.models[0]["module"])
        for place, path in sorted(self.files.layers.items()):
            yield from ((f"{place}.{name}", tensor) for name, tensor in _tensors(read_pickled(path)))

    def _is_tied(self, name: str, old: str, tensor: torch.Tensor) -> bool:
        """Whether a pipeline's layer shows a tied parameter, which is kept under the key of the tie."""
        if not self.files.layers:
            return False
        local = old.partition(".")[2]
        for kept in self.found.training["weights"]:
            if kept.startswith("tied_modules.") and kept.endswith(f".{local}"):
                key = (WEIGHT, kept)
                if self.found.shape(key) == list(tensor.shape) and self.found.agrees(key, tensor):
                    self._add_alias(kept, name, tensor)
                    return True
        return False

    def _alias(self, alias: str, name: str) -> None:
        new, kept = self.rename(alias), self.rename(name)
        if new is not None and kept in self.found.training["weights"]:
            self.found.training["weights"][kept]["aliases"].append(new)

    def _add_alias(self, kept: str, name: str, tensor: torch.Tensor) -> None:
        info = self.found.training["weights"][kept]
        info["aliases"].append(name)
        info["dtype"] = str(tensor.dtype).removeprefix("torch.")

    def _aliases(self) -> set[str]:
        return {alias for info in self.found.training["weights"].values() for alias in info["aliases"]}

    def _enter_weight(self, name: str, shape: list[int], parts: list[torch.Tensor], *, trainable: bool) -> None:
        self.found.add((WEIGHT, name), shape, parts)
        dtype = str(parts[0].dtype).removeprefix("torch.")
        self.found.training["weights"][name] = {"aliases": [], "dtype": dtype, "trainable": trainable}


def _model(files: dict[tuple[int, int], Path], place: tuple[int, int]) -> dict[str, Any]:
    if place not in files:
        raise CheckpointError(f"the model's file of pipeline stage {place[0]}, rank {place[1]} is missing")
    model = read_pickled(files[place])
    if not isinstance(model, dict) or "module" not in model:
        raise CheckpointError(f"{files[place]} holds no state of a model")
    return model


def _optimizer_state(path: Path) -> dict[str, Any]:
    read = read_pickled(path)
    state = read.get("optimizer_state_dict") if isinstance(read, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state of an optimizer")
    return state


def _universal(path: Path) -> torch.Tensor:
    read = read_pickled(path)
    tensor = read.get("param") if isinstance(read, dict) else read
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path} holds no tensor")
    return tensor


def _tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in (state or {}).items() if isinstance(value, torch.Tensor))
