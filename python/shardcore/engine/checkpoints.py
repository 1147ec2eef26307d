"""Checkpoints with the engine's names and defaults: tags after steps, ``latest``, ``(None, None)`` for none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore import checkpoint, comm
from shardcore.errors import ConfigError, RankMismatchError

if TYPE_CHECKING:
    from torch import nn

    from shardcore.config import Config
    from shardcore.mesh import Mesh
    from shardcore.optim import ShardedOptimizer

_log = logging.getLogger("shardcore")
PathLike = str | os.PathLike[str]


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
        """Whether there is a complete checkpoint, or this is one; ranks that disagree learn so when they load."""
        seen = any(number is not None for *_, number, _ in checkpoint.list_checkpoints(folder))
        seen = seen or (folder / "complete").exists()
        return any(comm.exchange(seen, self.mesh.everyone, "whether there is a checkpoint"))

    def _position_in_data(self) -> Any:
        """The sampler of the engine's loader, if it knows its position."""
        sampler = getattr(self.training_dataloader, "sampler", None)
        return sampler if hasattr(sampler, "load_state_dict") else None


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
