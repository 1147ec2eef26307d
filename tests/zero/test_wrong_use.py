"""Wrong use of a sharded model: a clear error on every rank, soon, and never a hang or a silently wrong step."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, RankFailedError, RankMismatchError, StateError
from shardcore.testing import SpmdError, run_spmd, spmd
from zero.following import rows
from zero.models import Block
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LIMIT_S = 10.0
"""By when every rank must have its error."""


def stack() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(7, 3))


def sharded(stage: int, build: Any = stack, lr: float = 0.1) -> tuple[nn.Module, Any]:
    model = sc.shard(build(), stage=stage)
    return model, sc.optimizer(torch.optim.SGD, model, lr=lr)


def train_step(model: nn.Module, optimizer: Any, rank: int = 0) -> None:
    model(rows(0, rank, 4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@all_stages
@spmd(world=2)
def test_step_without_backward(stage: int) -> None:
    _model, optimizer = sharded(stage)
    with pytest.raises(StateError, match=r"step\(\) without gradients"):
        optimizer.step()


@all_stages
@spmd(world=2)
def test_step_after_zero_grad(stage: int) -> None:
    model, optimizer = sharded(stage)
    model(rows(0, 0, 4, 7)).mean().backward()
    model.zero_grad()
    with pytest.raises(StateError, match="without gradients"):
        optimizer.step()


@spmd(world=2)
def test_released_parameter_refuses_every_use_and_names_the_way() -> None:
    model, _ = sharded(3)
    param = model[0].up.weight
    uses = (
        lambda: param + 1,
        lambda: param.sum(),
        lambda: param.tolist(),
        lambda: param.data,
        lambda: param[0],
        lambda: param.numpy(),
        lambda: torch.cat([param, param]),
        lambda: torch.nn.init.zeros_(param),
        lambda: param.detach(),
        lambda: param.clone(),
        lambda: float(param[0, 0]),
        lambda: param.data_ptr(),
    )
    for use in uses:
        with pytest.raises(StateError, match=r"parameter '0.up.weight' .*summon"):
            use()
    with pytest.raises(StateError, match="summon"), torch.no_grad():
        param.copy_(torch.ones_like(param, device="cpu"))
    with pytest.raises(StateError, match="summon"), torch.no_grad():
        param.add_(1)


@spmd(world=2)
def test_released_parameter_keeps_its_description() -> None:
    model, _ = sharded(3)
    param = model[0].up.weight
    assert (tuple(param.shape), param.dtype, param.requires_grad) == ((13, 7), torch.float32, True)
    assert (param.numel(), param.ndim, param.dim(), param.size(0), len(param)) == (91, 2, 2, 13, 13)
    assert param.is_leaf
    assert param.grad is None
    assert param.device.type == "cpu"
    assert isinstance(param, nn.Parameter)
    for text in (repr(param), str(param), f"{param}"):
        assert "0.up.weight" in text
        assert "(13, 7)" in text
        assert "summon" in text
    assert "Linear(in_features=7, out_features=13" in repr(model)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in stack().parameters())


@spmd(world=2)
def test_sharded_models_can_be_neither_copied_nor_moved() -> None:
    model, _ = sharded(3)
    with pytest.raises(StateError):
        copy.deepcopy(model)
    for move in (lambda: model.to(torch.float64), lambda: model.half(), lambda: model.double()):
        with pytest.raises(StateError):
            move()


@all_stages
@spmd(world=2)
def test_a_second_shard_of_the_same_parameters(stage: int) -> None:
    model, _ = sharded(stage)
    with pytest.raises(StateError, match="sharded already"):
        sc.shard(model, stage=stage)
    with pytest.raises(StateError, match="sharded already"):
        sc.shard(nn.Sequential(model, nn.Linear(2, 2)), stage=stage)
    with pytest.raises(StateError, match="another sharded module"):
        sc.shard(nn.Sequential(model[0]), stage=stage)


@spmd(world=2)
def test_what_cannot_be_sharded_is_named() -> None:
    class With(nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.odd = nn.Parameter(value, requires_grad=False)

    with pytest.raises(ConfigError, match=r"'odd' is torch.complex64"):
        sc.shard(With(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match=r"'odd' is torch.int64"):
        sc.shard(With(torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ConfigError, match=r"parameter 'odd' of With"):
        sc.shard(With(torch.zeros(2, device="meta")))
    with pytest.raises(ConfigError, match="no parameters"):
        sc.shard(nn.ReLU())
    for stage in (4, -1, "3", True, None):
        with pytest.raises(ConfigError, match="stage"):
            sc.shard(nn.Linear(2, 2), stage=stage)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="NoSuchBlock"):
        sc.shard(nn.Linear(2, 2), units=["NoSuchBlock"])
    with pytest.raises(ConfigError, match="units='blocks'"):
        sc.shard(nn.Linear(2, 2), units="blocks")


@spmd(world=2)
def test_wrong_precision_is_named() -> None:
    for options in ({"param": "int8"}, {"reduce": "half"}, {"loss_scale": "auto"}, {"loss_scale": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            sc.Precision(**options)  # type: ignore[arg-type]


@spmd(world=2)
def test_an_optimizer_with_state_is_refused() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows(0, 0, 4, 7)).mean().backward()
    optimizer.step()
    sc.shard(model, stage=2)
    with pytest.raises(StateError, match="AdamW has made steps already"):
        sc.optimizer(optimizer, model)


@spmd(world=2)
def test_wrong_optimizers_are_named() -> None:
    model, optimizer = sharded(2)
    with pytest.raises(ConfigError, match="did you mean"):
        sc.optimizer("adamv", model, lr=0.1)
    with pytest.raises(ConfigError, match="more than once"):
        sc.optimizer(torch.optim.SGD, [*model.parameters(), *model.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="learning rate"):
        sc.optimizer(torch.optim.SGD, model, lr=-1.0)
    with pytest.raises(ConfigError, match="sharded already"):
        sc.optimizer(optimizer, model)
    with pytest.raises(ConfigError, match="beside an optimizer instance"):
        sc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, lr=0.2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_c24_requires_grad_changed_after_sharding(stage: int) -> None:
    model = stack()
    model[0].requires_grad_(False)
    sc.shard(model, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    train_step(model, optimizer)
    model[0].requires_grad_(True)
    model(rows(0, 0, 4, 7)).mean().backward()
    with pytest.raises(StateError, match=r"requires_grad of .*0\.up\.weight.* changed after sharding"):
        optimizer.step()


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_c24_weights_loaded_after_sharding_are_kept(stage: int, precision: str) -> None:
    """Values written after sharding reach shard and masters: the next step starts from them."""
    model = sc.shard(nn.Linear(4, 3), stage=stage, precision=sc.Precision(param=precision))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.5)
    with sc.summon(model, writeback=True), torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert whole_parameters(model)["weight"].unique().tolist() == [1.5]
    assert whole_parameters(model)["bias"].unique().tolist() == [0.5]


@pytest.mark.parametrize("stage", [0, 1, 2])
@spmd(world=2)
def test_c24_load_state_dict_refreshes_masters_where_parameters_are_whole(stage: int) -> None:
    model = sc.shard(nn.Linear(4, 3), stage=stage, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.5)
    model.load_state_dict({"weight": torch.full((3, 4), 2.0), "bias": torch.ones(3)})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert whole_parameters(model)["weight"].unique().tolist() == [1.5]


@all_stages
@spmd(world=2)
def test_writing_under_a_reading_summon_is_an_error(stage: int) -> None:
    model, _ = sharded(stage)
    with pytest.raises(StateError, match=r"'0\.up\.weight'.*writeback=True"), sc.summon(model), torch.no_grad():
        model[0].up.weight.zero_()


def fail_on_rank_1(stage: int) -> str:
    """Rank 1 raises in forward; returns what this rank was told and how long it took."""
    mesh = sc.Mesh()

    class Moody(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if mesh.rank == 1 and x.shape[0] == 3:
                raise ValueError("no such sample")
            return super().forward(x)

    model = sc.shard(nn.Sequential(Block(), Moody(), Moody(), nn.Linear(7, 3)), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    train_step(model, optimizer)
    began = time.monotonic()
    if mesh.rank == 1:
        with pytest.raises(ValueError, match="no such sample"):
            model(torch.ones(3, 7))
        time.sleep(2.5)  # it is alive, and says no more
        return ""
    with pytest.raises(RankFailedError) as failure:  # noqa: PT012  # at which of these depends on the stage
        for _ in range(2):
            model(torch.ones(3, 7)).mean().backward()
            optimizer.step()
    assert time.monotonic() - began < LIMIT_S
    return str(failure.value)


@all_stages
def test_one_rank_raising_in_forward_fails_all_with_its_message(stage: int) -> None:
    told, _ = run_spmd(fail_on_rank_1, 2, stage)
    assert "rank 1 failed: ValueError: no such sample" in told


def reset_on_all(stage: int) -> None:
    mesh = sc.Mesh()
    model, optimizer = sharded(stage)
    for step in range(2):
        train_step(model, optimizer, step)
    if mesh.rank == 0:
        with pytest.raises(RankFailedError):
            train_step(model, optimizer)
    else:
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(2, 5))
        if stage < 3:
            time.sleep(2)
    with pytest.raises(RankMismatchError, match=r"cannot be reset.*checkpoint"):
        sc.reset_iteration(model)


@all_stages
def test_reset_after_ranks_parted_says_that_only_a_restart_helps(stage: int) -> None:
    run_spmd(reset_on_all, 2, stage)


@spmd(world=2)
def test_a_first_step_at_stage_3_that_one_rank_fails_can_be_reset() -> None:
    """There each gather is entered only once all ranks have come to it, so that none is left half done."""
    mesh = sc.Mesh()
    model, optimizer = sharded(3)
    with pytest.raises(RankFailedError if mesh.rank == 0 else RuntimeError):
        model(torch.ones(2, 7 if mesh.rank == 0 else 5))
    sc.reset_iteration(model)
    train_step(model, optimizer)


@all_stages
@spmd(world=2)
def test_ranks_with_different_models(stage: int) -> None:
    mesh = sc.Mesh()
    builds = {
        "size": lambda: nn.Sequential(nn.Linear(4, 3 + mesh.rank)),
        "dtype": lambda: nn.Linear(4, 3, dtype=torch.float64 if mesh.rank else torch.float32),
        "name": lambda: nn.ModuleDict({f"layer{mesh.rank}": nn.Linear(4, 3)}),
        "frozen": lambda: nn.Linear(4, 3).requires_grad_(mesh.rank == 0),
        "count": lambda: nn.Sequential(*(nn.Linear(4, 3) for _ in range(2 + mesh.rank))),
    }
    for what, build in builds.items():
        began = time.monotonic()
        with pytest.raises(RankMismatchError, match=r"shard plan differs between ranks \[0\] and ranks \[1\]") as found:
            sc.shard(build(), mesh, stage=stage)
        assert "no difference found" not in str(found.value), what
        assert time.monotonic() - began < LIMIT_S


def use_units_in_rank_order(stage: int, hidden: list[int]) -> None:
    """Rank 1 runs the three blocks in reverse order."""
    mesh = sc.Mesh()

    class Swapped(nn.Module):
        swapping = False

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(7, width) for width in hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks) if self.swapping and mesh.rank == 1 else self.blocks:
                x = block(x)
            return x

    model = sc.shard(Swapped(), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    train_step(model, optimizer)
    before = whole_parameters(model)
    model.swapping = True  # type: ignore[assignment]
    train_step(model, optimizer)
    after = whole_parameters(model)
    everywhere = sc.comm.exchange({name: p.tolist() for name, p in after.items()}, mesh["dp"], "test")
    assert everywhere[0] == everywhere[1]
    assert any(not torch.equal(before[name], after[name]) for name in after)


def messages_of_all_ranks(body: Any, *args: Any) -> list[str]:
    """What each rank was told; every rank must raise, soon."""
    began = time.monotonic()
    with pytest.raises(SpmdError) as failure:
        run_spmd(body, 2, *args)
    assert time.monotonic() - began < 3 * LIMIT_S, "starting the processes and building the model included"
    for report in failure.value.reports:
        assert report.error_type in ("RankMismatchError", "RankFailedError"), report.headline()
    return [report.message for report in failure.value.reports]


ORDERS = pytest.mark.parametrize("hidden", [[13, 13, 13], [13, 29, 400]], ids=["equal", "different"])


@all_stages
@ORDERS
def test_the_order_of_units_is_free(stage: int, hidden: list[int]) -> None:
    run_spmd(use_units_in_rank_order, 2, stage, hidden)


@all_stages
@spmd(world=2)
def test_c1_units_used_by_some_ranks_count_as_zero_on_the_others(stage: int) -> None:
    """The ranks use the second block in turn."""
    mesh = sc.Mesh()
    torch.manual_seed(3)
    model = sc.shard(nn.ModuleList([Block(), Block()]), mesh, stage=stage)
    model.forward = lambda x, both: model[1](model[0](x)) if both else model[0](x)  # type: ignore[method-assign]
    torch.manual_seed(3)
    alone = nn.ModuleList([Block(), Block()])
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        model(rows(step, mesh.rank, 4, 7), mesh.rank == step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            x = alone[0](rows(step, rank, 4, 7))
            x = alone[1](x) if rank == step % 2 else x
            (x.square().mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def die_in_step(stage: int, num_before: int) -> str:
    mesh = sc.Mesh()
    model, optimizer = sharded(stage)
    for _ in range(num_before):
        train_step(model, optimizer)
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        train_step(model, optimizer)
    except RankFailedError:
        assert time.monotonic() - began < LIMIT_S
        raise
    raise AssertionError("a step without rank 1 went through")


@pytest.mark.parametrize("num_before", [0, 1, 2])
@all_stages
def test_a_killed_rank_is_noticed(stage: int, num_before: int) -> None:
    with pytest.raises(SpmdError) as failure:
        run_spmd(die_in_step, 2, stage, num_before)
    first, second = failure.value.reports
    assert second.kind == "died"
    assert first.error_type == "RankFailedError", first.message
    # In the first steps ranks ask one another before they enter a collective.
    told = "was lost" in first.message or "rank 1 is gone" in first.message
    assert told, first.message


@spmd(world=2)
def test_a_slow_rank_is_waited_for() -> None:
    mesh = sc.Mesh()
    model, optimizer = sharded(3)
    for step in range(2):
        if mesh.rank == 1:
            time.sleep(2.5)
        train_step(model, optimizer, step)


def state_dict_on_rank_0() -> None:
    mesh = sc.Mesh()
    model, optimizer = sharded(3)
    train_step(model, optimizer)
    if mesh.rank == 0:
        model.state_dict()
    train_step(model, optimizer)


def test_state_dict_called_by_some_ranks_only() -> None:
    for message in messages_of_all_ranks(state_dict_on_rank_0):
        assert "for state_dict" in message


@all_stages
@spmd(world=2)
def test_double_backward_is_refused_clearly(stage: int) -> None:
    model, _ = sharded(stage)
    with pytest.raises(StateError, match="double backward"):
        model(rows(0, 0, 4, 7)).square().sum().backward(create_graph=True)


@spmd(world=2)
def test_double_backward_for_inputs_is_refused_where_parameters_are_released() -> None:
    model, _ = sharded(3)
    x = rows(0, 0, 4, 7).requires_grad_()
    with pytest.raises(StateError, match="double backward"):
        torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)


@all_stages
@spmd(world=1)
def test_a_copy_of_a_sharded_model_is_refused(stage: int) -> None:
    model = sc.shard(nn.Linear(3, 2), stage=stage)
    for copying in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(StateError, match=r"copy the model before shardcore\.shard"):
            copying(model)


@all_stages
@spmd(world=1)
def test_what_torch_jit_compiled_and_what_is_no_mesh_are_refused(stage: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit itself is on its way out
        traced = nn.Sequential(nn.Linear(8, 8), torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)))
    with pytest.raises(ConfigError, match=r"module '1' was compiled by torch\.jit"):
        sc.shard(traced, stage=stage)
    with pytest.raises(ConfigError, match="'dp' is no mesh"):
        sc.shard(nn.Linear(2, 2), "dp", stage=stage)  # type: ignore[arg-type]
