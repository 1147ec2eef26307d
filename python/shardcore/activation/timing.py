"""What a recomputed region costs: the time of its first run and of each other one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from shardcore.activation.settings import Settings

_log = logging.getLogger("shardcore")


class Timer:
    """Runs a region, waits for the device around it, logs how long it took; each as the settings say.

    A run in backward ends when the last tensor that is needed has been computed again.
    """

    def __init__(self, region: Callable[..., Any], name: str, settings: Settings) -> None:
        self._region = region
        self._name = name or "a region"
        self._settings = settings
        self._has_run = False

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the region."""
        start = self._now()
        try:
            return self._region(*inputs)
        finally:
            elapsed_ms = (self._now() - start) * 1e3
            which, self._has_run = "recomputed" if self._has_run else "computed", True
            if self._settings.profile:
                _log.info("activation checkpointing: %s %s in %.3f ms", self._name, which, elapsed_ms)

    def _now(self) -> float:
        if self._settings.synchronize and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()
