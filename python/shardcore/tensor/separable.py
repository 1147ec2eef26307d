"""Whether a block may be split between its projections: tried, not guessed.

A block can be split exactly if its output is the sum of what the parts of its weights give. Its forward is run with the
weights of each rank in turn, in this process, and compared with the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcore.tensor.layers import is_transposed
from shardcore.tensor.pieces import Range
from shardcore.tensor.regions import Region, num_inputs


def why_inseparable(region: Region) -> str:
    """Why the block, called with one tensor ``[1, 3, in_features]``, is not the sum of its parts; empty if it is."""
    module, last = region.module, region.leaving
    if last is None or not any(last.module is child for child in module.modules()):
        return "its last projection is not inside of it"
    weight: Any = last.module.weight
    draw = torch.Generator().manual_seed(0)
    shape = (1, 3, num_inputs(region.entering[0].module))
    x = torch.randn(shape, generator=draw).to(device=weight.device, dtype=weight.dtype)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            whole = _first(module(x))
            parts = [_part(region, rank, x) for rank in range(len(last.ranges))]
    except Exception as error:  # noqa: BLE001  # whatever it raises, it could not be tried
        return f"it could not be tried with one tensor ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
    finally:
        module.train(was_training)
    if not isinstance(whole, torch.Tensor):
        return "it returns no tensor"
    total = torch.stack(parts).sum(0)
    scale = float(whole.float().abs().max())
    tolerance = 100 * torch.finfo(whole.dtype).eps * len(parts)
    if float((total.float() - whole.float()).abs().max()) > tolerance * max(scale, 1e-30):
        return "its output is not the sum of what parts of its weights give"
    return ""


def _part(region: Region, rank: int, x: torch.Tensor) -> Any:
    values: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in region.module.named_modules()}
    for layer in region.projections:
        dim = 1 if is_transposed(layer.module) else 0
        weight, bias = (getattr(layer.module, each) for each in ("weight", "bias"))
        is_last = layer is region.leaving
        values[f"{names[layer.module]}.weight"] = _take(weight, 1 - dim if is_last else dim, layer.ranges[rank])
        if bias is not None:
            whole = bias if rank == 0 else torch.zeros_like(bias)
            values[f"{names[layer.module]}.bias"] = whole if is_last else _take(bias, 0, layer.ranges[rank])
    with attributes_set(region.module, region.attributes[rank]):
        return _first(torch.func.functional_call(region.module, values, (x,)))


def _first(output: Any) -> Any:
    """What a block returns; attention may return its weights, too."""
    return output[0] if isinstance(output, tuple) and output else output


def _take(tensor: torch.Tensor, dim: int, ranges: list[Range]) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


@contextmanager
def attributes_set(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """The module has these attributes inside."""
    before = {name: module.__dict__[name] for name in values if name != "config"}
    module.__dict__.update({name: values[name] for name in before})
    try:
        yield
    finally:
        module.__dict__.update(before)
