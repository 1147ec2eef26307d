"""Parts of a model that run its own forward, with everything else taken out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


class ModelPart(nn.Module):
    """Some modules of a model, under their names there, and how they act on the keyword arguments that travel.

    Args:
        around: the copy of the model that ``act`` runs; its modules that belong to no part follow the part's mode.
    """

    def __init__(
        self, parts: dict[str, nn.Module], act: Callable[[dict[str, Any]], Any], around: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._modules.update(parts)
        self.class_name = type(next(iter(parts.values()))).__name__
        self._acts = [act]  # in lists, as what they refer to is no child of this module
        own = set(self.modules())
        self._around = [] if around is None else [module for module in around.modules() if module not in own]

    def forward(self, value: Any) -> Any:
        """The arguments for the next part, or the logits."""
        training = next(iter(self._modules.values())).training  # type: ignore[union-attr]
        for module in self._around:
            module.training = training
        return self._acts[0](dict(value) if isinstance(value, Mapping) else {"input_ids": value})


def replaced(module: Any, others: Mapping[str, nn.Module]) -> Any:
    """A shallow copy with other modules at some paths; whatever lies at or beside these paths is shared."""
    clone: Any = object.__new__(type(module))  # copy.copy would ask the model, which may refuse to be copied
    children: dict[str, Any] = dict(module._modules)
    for name in dict.fromkeys(path.partition(".")[0] for path in others):
        below = {path.partition(".")[2]: other for path, other in others.items() if path.partition(".")[0] == name}
        children[name] = below[""] if "" in below else replaced(children[name], below)
    clone.__dict__.update(module.__dict__, _modules=children)
    return clone


def move_buffers(model: nn.Module, parts: Iterable[nn.Module], device: torch.device) -> None:
    """Move the buffers of modules outside ``parts``, which several parts use: rotary frequencies, positions."""
    inside = {module for part in parts for module in part.modules()}
    for module in model.modules():
        if module not in inside:
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
