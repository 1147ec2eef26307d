"""``partition="profile"``: what each layer takes, measured on the inputs of one micro-batch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from shardcore import comm, plan
from shardcore.mesh import Mesh
from shardcore.pipeline import values
from shardcore.pipeline.data import to_device
from shardcore.pipeline.layers import Builder, BuiltLayer, Layer
from shardcore.pipeline.meter import synchronize
from shardcore.pipeline.randomness import RandomKey, restored_randomness
from shardcore.pipeline.recompute import Recompute, run_layers

_NUM_RUNS = 3
Mail = tuple[bytes, list[torch.Tensor]]


def measure_layers(layers: Sequence[Layer], inputs: Any, mesh: Mesh, recompute: Recompute, seed: int) -> list[float]:
    """Seconds of forward and backward of every layer: the median of a few runs, and of the ranks.

    Each rank runs the whole chain, a layer after the other; one that is built from a spec is there only while it is
    measured, tied ones until the end. Layers, their gradients and torch's generators are left as they were. The loss is
    not measured. Collective over the mesh.
    """
    names = json.dumps([f"{layer.name} {layer.class_name}" for layer in layers])
    for axis in ("pp", "dp"):
        comm.agree_on("the pipeline's layers", names, names, mesh[axis], plan.first_difference)
    builder = Builder(layers, seed)
    mail = values.dump((to_device(inputs, mesh.device), {}), "the example's inputs")
    seconds = []
    with restored_randomness(mesh.device):
        for index in range(len(layers)):
            layer = builder.build(index)
            with _at(layer.module, mesh.device):
                key = RandomKey(seed, 0, 0)
                runs = [_run(layer, mail, key, mesh.device, recompute) for _ in range(_NUM_RUNS + 1)]
            seconds.append(median(taken for taken, _ in runs[1:]))  # the first run meets cold caches
            mail = runs[-1][1]
    for axis in ("dp", "pp"):  # what data-parallel ranks exchange with others must be alike
        by_rank = comm.exchange(seconds, mesh[axis], "seconds of layers")
        seconds = [median(each) for each in zip(*by_rank, strict=True)]
    return seconds


def _run(
    layer: BuiltLayer, mail: Mail, key: RandomKey, device: torch.device, recompute: Recompute
) -> tuple[float, Mail]:
    """Seconds of one forward and backward, and what the next layer takes."""
    inner, tensors = values.hand_over(*mail)
    value, held = values.load(inner, tensors)
    params = list(layer.module.parameters()) if isinstance(layer.module, nn.Module) else []
    synchronize(device)
    start = time.perf_counter()
    with torch.enable_grad():
        output = run_layers([layer], value, held, key, device, recompute)
    description, results = values.dump(output, f"output of layer {layer.name}")
    ends = [each for each in results if each.requires_grad]
    leaves = [each for each in [*tensors, *params] if each.requires_grad]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(each) for each in ends], allow_unused=True)
    synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, (description, [each.detach().requires_grad_(each.requires_grad) for each in results])


@contextmanager
def _at(module: Any, device: torch.device) -> Iterator[None]:
    """Inside, a module is on the device; afterwards it is where it was, and its buffers hold what they held."""
    if not isinstance(module, nn.Module):
        yield
        return
    home = next((param.device for param in module.parameters()), device)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to(device)
    try:
        yield
    finally:
        module.to(home)
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
