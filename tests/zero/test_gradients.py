"""Clipping, norms, groups of parameters, accumulation: the faults that users of sharded optimizers met, by their
names.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block, Vector, step_with_gradient
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@all_stages
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("loss_scale", [None, 128.0])
@spmd(world=2)
def test_b9_clipping_scales_by_the_global_norm(stage: int, accumulation: int, loss_scale: float | None) -> None:
    """Gradient (3, 4), one element on each rank's shard."""
    for clip, expected in ((1.0, 5 / (5 + 1e-6)), (10.0, 5.0), (None, 5.0)):
        model = sc.shard(Vector(), stage=stage, precision=sc.Precision(loss_scale=loss_scale))
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0, max_grad_norm=clip)
        step_with_gradient(model, optimizer, [3.0, 4.0], accumulation)
        update = whole_parameters(model)["weight"]
        torch.testing.assert_close(float(update.norm()), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(update / update.norm(), torch.tensor([-0.6, -0.8]))


@all_stages
@spmd(world=2)
def test_b9_clipping_to_zero_is_refused_and_none_is_off(stage: int) -> None:
    model = sc.shard(Vector(), stage=stage)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_grad_norm"):
            sc.optimizer(torch.optim.SGD, model, lr=1.0, max_grad_norm=wrong)


@all_stages
@spmd(world=2)
def test_b10_norm_is_global_and_before_clipping(stage: int) -> None:
    model = sc.shard(Vector(), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0, max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    step_with_gradient(model, optimizer, [3.0, 4.0])
    assert optimizer.grad_norm == pytest.approx(5.0, rel=1e-6)


@all_stages
@spmd(world=2)
def test_b38_torchs_clip_function_never_clips_by_a_local_norm(stage: int) -> None:
    """Stage 0 shows whole gradients, so it clips rightly; elsewhere gradients are not on the parameters: an error."""
    model = sc.shard(Vector(), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    model(torch.tensor([[3.0, 4.0]])).mean().backward()
    if stage == 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(whole_parameters(model)["weight"], torch.tensor([-0.6, -0.8]))
        assert float(norm) == pytest.approx(5.0)
        return
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(StateError, match=r"'weight', stage \d\).*max_grad_norm"):
            clip(model.parameters(), 1.0)


@all_stages
@spmd(world=2)
def test_b12_accumulated_16_bit_gradients_keep_replicas_equal(stage: int) -> None:
    """bf16, three micro-batches: every rank ends with the same bits, near the fp32-master reference."""
    model = sc.shard(seeded(lambda: nn.Linear(7, 5)), stage=stage, precision=sc.Precision(param="bf16"))
    alone = seeded(lambda: nn.Linear(7, 5)).bfloat16()
    masters = [p.detach().float() for p in alone.parameters()]
    mesh = sc.Mesh()
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for micro in range(3):
        (model(rows(micro, mesh.rank, 4, 7)).float().square().mean() / 3).backward()
    optimizer.step()
    for rank in range(2):
        for micro in range(3):
            (alone(rows(micro, rank, 4, 7).bfloat16()).float().square().mean() / 3).backward()
            for param, master in zip(alone.parameters(), masters, strict=True):
                assert param.grad is not None
                master -= 0.1 * param.grad.float() / 2
                param.grad = None
    found = whole_parameters(model)
    for (name, _), master in zip(alone.named_parameters(), masters, strict=True):
        everywhere = sc.comm.exchange(found[name].float().tolist(), mesh["dp"], "test")
        assert everywhere[0] == everywhere[1]
        torch.testing.assert_close(found[name], master.bfloat16())


@all_stages
@spmd(world=2)
def test_b13_empty_parameter_groups_are_kept(stage: int) -> None:
    model = sc.shard(seeded(lambda: nn.Linear(4, 3)), stage=stage)
    groups = [
        {"params": [model.weight], "lr": 0.5},
        {"params": [], "lr": 0.25},
        {"params": [model.bias], "lr": 0.125},
    ]
    optimizer = sc.optimizer(torch.optim.SGD, groups, lr=1.0)
    before = whole_parameters(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    after = whole_parameters(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.125]
    torch.testing.assert_close(before["weight"] - after["weight"], torch.full((3, 4), 0.5))
    torch.testing.assert_close(before["bias"] - after["bias"], torch.full((3,), 0.125))
    with pytest.raises(ConfigError, match="empty"):
        sc.optimizer(torch.optim.SGD, [{"params": []}, {"params": []}], lr=1.0)


class Scraps(nn.Module):
    """Parameters of 1 and 3 elements: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.three = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.three).sum(-1) * self.one


@all_stages
@spmd(world=4)
def test_b15_groups_with_fewer_elements_than_ranks(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(Scraps(), mesh, stage=stage)
    groups = [{"params": [model.one], "weight_decay": 0.0}, {"params": [model.three], "weight_decay": 0.1}]
    optimizer = sc.optimizer(torch.optim.AdamW, groups, lr=0.1, max_grad_norm=0.5)
    alone = Scraps()
    plain = torch.optim.AdamW(
        [{"params": [alone.one], "weight_decay": 0.0}, {"params": [alone.three], "weight_decay": 0.1}], lr=0.1
    )
    for step in range(3):
        model(rows(step, mesh.rank, 2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(4):
            (alone(rows(step, rank, 2, 3)).square().mean() / 4).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)
    optimizer.load_state_dict(optimizer.state_dict())


@all_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@spmd(world=2)
def test_b17_every_parameter_starts_on_16_bytes(stage: int, dtype: torch.dtype) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 16, 5, 16))
    sc.shard(model, stage=stage)
    with sc.summon(model):
        assert [param.data_ptr() % 16 for param in model] == [0, 0, 0, 0]
    state = sc.state_dict(model, rank0_only=False)
    assert [tuple(value.shape) for value in state.values()] == [(3,), (16,), (5,), (16,)]


def stack() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(7, 3))


def trained(stage: int, groups_of: Any) -> dict[str, torch.Tensor]:
    """Three steps with the parameter groups that ``groups_of(named parameters)`` makes."""
    mesh = sc.Mesh()
    model = sc.shard(seeded(stack), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.AdamW, groups_of(list(model.parameters())), lr=0.01)
    for step in range(3):
        model(rows(step, mesh.rank, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


@all_stages
@spmd(world=2)
def test_b18_splitting_a_group_changes_nothing(stage: int) -> None:
    one = trained(stage, lambda p: [{"params": p}])
    three = trained(stage, lambda p: [{"params": p[0::3]}, {"params": p[1::3]}, {"params": p[2::3]}])
    sc.testing.twin.assert_bitwise(three, one)


@all_stages
@spmd(world=2)
def test_b18_each_group_moves_by_its_own_rate(stage: int) -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[0::2], "lr": 0.0}, {"params": params[1::2], "lr": 0.1, "weight_decay": 0.0}]

    start = {name: p.detach() for name, p in seeded(stack).named_parameters()}
    found = trained(stage, groups)
    for i, name in enumerate(start):
        assert torch.equal(found[name], start[name]) == (i % 2 == 0), name


class Adapters(nn.Module):
    """A bf16 base, an fp32 adapter and an fp16 extra in one unit, in the given order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        made = {
            "base": nn.Parameter(torch.linspace(-1, 1, 7).bfloat16()),
            "adapter": nn.Parameter(torch.linspace(-1, 1, 7)),
            "extra": nn.Parameter(torch.linspace(-1, 1, 7).half()),
        }
        for name in order.split():
            self.register_parameter(name, made[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.adapter + self.base.float() * 0.5 + self.extra.float() * 0.25).sum(-1)


@all_stages
@pytest.mark.parametrize("order", ["base adapter extra", "extra base adapter"])
@spmd(world=2)
def test_b19_dtypes_side_by_side(stage: int, order: str) -> None:
    mesh = sc.Mesh()
    model = sc.shard(Adapters(order), mesh, stage=stage, precision=sc.Precision(loss_scale=64.0))
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.01)
    adapter = torch.linspace(-1, 1, 7).requires_grad_()
    plain = torch.optim.AdamW([adapter], lr=0.01)
    for step in range(5):
        model(rows(step, mesh.rank, 4, 7)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        adapter.grad = (rows(step, 0, 4, 7).mean(0) + rows(step, 1, 4, 7).mean(0)) / 2
        plain.step()
    found = whole_parameters(model)
    assert {name: p.dtype for name, p in found.items()} == {
        "base": torch.bfloat16,
        "adapter": torch.float32,
        "extra": torch.float16,
    }
    torch.testing.assert_close(found["adapter"], adapter.detach(), rtol=0, atol=1e-6)
    assert (found["base"].float() - torch.linspace(-1, 1, 7)).abs().min() > 0.02
    assert (found["extra"].float() - torch.linspace(-1, 1, 7)).abs().min() > 0.02


@all_stages
@pytest.mark.parametrize("frozen", ["first", "middle", "last", "all but one bias"])
@spmd(world=2)
def test_b21_frozen_parameters_stay_bit_equal(stage: int, frozen: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Block(), Block(), Block())
        if frozen == "all but one bias":
            model.requires_grad_(False)
            model[1].up.bias.requires_grad_(True)
        else:
            model[("first", "middle", "last").index(frozen)].requires_grad_(False)
        return model

    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 7)).square().mean().backward()

    model = check_follows(build, play, stage=stage)
    start = dict(seeded(build).named_parameters())
    for name, param in whole_parameters(model).items():
        if not start[name].requires_grad:
            assert torch.equal(param, start[name])
    root: Any = find_root(model)
    assert all(group.grads is None and group.master is group.own for group in root.groups if not group.trainable)


@all_stages
@spmd(world=2)
def test_b21_an_optimizer_over_frozen_parameters_alone_is_refused(stage: int) -> None:
    model = sc.shard(nn.Linear(3, 2).requires_grad_(False), stage=stage)
    with pytest.raises(ConfigError, match="none of the 2 parameters is trainable"):
        sc.optimizer(torch.optim.SGD, model, lr=0.1)


@all_stages
@spmd(world=2)
def test_an_optimizer_may_be_made_while_its_parameters_are_frozen_for_a_while(stage: int) -> None:
    model = sc.shard(seeded(lambda: nn.Linear(3, 2)), stage=stage)
    before = sc.state_dict(model, rank0_only=False)
    model.requires_grad_(False)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model.requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in sc.state_dict(model, rank0_only=False).items())


@all_stages
@spmd(world=2)
def test_b23_every_trainable_element_is_reduced(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(seeded(stack), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    sc.comm.reset_traffic()
    model(rows(0, mesh.rank, 4, 7)).square().mean().backward()
    optimizer.step()
    numel = sum(p.numel() for p in model.parameters())
    root: Any = find_root(model)
    padded = sum(group.full.numel() for group in root.groups)
    assert padded >= numel
    sent = sc.comm.traffic()
    if stage == 0:
        flags = sum(len(group.slots) + 1 for group in root.groups) + 8
        assert sent["all-reduce"] == padded * 4 + flags
    else:
        assert sent["reduce"] == padded * 4 // 2
    found = {name: p.tolist() for name, p in whole_parameters(model).items()}
    everywhere = sc.comm.exchange(found, mesh["dp"], "test")
    assert everywhere[0] == everywhere[1]


@spmd(world=2)
def test_b24_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"module '0' has sparse=True"):
        sc.shard(model, stage=2)


class LayerwiseAdam(torch.optim.Optimizer):
    """LAMB's idea: a step as long as the layer's weights."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] * param.norm() / (param.grad.norm() + 1e-6)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_b25_optimizers_over_layers_or_matrices_are_refused_by_name(stage: int) -> None:
    model = sc.shard(nn.Linear(8, 4), stage=stage)
    for cls in (LayerwiseAdam, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        with pytest.raises(ConfigError, match=cls.__name__):
            sc.optimizer(cls, model, lr=0.1)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"]
)
@spmd(world=2)
def test_b25_every_elementwise_torch_optimizer_is_taken(name: str) -> None:
    cls = getattr(torch.optim, name)
    mesh = sc.Mesh()
    model = sc.shard(seeded(stack), mesh, stage=3)
    alone = seeded(stack)
    optimizer, plain = sc.optimizer(name.lower(), model, lr=0.01), cls(alone.parameters(), lr=0.01)
    for step in range(2):
        model(rows(step, mesh.rank, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (alone(rows(step, rank, 4, 7)).square().mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    found = whole_parameters(model)
    for key, param in alone.named_parameters():
        # Rprop acts on signs alone, and Adam's kin divide small gradients by themselves: rounding shows at their scale.
        torch.testing.assert_close(found[key], param.detach(), rtol=1e-4, atol=1e-4)


@all_stages
@spmd(world=2)
def test_b26_no_sync_around_all_but_the_last_backward(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(3):
            loss = model(rows(10 * step + micro, rank, 4, 7)).square().mean() / 3
            if find_root(model) is not None and micro < 2:
                with sc.no_sync(model):
                    loss.backward()
            else:
                loss.backward()

    check_follows(stack, play, stage=stage)


@all_stages
@spmd(world=2)
def test_b26_no_sync_reduces_nothing_until_it_is_left(stage: int) -> None:
    model = sc.shard(seeded(stack), stage=stage)
    root: Any = find_root(model)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    sc.comm.reset_traffic()
    with sc.no_sync(model):
        with sc.no_sync(model):
            model(torch.ones(2, 7)).mean().backward()
        assert root.window.suspended, "the inner context must restore what it found"
        model(torch.ones(2, 7)).mean().backward()
    assert not root.window.suspended
    assert not {"reduce.calls", "all-reduce.calls"} & sc.comm.traffic().keys()
    optimizer.step()  # every backward was suspended: the boundary reduces
    assert sc.comm.traffic()["all-reduce.calls" if stage == 0 else "reduce.calls"] >= len(root.groups)


@all_stages
@spmd(world=2)
def test_b29_an_optimizer_built_before_sharding_trains(stage: int) -> None:
    """The instance keeps its groups by identity; a scheduler made for it, and its own step(), go on working."""
    model = seeded(stack)
    instance = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.StepLR(instance, 1, gamma=0.5)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    sc.shard(model, stage=stage)
    optimizer = sc.optimizer(instance, model)
    model(rows(0, 0, 4, 7)).square().mean().backward()
    instance.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    moved = {name: not torch.equal(p, start[name]) for name, p in whole_parameters(model).items()}
    assert moved == {name: not name.startswith("1.") for name in start}


@spmd(world=2)
def test_b29_an_optimizer_over_parameters_of_another_model_is_refused() -> None:
    model = sc.shard(nn.Linear(3, 2), stage=2)
    other = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"2 of 2 parameters that are not in"):
        sc.optimizer(torch.optim.SGD(other.parameters(), lr=0.1), model)
    with pytest.raises(ConfigError, match=r"2 of 4 parameters that are not in a sharded module"):
        sc.optimizer(torch.optim.SGD, [*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="is not sharded"):
        sc.optimizer(torch.optim.SGD, other, lr=0.1)


@all_stages
@spmd(world=2)
def test_b32_all_ranks_start_from_the_first_ranks_weights_and_buffers(stage: int) -> None:
    mesh = sc.Mesh()
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(mesh.rank + 1.0)
    model.register_buffer("strided", torch.arange(6.0).view(2, 3).t() * (mesh.rank + 1))
    sc.shard(model, mesh, stage=stage)
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    found = whole_parameters(model)
    assert torch.equal(found["0.weight"], expected.weight)
    assert model[1].running_mean.tolist() == [1.0, 1.0]
    assert torch.equal(model.strided, torch.arange(6.0).view(2, 3).t())


@all_stages
@spmd(world=2)
def test_b35_constant_gradients_add_up_once(stage: int) -> None:
    model = sc.shard(Vector(4), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    for _ in range(5):
        model(torch.ones(1, 4)).mean().backward()
    optimizer.step()
    assert whole_parameters(model)["weight"].tolist() == [-5.0] * 4


@all_stages
@spmd(world=2)
def test_a_backward_that_leaves_units_out_keeps_what_they_have(stage: int) -> None:
    """The reduction that ends one backward is still under way when the next counts zeros for the same unit."""
    alone = seeded(lambda: nn.Sequential(*(Block() for _ in range(3))))
    model = sc.shard(copy.deepcopy(alone), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for each in (model, alone):
        for micro in range(3):
            each(rows(micro, 0, 4, 7)).square().mean().backward()
            each[1](rows(micro, 1, 4, 7)).square().mean().backward()
    optimizer.step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)
