"""Checkpoints with the engine's names and defaults: tags after steps, ``latest``, ``(None, None)`` for none."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardcore import checkpoint, comm, zero
from shardcore.errors import ConfigError, RankMismatchError, StorageError
from shardcore.protocols import find_pipeline

if TYPE_CHECKING:
    from torch import nn

    from shardcore.config import Config
    from shardcore.mesh import Mesh
    from shardcore.optim import ShardedOptimizer

_log = logging.getLogger("shardcore")
PathLike = str | os.PathLike[str]
_SCRIPT = '''\
"""Whole fp32 weights of the checkpoints in this folder: python zero_to_fp32.py . OUTPUT_DIR (--help says more)."""

from shardcore.deepspeed.utils.zero_to_fp32 import main

raise SystemExit(main())
'''


class Checkpoints:
    """Mixed into the engine."""

    module: nn.Module
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    config: Config
    mesh: Mesh
    global_steps: int
    global_samples: int
    micro_steps: int

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the training into ``save_dir/tag``; every rank calls it. See :func:`shardcore.checkpoint.save`.

        Args:
            tag: None for ``global_step<N>``. Where ranks give different ones, ``checkpoint.tag_validation`` of the
                configuration decides: "Fail" raises, "Warn" and "Ignore" take the first rank's.
            client_state: plain values, given back by :meth:`load_checkpoint`; the first rank's count.
            save_latest: let the file ``latest`` name it.

        Raises:
            RankMismatchError: tags differ under "Fail"; or not all ranks called it.
            StorageError, CheckpointError, StateError: as :func:`shardcore.checkpoint.save`, on every rank.
        """
        tag = self._agreed_tag(str(tag) if tag is not None else f"global_step{self.global_steps}")
        checkpoint.save(
            save_dir,
            self.module,
            self.optimizer,
            self.lr_scheduler,
            client_state if client_state is not None else {},
            tag,
            data=self._position_in_data(),
            parts={"engine": _Counters(self)},
            exclude_frozen=exclude_frozen_parameters,
            save_latest=save_latest,
        )
        if self.mesh.everyone.rank == 0:
            _leave_script(Path(save_dir))
        return True

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` saved, on any number of ranks and at any stage; every rank calls it.

        Args:
            tag: None for the one that ``latest`` names, or, where that was never finished, the newest complete one.
            load_module_strict: names that are only in the model, or only in the checkpoint, are an error.
            load_module_only: weights and buffers alone; steps, optimizer, schedule and random numbers stay.

        Returns:
            (folder of the checkpoint, client state); (None, None) where no tag is given and ``load_dir`` holds none.

        Raises:
            ConfigError: ``custom_load_fn`` is given.
            CheckpointError: the tag does not exist, or what :func:`shardcore.checkpoint.load` says.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported: load with load_module_strict=False, and copy "
                "what is left by hand inside shardcore.summon(engine.module, writeback=True)"
            )
        if tag is None and not self._any_rank_sees_one(Path(load_dir)):
            _log.warning("load_checkpoint: %s holds no complete checkpoint, so nothing is loaded", load_dir)
            return None, None
        whole = not load_module_only
        with_optimizer = whole and load_optimizer_states
        found = checkpoint.load(
            load_dir,
            self.module,
            self.optimizer if with_optimizer else None,
            self.lr_scheduler if whole and load_lr_scheduler_states else None,
            None if tag is None else str(tag),
            load_module_strict,
            data=self._position_in_data() if whole else None,
            parts={"engine": _Counters(self)} if whole else None,
            rng=whole,
        )
        return str(found.report.path), dict(found)

    def save_16bit_model(
        self,
        save_dir: PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights and buffers, in the dtype of the parameters, into one file by ``torch.save``.
        Every rank calls it; the first writes, and a file that was there stays whole if that fails.
        ``shardcore.checkpoint.to_hf`` makes safetensors files of any checkpoint instead, in little memory.

        Of a pipeline, every rank puts its part of the weights (masters, where there are such) aside in ``save_dir``,
        which all ranks must see, and the first makes the file of them, one tensor at a time.

        Returns:
            True.

        Raises:
            ConfigError: the file name says that it is no pickle.
            StorageError: on every rank, if the disk is full or refuses.
        """
        if save_filename.endswith(".safetensors"):
            raise ConfigError(
                f"save_16bit_model(save_filename={save_filename!r}) writes by torch.save; call save_checkpoint and "
                "shardcore.checkpoint.to_hf for safetensors files, or name it pytorch_model.bin"
            )
        file, is_first, problem = Path(save_dir, save_filename), self.mesh.everyone.rank == 0, None
        if find_pipeline(self.module) is not None:
            problem = self._write_from_stages(file, exclude_frozen_parameters)
        else:
            state = zero.state_dict(self.module, rank0_only=True)
            if is_first:
                weights = _weights_of(self.module, state, exclude_frozen_parameters)
                problem = _write(file, lambda aside: torch.save(weights, aside))
        told = comm.exchange(problem, self.mesh.everyone, "save_16bit_model")
        if told[0] is not None:
            number, text = told[0]
            raise StorageError(number, f"save_16bit_model: rank 0 could not write {file}: {text}")
        return True

    save_fp16_model = save_16bit_model

    def _write_from_stages(self, file: Path, exclude_frozen: bool) -> tuple[int, str] | None:
        """Put every rank's part aside and, on the first, make one file of them. Collective; returns what went wrong
        there.
        """
        parts = file.with_name(f".{file.name}.parts")

        def write(aside: Path) -> None:
            out, everything = parts / "out", sys.maxsize
            (made,) = checkpoint.to_torch(parts, out, max_shard_nbytes=everything, exclude_frozen=exclude_frozen)
            made.rename(aside)

        is_first = self.mesh.everyone.rank == 0
        try:
            if is_first:
                shutil.rmtree(parts, ignore_errors=True)  # of a call that was killed
            checkpoint.save(parts, self.module, tag="weights", exclude_frozen=exclude_frozen)
            return _write(file, write) if is_first else None
        finally:
            if is_first:
                shutil.rmtree(parts, ignore_errors=True)

    def _agreed_tag(self, tag: str) -> str:
        """The first rank's, unless the configuration wants all to be equal. Collective."""
        told = comm.exchange(tag, self.mesh.everyone, "tag of a checkpoint")
        if any(other != told[0] for other in told):
            text = f"save_checkpoint: ranks gave different tags ({', '.join(sorted(set(told)))})"
            if self.config.checkpoint.tag_validation == "Fail":
                raise RankMismatchError(f"{text}; give the same on every rank, or none")
            if self.config.checkpoint.tag_validation == "Warn":
                _log.warning("%s; the first rank's, %s, is used on all", text, told[0])
        return str(told[0])

    def _any_rank_sees_one(self, folder: Path) -> bool:
        """Whether there is a complete checkpoint, or this is one, or DeepSpeed's, of which loading says what to do;
        ranks that disagree learn so when they load.
        """
        seen = any(number is not None for *_, number, _ in checkpoint.list_checkpoints(folder))
        seen = seen or (folder / "complete").exists() or checkpoint.looks_like_deepspeed(folder)
        return any(comm.exchange(seen, self.mesh.everyone, "whether there is a checkpoint"))

    def _position_in_data(self) -> Any:
        """The sampler of the engine's loader, if it knows its position."""
        sampler = getattr(self.training_dataloader, "sampler", None)
        return sampler if hasattr(sampler, "load_state_dict") else None


def _leave_script(folder: Path) -> None:
    """Where people of DeepSpeed look for it: the program that makes whole weights of the folder's checkpoints."""
    path = folder / "zero_to_fp32.py"
    with suppress(OSError):  # the checkpoint is complete without it
        if not path.exists():
            path.write_text(_SCRIPT)


def _weights_of(module: nn.Module, state: dict[str, torch.Tensor], exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """The state without what is to be left out; tied weights are one tensor under all their names, as torch saves
    them.
    """
    weights, first_names = dict(state), dict[int, str]()
    for name, param in module.named_parameters(remove_duplicate=False):
        if exclude_frozen and not param.requires_grad:
            weights.pop(name, None)
        elif name in weights:
            weights[name] = weights[first_names.setdefault(id(param), name)]
    return weights


def _write(file: Path, write: Callable[[Path], object]) -> tuple[int, str] | None:
    """Write aside and rename; returns what went wrong."""
    aside = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        aside.rename(file)
    except (OSError, RuntimeError) as error:  # torch's writer raises the second when a disk is full
        with suppress(OSError):
            aside.unlink()
        return getattr(error, "errno", None) or errno.EIO, str(error)
    return None


class _Counters:
    """What an engine counts, as a part of a checkpoint."""

    def __init__(self, engine: Checkpoints) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Steps and samples."""
        engine = self._engine
        names = ("global_steps", "global_samples", "micro_steps")
        return {name: getattr(engine, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from there."""
        for name, value in state_dict.items():
            setattr(self._engine, name, int(value))
