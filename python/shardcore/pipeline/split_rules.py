"""For each module that can be split: its forward, its input's gradient and its weights' gradients, as autograd takes
them.

A rule's gradients of the weights never read the weights, which may have been released by then (ZeRO-3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Pairs = list[tuple[nn.Parameter, torch.Tensor]]
Saved = tuple[torch.Tensor, ...]
aten = torch.ops.aten


class Rule:
    """What is known of one class of modules; ``saved`` is what its forward keeps besides its input."""

    def fits(self, module: Any) -> bool:
        """Whether this module's options allow it."""
        return True

    def takes(self, module: Any, x: torch.Tensor) -> bool:
        """Whether it covers this input."""
        return True

    def prepare(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """What comes before the weights, by autograd."""
        return x

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """The output, and what backward needs besides ``x``."""
        raise NotImplementedError

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        """The gradient of ``x``."""
        raise NotImplementedError

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        """The gradient of each parameter that takes one."""
        raise NotImplementedError


class _Linear(Rule):
    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return F.linear(x, module.weight, module.bias), ()

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        return _rows(grad).mm(module.weight).view(x.shape)

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        rows = _rows(grad)
        return _pairs(module, lambda: rows.t().mm(_rows(x)), lambda: rows.sum(0))


class _Conv1D(Rule):
    """Hugging Face's: a linear layer whose weight is [in, out]."""

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return torch.addmm(module.bias, _rows(x), module.weight).view(*x.shape[:-1], module.nf), ()

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        return _rows(grad).mm(module.weight.t()).view(x.shape)

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        rows = _rows(grad)
        return _pairs(module, lambda: _rows(x).t().mm(rows), lambda: rows.sum(0))


class _Embedding(Rule):
    def fits(self, module: Any) -> bool:
        return module.max_norm is None and not module.sparse

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return F.embedding(x, module.weight, module.padding_idx), ()

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        padding = -1 if module.padding_idx is None else module.padding_idx
        found = aten.embedding_dense_backward(grad, x, module.num_embeddings, padding, module.scale_grad_by_freq)
        return [(module.weight, found)]


class _Conv(Rule):
    def fits(self, module: Any) -> bool:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)

    def takes(self, module: Any, x: torch.Tensor) -> bool:
        return x.dim() == len(module.kernel_size) + 2

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        options = (module.stride, module.padding, module.dilation, False, module.output_padding, module.groups)
        return torch.convolution(x, module.weight, module.bias, *options), ()

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._backward(module, grad, x, module.weight, [True, False, False])[0]
        return found

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        mask = [False, module.weight.requires_grad, module.bias is not None and module.bias.requires_grad]
        found = self._backward(module, grad, x, x.new_empty(module.weight.shape), mask)
        return _pairs(module, lambda: found[1], lambda: found[2])

    def _backward(
        self, module: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> Any:
        sizes = None if module.bias is None else [module.out_channels]
        options = (module.stride, module.padding, module.dilation, False, module.output_padding, module.groups)
        return aten.convolution_backward(grad, x, weight, sizes, *options, mask)


class _LayerNorm(Rule):
    def fits(self, module: Any) -> bool:
        return module.weight is not None

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        output, mean, rstd = torch.native_layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
        return output, (mean, rstd)

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        weights = (module.weight, module.bias)
        found: torch.Tensor = self._backward(module, grad, x, saved, weights, [True, False, False])[0]
        return found

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        bias = None if module.bias is None else x.new_empty(module.bias.shape)
        weights = (x.new_empty(module.weight.shape), bias)
        found = self._backward(module, grad, x, saved, weights, [False, True, bias is not None])
        return _pairs(module, lambda: found[1], lambda: found[2])

    def _backward(
        self, module: Any, grad: torch.Tensor, x: torch.Tensor, saved: Saved, weights: Any, mask: list[bool]
    ) -> Any:
        return aten.native_layer_norm_backward(grad, x, module.normalized_shape, *saved, *weights, mask)


class _RMSNorm(Rule):
    """Only the product with the weight is split; what comes before has no weights."""

    def fits(self, module: Any) -> bool:
        return module.weight is not None

    def prepare(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = F.rms_norm(x, module.normalized_shape, None, module.eps)
        return found

    def forward(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return x * module.weight, ()

    def input_gradient(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = grad * module.weight
        return found

    def weight_gradients(self, module: Any, grad: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> Pairs:
        return [(module.weight, (grad * x).sum_to_size(module.weight.shape))]


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _Linear(),
    nn.Embedding: _Embedding(),
    nn.Conv1d: _Conv(),
    nn.Conv2d: _Conv(),
    nn.Conv3d: _Conv(),
    nn.LayerNorm: _LayerNorm(),
    nn.RMSNorm: _RMSNorm(),
}
_CONV1D = _Conv1D()


def rule_of(module: nn.Module) -> Rule | None:
    """The rule for a module; None for one that cannot be split, subclasses of those that can among them."""
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return _CONV1D
    rule = _RULES.get(kind)
    return rule if rule is not None and rule.fits(module) else None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _pairs(module: Any, weight: Any, bias: Any) -> Pairs:
    found = [(module.weight, weight())] if module.weight.requires_grad else []
    if module.bias is not None and module.bias.requires_grad:
        found.append((module.bias, bias()))
    return found
