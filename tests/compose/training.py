"""One recipe twice: over its mesh, and as a plain loop in one process; and the bytes that it holds on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardcore as sc
from compose.recipes import Recipe
from shardcore.protocols import find_root, part_of_whole
from zero.twin import DTYPES, apply, collect

STEPS, CLIP, LOSS_SCALE = 3, 0.5, 256.0
VOCABULARY, LENGTH = 32, 8
TOLERANCE = {
    # Sums over ranks and micro-batches are taken in another order.
    "fp32": 2e-5,
    # Every partial sum of a split layer is rounded to 8 (11) bits once more.
    "bf16": 3e-2,
    "fp16": 6e-3,
}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
EPSILON = {"fp32": 1e-4, "bf16": 1e-3, "fp16": 1e-3}
"""Above the rounding of gradients, which Adam would turn into whole steps where the true gradient is zero."""
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


@dataclass(kw_only=True)
class Trained:
    """What a run left."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def build(recipe: Recipe) -> nn.Module:
    """The model in fp32; the same on every rank. With few bits experts are all chosen, as rounding moves a choice."""
    import transformers

    torch.manual_seed(0)
    if recipe.model == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))
    elif recipe.model == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
        rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **rates))
    else:
        experts = {"num_local_experts": 4 if recipe.precision == "fp32" else 2, "num_experts_per_tok": 2}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_LLAMA, **experts))
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3) if param.dim() > 1 else param.add_(0.1 * torch.randn_like(param))
    return model.train()


def batch(step: int, index: int) -> dict[str, torch.Tensor]:
    """A micro-batch by its place in the step: every one has as many labels, so each counts the same."""
    draw = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw)
    return {"input_ids": ids, "labels": ids}


def train_alone(recipe: Recipe) -> Trained:
    """The reference: one process, fp32 masters beside 16-bit parameters."""
    model = build(recipe)
    dtype, scale = DTYPES[recipe.precision], LOSS_SCALE if recipe.precision == "fp16" else 1.0
    for param in model.parameters():
        param.data = param.data.to(dtype)
    trained = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(masters, eps=EPSILON[recipe.precision], **OPTIONS)
    run, num = Trained(), recipe.num_microbatches * recipe.data_world
    for step in range(STEPS):
        total = 0.0
        for i in range(num):
            loss = model(**batch(step, i), use_cache=False).loss
            (loss * scale / num).backward()
            collect(trained, masters, 1.0)
            total += float(loss.detach()) / num
        run.norms.append(apply(optimizer, trained, masters, CLIP, scale))
        run.losses.append(total)
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return run


def make(recipe: Recipe, folder: str) -> tuple[nn.Module, sc.Mesh, Any]:
    """The module of this rank, its mesh and its optimizer. Collective."""
    sizes = {"pp": recipe.num_stages, "tp": recipe.num_tensor, "cp": recipe.num_context, "ep": recipe.num_expert}
    mesh = sc.Mesh(**sizes, replicate=recipe.copies, device="cpu")
    module = build(recipe)
    if recipe.num_tensor * recipe.num_expert > 1:
        sc.tensor.parallelize(module, mesh, sequence=recipe.sequence == "sp")
    if recipe.num_context > 1:
        sc.tensor.context_parallel(module, mesh, recipe.context)
    activation = _activation(recipe, mesh)
    if activation is not None:
        sc.activation.wrap(module, **activation)
    if recipe.pp == "pp2":
        module = sc.pipeline.Pipeline(module, mesh, schedule=recipe.schedule, num_microbatches=recipe.num_microbatches)
    precision = sc.Precision(
        param=None if recipe.precision == "fp32" else recipe.precision,
        loss_scale=LOSS_SCALE if recipe.precision == "fp16" else None,
    )
    sc.shard(module, mesh, stage=recipe.stage, precision=precision, offload=_offload(recipe, folder))
    optimizer = sc.optimizer("adamw", module, max_grad_norm=CLIP, eps=EPSILON[recipe.precision], **OPTIONS)
    return module, mesh, optimizer


def _activation(recipe: Recipe, mesh: sc.Mesh) -> dict[str, Any] | None:
    """What ``sc.activation.wrap`` is given."""
    choices: dict[str, dict[str, Any] | None] = {
        "keep": None,
        "full": {},
        "selective": {"policy": "selective"},
        "host": {"offload": "cpu"},
        "parts": {"partition": mesh["tp"]},
    }
    return choices[recipe.activation]


def _offload(recipe: Recipe, folder: str) -> sc.Offload | None:
    homes: dict[str, dict[str, Any]] = {
        "cpu": {"states": "cpu", "grads": "cpu"},
        "nvme": {"states": "nvme", "path": folder, "tile_numel": 500},
        "params": {"params": "cpu", "states": "cpu", "grads": "cpu"},
    }
    return None if recipe.offload == "device" else sc.Offload(**homes[recipe.offload])


