"""Weight gradients apart from input gradients, module by module: the W of a split backward.

A module that can be split computes its input's gradient inside autograd's backward and leaves its weights' gradients to
a closure that runs later, by the very formulas that autograd uses. No graph is walked, and nothing is computed twice.
Modules that cannot be split compute both at once, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Closure = Callable[[], list[tuple[nn.Parameter, torch.Tensor]]]


class WeightGradients:
    """Where the closures of the backward that is running are collected."""

    def __init__(self) -> None:
        self._open: list[Closure] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Closure]]:
        """Inside, split modules leave their closures in the list."""
        closures: list[Closure] = []
        self._open = closures
        try:
            yield closures
        finally:
            self._open = None
