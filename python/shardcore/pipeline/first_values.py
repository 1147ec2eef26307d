"""Memory and first values for the parts of a model that was built on the meta device, on the rank that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError


class FirstValues:
    """Fills modules by the model's own rules. A parameter that several of them share is one parameter.

    Args:
        model: a Hugging Face model, whose ``_init_weights`` is called for each module; modules of others are filled by
            their ``reset_parameters``.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._init: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
        self._device = device
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def fill(self, modules: Iterable[nn.Module], seed: int) -> None:
        """Replace what is on the meta device in these modules and all inside them; torch's generators are left alone.

        Raises:
            ConfigError: something has no values then; the message names it.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for outer in modules:
                for name, module in reversed(list(outer.named_modules())):  # children first
                    self.fill_own(module, name)

    def fill_own(self, module: nn.Module, name: str) -> None:
        """As :meth:`fill`, without what is inside, from torch's current random state."""
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        empty = [key for key, tensor in own.items() if tensor is not None and tensor.is_meta]
        if not empty:
            return
        known = {key: param for key, param in module._parameters.items() if param in self._made}
        for key in empty:
            self._replace(module, key)
        before = {key: getattr(module, key).clone() for key in known}
        self._call(module)
        whole = {key: getattr(module, key).clone() for key in empty if not own[key].is_floating_point()}
        if whole:  # numbers without a NaN: written only if another start gives the same
            for key in whole:
                getattr(module, key).fill_(1)
            self._call(module)
        for key, value in before.items():
            getattr(module, key).copy_(value)
        left = [key for key in empty if key not in known and getattr(module, key).isnan().any()]
        left += [key for key, value in whole.items() if not torch.equal(value, getattr(module, key))]
        if left:
            raise ConfigError(
                f"Pipeline: {', '.join(left)} of {name or type(module).__name__!r} ({type(module).__name__}) is on the "
                "meta device, and the model does not say how it is initialised; build the model on the CPU"
            )

    def _call(self, module: nn.Module) -> None:
        if self._init is not None:
            self._init(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]

    def _replace(self, module: nn.Module, key: str) -> None:
        param = module._parameters.get(key)
        if param is None:
            module._buffers[key] = self._empty(module._buffers[key])
        else:
            if param not in self._made:
                self._made[param] = nn.Parameter(self._empty(param), requires_grad=param.requires_grad)
            module._parameters[key] = self._made[param]

    def _empty(self, like: Any) -> torch.Tensor:
        """NaN wherever a value will be missing, as far as the dtype has one."""
        fill = float("nan") if like.is_floating_point() else 0
        return torch.full(like.shape, fill, dtype=like.dtype, device=self._device)
