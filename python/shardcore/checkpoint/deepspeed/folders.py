"""Which files a checkpoint of DeepSpeed has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardcore.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
_SPLIT = re.compile(r"layer_\d+-model_\d+.*-model_states\.pt")
_EXPERT = re.compile(r"layer_.*expert_.*\.pt|expp_rank_.*\.pt")


@dataclass(frozen=True, slots=True)
class Files:
    """Of one checkpoint."""

    folder: Path
    models: dict[tuple[int, int], Path]
    """By (pipeline stage, data-parallel rank); below stage 3 only rank 0 has one."""
    optims: dict[tuple[int, int], Path]
    """By (pipeline stage, data-parallel rank)."""
    layers: dict[int, Path]
    """Of a pipeline, by the place of the layer."""

    @property
    def is_universal(self) -> bool:
        """Whether it was made by ``ds_to_universal``: a folder for each parameter."""
        return (self.folder / "zero").is_dir()

    @property
    def stages(self) -> list[int]:
        """Pipeline stages that have files of their own."""
        return sorted({stage for stage, _ in self.models})

    @property
    def is_stage_3(self) -> bool:
        """Whether every data-parallel rank has a file of the model."""
        return any(file.name.startswith("zero_pp_rank_") for file in self.models.values())

    def ranks_of(self, stage: int) -> list[int]:
        """Data-parallel ranks of a pipeline stage."""
        both = (*self.models, *self.optims)
        return list(range(1 + max(rank for other, rank in both if other == stage)))

    def optims_of(self, stage: int) -> list[Path]:
        """The optimizer files of one pipeline stage, by data-parallel rank.

        Raises:
            CheckpointError: some are missing.
        """
        ranks = sorted(rank for other, rank in self.optims if other == stage)
        if ranks != list(range(len(ranks))):
            raise CheckpointError(f"{self.folder}: optimizer files of ranks {ranks} are there, and others are missing")
        return [self.optims[stage, rank] for rank in ranks]


def looks_like_deepspeed(path: Path, tag: str | None = None) -> bool:
    """Whether this is a run's folder of DeepSpeed's, or one checkpoint in it."""
    folder = _choose(path, tag)
    return any(_MODEL.fullmatch(file.name) for file in folder.glob("*mp_rank_*_model_states.pt"))


def find_folder(path: Path, tag: str | None = None) -> Files:
    """The files of a checkpoint.

    Args:
        path: a run's folder, whose ``latest`` (or ``latest_universal``) is read, or one checkpoint in it.

    Raises:
        CheckpointError: there is none, or it is of a kind that is not read: tensor-parallel, or with experts.
    """
    folder = _choose(path, tag)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    matches = [(name, _MODEL.fullmatch(name)) for name in names]
    models = {(int(m[2]), int(m[1] or 0)): folder / name for name, m in matches if m is not None}
    if not models:
        raise CheckpointError(f"{folder} is no checkpoint of DeepSpeed: it has no file ...mp_rank_00_model_states.pt")
    found = [(name, _OPTIM.fullmatch(name)) for name in names]
    optims = {(int(m[2]), int(m[1])): folder / name for name, m in found if m is not None}
    placed = [(name, _LAYER.fullmatch(name)) for name in names]
    layers = {int(m[1]): folder / name for name, m in placed if m is not None}
    files = Files(folder, models, optims, layers)
    if any(_EXPERT.search(name) for name in names):
        raise CheckpointError(f"{folder} holds experts in files of their own, which are not read")
    is_split = any(_SPLIT.fullmatch(name) for name in names) or (len(files.stages) > 1 and not layers)
    if is_split and not files.is_universal:
        raise CheckpointError(
            f"{folder} was saved by a tensor-parallel model, whose files do not say how weights are split; convert it "
            "with DeepSpeed's ds_to_universal and import what that writes"
        )
    return files


def _choose(path: Path, tag: str | None) -> Path:
    if tag is not None:
        return path / tag
    for marker in ("latest", "latest_universal"):
        file = path / marker
        if file.is_file():
            folder = path / file.read_text().strip()
            if folder.is_dir():
                return folder
    return path
