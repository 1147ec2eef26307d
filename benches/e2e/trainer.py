"""One rank of one arm: the same model, the same batches, some steps whenever it is woken."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.processes import THREADS_PER_RANK, Handler

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained; the same in every arm."""

    model: str
    batch: int
    """Sequences per rank."""
    seq: int
    seed: int = 0


def make_handler(arm: str, settings: Settings) -> Handler:
    """Build the arm in this rank; the handler then answers ``steps`` and ``first step``."""
    return _Trainer(arm, settings).handle


class _Trainer:
    def __init__(self, arm: str, settings: Settings) -> None:
        sys.path.insert(0, str(EXAMPLES))
        import torch
        from benches.e2e import arms

        import gpt

        torch.set_num_threads(THREADS_PER_RANK)
        torch.manual_seed(settings.seed)
        model = gpt.GPT(gpt.PRESETS[settings.model])
        self.num_params = sum(p.numel() for p in model.parameters())
        self._step = arms.build(arm, model, settings.batch)
        self._settings = settings
        self._loss = float("nan")
        rank = torch.distributed.get_rank()
        self._generator = torch.Generator().manual_seed(settings.seed + 1 + rank)

    def handle(self, command: str, argument: Any) -> Any:
        """``steps``: n -> (seconds per step over n steps after one that is not counted, last loss, parameters)."""
        if command == "steps":
            return self._run(int(argument)), self._loss, self.num_params
        if command == "first step":
            return float(self._step(self._batch()))
        raise ValueError(f"unknown command {command!r}")

    def _run(self, num_steps: int) -> float:
        """The first step after waking refills caches and is not counted."""
        import torch.distributed as dist

        self._step(self._batch())
        dist.barrier()
        batches = [self._batch() for _ in range(num_steps)]
        start = time.perf_counter()
        for tokens in batches:
            loss = self._step(tokens)
        self._loss = float(loss)
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    def _batch(self) -> Any:
        import torch

        shape = (self._settings.batch, self._settings.seq + 1)
        return torch.randint(256, shape, generator=self._generator)