def check(recipe: Recipe, alone: Trained, folder: str) -> None:
    """On each rank: losses, norms, parameters are the reference's, and the bytes are the formula's."""
    module, mesh, optimizer = make(recipe, folder)
    near = TOLERANCE[recipe.precision]
    for step in range(STEPS):
        loss = backward(recipe, module, mesh, step)
        optimizer.step()
        assert optimizer.step_was_applied
        check_bytes(recipe, module, optimizer)
        optimizer.zero_grad()
        torch.testing.assert_close(loss, alone.losses[step], rtol=near, atol=near)
        torch.testing.assert_close(optimizer.grad_norm, alone.norms[step], rtol=near, atol=near)
    with sc.summon(module):
        for name, param in module.named_parameters():
            expected = part_of_whole(param, alone.parameters[name])
            torch.testing.assert_close(
                param.detach(), expected, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}"
            )


def backward(recipe: Recipe, module: nn.Module, mesh: sc.Mesh, step: int) -> float:
    """The gradients of one step; returns the mean loss over all micro-batches and data-parallel ranks. Collective."""
    indices = [i * mesh.data_world + mesh.data_rank for i in range(recipe.num_microbatches)]
    if isinstance(module, sc.pipeline.Pipeline):
        return float(module.train_batch(iter([batch(step, i) for i in indices])))
    total = torch.zeros(())
    for i in indices:
        loss = module(**batch(step, i), use_cache=False).loss / len(indices)
        loss.backward()
        total += loss.detach()
    return float(sc.comm.sum_over_ranks(total, mesh["dp"], "loss")) / mesh.data_world


def num_shards(recipe: Recipe, group: Any) -> int:
    """Ranks over which the formula cuts a group: the two of a copy, of which each may have other experts, and all that
    share their sequences.
    """
    has_experts = {".experts." in slot.name for slot in group.slots}
    assert len(has_experts) == 1 or recipe.num_expert == 1, "experts and other parameters lie over other ranks"
    copies = recipe.num_expert if has_experts == {True} else 1
    return 2 // copies * recipe.num_context if recipe.stage else 1


def formula(recipe: Recipe, numels: list[tuple[int, int]], own_numel: int) -> dict[str, float]:
    """Bytes of each state on a rank whose stages and tensor parts have so many parameters in as many shards: ZeRO's
    table, for parameters, gradients in fp32, masters where parameters have 16 bits or states rest elsewhere than they,
    and Adam's two states. These have no padding, so they are those of ``own_numel`` elements, the rank's share.

    Args:
        numels: (elements, shards) of each group.
    """
    wide = recipe.precision == "fp32"
    whole, share = sum(numel for numel, _ in numels), sum(numel / shards for numel, shards in numels)
    masters = 0 if wide and recipe.offload in ("device", "params") else 4 * share
    return {
        "parameters": (4 if wide else 2) * (share if recipe.stage == 3 else whole),
        "gradients": 4 * (share if recipe.stage >= 2 else whole),
        "states": 0 if recipe.offload == "nvme" else masters + 8 * own_numel,
    }


def check_bytes(recipe: Recipe, module: nn.Module, optimizer: Any) -> None:
    """What lives between ``step`` and ``zero_grad``, each storage once, with the padding of the groups."""
    numels, without_padding, own_numel = [], 0, 0
    groups = find_root(module).groups
    for group in groups:
        numel, shards = sum(slot.param.numel() for slot in group.slots), num_shards(recipe, group)
        padded_numel = group.layout.padded_numel
        assert numel <= padded_numel <= numel + shards * 128 + 8 * len(group.slots)
        ranges = [group.local_range(slot) for slot in group.slots]
        own = sum(stop - start for start, stop, _ in ranges)
        assert sum(sc.comm.exchange(own, group.shard_axis, "shares")) == numel
        numels.append((padded_numel, shards))
        without_padding += numel
        own_numel += own
    assert without_padding == sum(param.numel() for param in module.parameters())
    found = bytes_of(groups, optimizer, on_disk=recipe.offload == "nvme")
    for state, nbytes in formula(recipe, numels, own_numel).items():
        assert found[state] == nbytes, f"{state}: {found[state]} bytes, the formula gives {nbytes:g}"


def bytes_of(groups: Any, optimizer: Any, *, on_disk: bool) -> dict[str, int]:
    """Bytes of parameters, gradients and states, a storage that serves two counting for the first."""
    tensors = {
        "parameters": [t for group in groups for t in (group.full, group.own)],
        "gradients": [t for group in groups for whole in (True, False) for t in group.grads.buffers(whole=whole)],
        "states": [] if on_disk else [*(group.master for group in groups), *optimizer.states()],
    }
    seen: set[int] = set()
    found = {}
    for state, held in tensors.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}
        found[state] = sum(s.nbytes() for key, s in storages.items() if key not in seen)
        seen |= storages.keys()
    return found
