"""Weight gradients apart from input gradients, module by module: the W of a split backward (zero bubble, Qi et al.
2024, section 2).

A module that can be split computes its input's gradient inside autograd's backward and leaves its weights' gradients to
a closure that runs later, by the very formulas that autograd uses. No graph is walked, and nothing is computed twice.
Modules that cannot be split compute both at once, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore.pipeline.split_rules import Pairs, Rule, rule_of

Closure = partial[Pairs]
"""Weight gradients of one module; its arguments are what is kept for them."""


class WeightGradients:
    """Where the closures of the backward that is running are collected."""

    def __init__(self, device: torch.device) -> None:
        self._open: list[Closure] | None = None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.num_split = self.num_whole = 0
        """Trainable elements in modules that are split, and in others."""

    @contextmanager
    def collected(self) -> Iterator[list[Closure]]:
        """Inside, split modules leave their closures in the list."""
        closures: list[Closure] = []
        self._open = closures
        try:
            yield closures
        finally:
            self._open = None

    def split(self, modules: Iterable[nn.Module]) -> None:
        """Split what can be split of these modules and all inside them, once; their ``forward`` is wrapped."""
        inner = dict.fromkeys(module for outer in modules for module in outer.modules())
        done: set[nn.Parameter] = set()
        for module in inner:
            params = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in done]
            done.update(params)
            rule = rule_of(module) if params and not _has_hooks(module) else None
            numel = sum(param.numel() for param in params)
            if rule is None:
                self.num_whole += numel
                continue
            self.num_split += numel
            original = module.forward
            module.forward = partial(self._forward, module, rule, original)

    def defer(self, closure: Closure) -> None:
        """Keep a closure for W; outside the program's backwards it runs at once, as autograd would."""
        if self._open is not None:
            self._open.append(closure)
            return
        for param, grad in closure():
            param.grad = grad if param.grad is None else param.grad + grad

    def _forward(self, module: nn.Module, rule: Rule, original: Callable[..., Any], x: torch.Tensor) -> Any:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not rule.takes(module, x):
            return original(x)
        if _has_hooks(module):
            return original(x)
        anchor = None if x.requires_grad else self._anchor
        return _Split.apply(rule.prepare(module, x), anchor, module, rule, self)


def _has_hooks(module: nn.Module) -> bool:
    """Whether autograd is to show the gradient of a parameter to somebody, who may change it."""
    return any(private.has_gradient_hook(param) for param in module.parameters(recurse=False))


class _Split(torch.autograd.Function):
    """A module's operation, of which backward computes the input's gradient only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, module: nn.Module, rule: Rule, sink: WeightGradients
    ) -> torch.Tensor:
        """The module's output; ``anchor`` makes it take a gradient where ``x`` does not."""
        output, saved = rule.forward(module, x)
        ctx.save_for_backward(x, *saved)
        ctx.module, ctx.rule, ctx.sink = module, rule, sink
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        """The input's gradient; the weights' are deferred."""
        module, rule = ctx.module, ctx.rule
        saved = ctx.saved_tensors
        ctx.sink.defer(partial(rule.weight_gradients, module, grad, *saved))
        found = rule.input_gradient(module, grad, *saved) if ctx.needs_input_grad[0] else None
        return found, None, None, None, None
