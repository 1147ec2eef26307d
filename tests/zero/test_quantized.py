"""Training with quantised gathers and reductions: what stays exact, is sent, is noticed, and how well it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import comm
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from zero.following import rows
from zero.models import Block, MixedDtype
from zero.twin import Recipe, train_sharded, whole_parameters

WIDTH = 64
SAVINGS: dict[str, dict[str, Any]] = {
    "gather": {"gather": "int8"},
    "int8": {"reduce": "int8"},
    "int4": {"reduce": "int4"},
    "all": {"gather": "int8", "reduce": "int4", "secondary": 2, "hierarchical": True},
}


def linears(mesh: sc.Mesh, dtype: str | None = None, **saving: Any) -> nn.Module:
    """Three units, of which none stays from forward to backward but the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    return sc.shard(
        model,
        mesh,
        units=[nn.Linear],
        precision=sc.Precision(param=dtype),
        prefetch=sc.zero.PrefetchLimits(max_reuse_nbytes=0),
        communication=sc.Communication(**saving),
    )


@pytest.mark.parametrize("savings", [["int4"], ["all"], pytest.param(["gather", "int8"], marks=pytest.mark.full)])
@spmd(world=4)
def test_losses_stay_within_a_percent(savings: list[str]) -> None:
    """A GPT over 30 steps; the sum of the last ten losses against that of the run in full."""
    mesh = sc.Mesh(device="cpu", ranks_per_node=2)
    recipe = Recipe(case="gpt", steps=30, clip=1.0)
    plain = train_sharded(recipe, mesh)
    for saving in savings:
        found = train_sharded(recipe, mesh, communication=sc.Communication(**SAVINGS[saving]))
        assert found.losses != plain.losses
        assert sum(found.losses[-10:]) == pytest.approx(sum(plain.losses[-10:]), rel=0.01)


@pytest.mark.parametrize("dtype", [None, "bf16"])
@spmd(world=2)
def test_the_owners_shard_is_never_the_rounded_one(dtype: str | None) -> None:
    mesh = sc.Mesh(device="cpu")
    model = linears(mesh, dtype, gather="int8")
    torch.manual_seed(0)
    start = {f"{i}.weight": nn.Linear(WIDTH, WIDTH, bias=False).weight.detach() for i in range(3)}
    start = {name: value.to(torch.bfloat16) if dtype else value for name, value in start.items()}
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16 if dtype else None)
    with torch.no_grad():
        seen = model(x)
    exact = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]).to(x.dtype)
    exact.load_state_dict(start)
    assert not torch.equal(seen, exact(x)), "the forward computes with rounded weights"
    everyone = comm.exchange(seen.float().tolist(), mesh["dp"], "test")
    assert everyone[0] == everyone[1], "all ranks compute with the same rounded weights"
    assert_bitwise(whole_parameters(model), start)
    for slot in (slot for group in find_root(model).groups for slot in group.slots):
        piece, begin, end = sc.local_shard(slot.param)
        assert_bitwise(piece.clone(), start[slot.name].flatten()[begin:end])
    state = sc.state_dict(model, rank0_only=False)
    assert_bitwise(state, start)
    with sc.summon(model, writeback=True):
        pass
    assert_bitwise(whole_parameters(model), start)


@spmd(world=2)
def test_values_that_are_read_inside_the_forward_can_be_exact() -> None:
    """Where rounded values are in use, ``summon`` gathers anew."""
    mesh = sc.Mesh(device="cpu")
    model = linears(mesh, gather="int8")
    start = whole_parameters(model)
    found = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        with sc.summon(model):
            found.update({name: param.detach().clone() for name, param in model.named_parameters()})

    model[1].register_forward_hook(look)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert_bitwise(found, start)


