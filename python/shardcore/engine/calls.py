"""How the engine calls its module: a batch that is a dict goes to a model that takes its entries as arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``module(*args, **kwargs)``; but ``call(module, (batch,), {})`` of a dict whose keys are all arguments of the
    module's forward spreads it over them, and returns the output's ``loss`` where there is one, as a pipeline does.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping) or not _takes(module, args[0]):
        return module(*args, **kwargs)
    output = module(**args[0])
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def _takes(module: nn.Module, batch: Mapping[Any, Any]) -> bool:
    """Whether every entry of the batch is an argument of the module, the first one among them."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return bool(known) and known[0] in batch and all(key in known for key in batch)