@spmd(world=4)
def test_values_that_are_set_are_exact_and_used() -> None:
    """By name, by ``load_state_dict`` and under ``summon``: second shards and rounded values follow."""
    mesh = sc.Mesh(device="cpu", ranks_per_node=2)
    model = linears(mesh, gather="int8", secondary=2)
    x = torch.ones(1, WIDTH)

    def check_holds(scale: float) -> None:
        """All weights are ``scale`` times the unit matrix: rounding to codes leaves it alone."""
        unit = torch.eye(WIDTH) * scale
        with torch.no_grad():
            torch.testing.assert_close(model(x), x * scale**3, rtol=1e-6, atol=0)
        for param in model.parameters():
            assert_bitwise(sc.zero.full_master(param), unit)

    for param in model.parameters():
        sc.zero.set_full_master(param, torch.eye(WIDTH) * 2.0)
    check_holds(2.0)
    model.load_state_dict({f"{i}.weight": torch.eye(WIDTH) * 3.0 for i in range(3)})
    check_holds(3.0)
    with sc.summon(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.div_(2.0)
    check_holds(1.5)


@pytest.mark.parametrize(("reduce", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("dtype", [None, "bf16"])
@spmd(world=4)
def test_bytes_are_codes_and_scales(reduce: str, bits: int, dtype: str | None) -> None:
    mesh = sc.Mesh(device="cpu")
    model = linears(mesh, dtype, gather="int8", reduce=reduce)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        comm.reset_traffic()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard_numel, others = WIDTH * WIDTH // 4, 3
    scales = 4 * math.ceil(shard_numel / 256)
    sent = comm.traffic()
    assert sent["gather"] == (3 + 2) * others * (shard_numel + scales)
    assert sent["swap"] == 3 * others * (shard_numel * bits // 8 + scales)
    assert "reduce" not in sent


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("saving", ["int8", "int4"])
@spmd(world=2)
def test_one_infinite_gradient_on_one_rank_skips_the_step_everywhere(stage: int, saving: str) -> None:
    mesh = sc.Mesh(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    sc.shard(
        model,
        mesh,
        stage=stage,
        precision=sc.Precision(skip_nonfinite=True),
        communication=sc.Communication(**SAVINGS[saving]),
    )
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    for step in range(4):
        factor = math.inf if step == 1 and mesh.rank == 0 else 1.0
        (model(rows(step, mesh.rank, 4, 32)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_applied == (step != 1)
    assert bool(torch.isfinite(whole_parameters(model)["weight"]).all())


@spmd(world=2)
def test_errors_of_another_loss_scale_are_dropped() -> None:
    """Gradients of two scales: what was kept of the first must not enter the second, 2^10 times too large."""
    mesh = sc.Mesh(device="cpu")
    torch.manual_seed(0)
    model = sc.shard(nn.Linear(32, 32, bias=False), mesh, stage=2, communication=sc.Communication(reduce="int4"))
    scale = sc.optim.ConstantScale(1024.0)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.0, loss_scale=scale)
    optimizer.track_grad_norm = True
    norms = []
    for _ in range(2):
        model(rows(0, 0, 4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
        optimizer.loss_scale = sc.optim.ConstantScale(1.0)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@spmd(world=2)
def test_fp64_parameters_travel_in_full() -> None:
    mesh = sc.Mesh(device="cpu")
    model = sc.shard(MixedDtype(), mesh, communication=sc.Communication(gather="int8", reduce="int8"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    comm.reset_traffic()
    model(rows(0, mesh.rank, 4, 6)).square().mean().backward()
    optimizer.step()
    assert comm.traffic()["reduce"] > 0
    assert comm.traffic()["swap"] > 0


@spmd(world=2)
def test_frozen_weights_alone() -> None:
    """Only the frozen block is rounded."""
    mesh = sc.Mesh(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    sc.shard(model, mesh, units=[Block], communication=sc.Communication(gather_frozen="int8"))
    rounds = {group.trainable: group._gathering.route.rounds_gathers for group in find_root(model).groups}
    assert rounds == {False: True, True: False}


@pytest.mark.parametrize("grid", [{"replicate": 2}, {"replicate": 2, "replicate_inside": True}])
@spmd(world=4)
def test_sixteen_bit_gradients_travel_so_between_copies_too(grid: dict[str, Any]) -> None:
    mesh = sc.Mesh(**grid, device="cpu")
    sent = {}
    for reduce in (None, "bf16"):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        sc.shard(model, mesh, stage=2, precision=sc.Precision(reduce=reduce))
        comm.reset_traffic()
        model(torch.ones(1, WIDTH)).sum().backward()
        find_root(model).finish_gradients()
        sent[reduce] = sum(nbytes for nbytes in comm.traffic_by_edge().values())
    assert sent["bf16"] * 2 == sent[None] == WIDTH * WIDTH * 4 // 2 + WIDTH * WIDTH * 4 // 2
