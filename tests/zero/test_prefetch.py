"""Stage 3 under a plan: gathers ahead of their use, units kept between forward and backward, never above the budget."""

from __future__ import annotations

import copy
import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import comm
from shardcore.errors import ConfigError, PlanError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.zero import PrefetchLimits, group
from zero.following import rows
from zero.models import Block
from zero.twin import whole_parameters

NUM_BLOCKS = 6


def nbytes_of_a_unit() -> int:
    return int(find_root(sc.shard(nn.Sequential(Block(), Block()), stage=3)).groups[0].nbytes)


def sharded(budget_units: float | None = None, num_blocks: int = NUM_BLOCKS) -> tuple[nn.Module, Any, int]:
    """(model of equal units, its root, bytes of a unit); a budget in units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    unit_nbytes = nbytes_of_a_unit()
    sc.shard(model, stage=3, budget=None if budget_units is None else int(budget_units * unit_nbytes))
    return model, find_root(model), unit_nbytes


def train(model: nn.Module, num_steps: int, first: int = 0) -> None:
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for step in range(first, first + num_steps):
        model(rows(step, sc.Mesh().rank, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def live_nbytes(root: Any) -> int:
    return sum(g.nbytes for g in root.groups if g.state.value != "sharded")


@pytest.mark.parametrize("budget_units", [1, 2, 3, 6, 100])
@spmd(world=2)
def test_the_budget_is_never_exceeded_and_changes_no_bit(budget_units: float) -> None:
    free, _, _ = sharded()
    train(free, 4)
    model, root, unit_nbytes = sharded(budget_units)
    most: list[int] = []
    for block in model:
        block.up.register_forward_pre_hook(lambda m, args: most.append(live_nbytes(root)))
        block.up.register_full_backward_pre_hook(lambda m, grads: most.append(live_nbytes(root)))
    train(model, 4)
    assert max(most) <= budget_units * unit_nbytes
    assert live_nbytes(root) == 0, "everything is released between steps"
    expected = whole_parameters(free)
    assert all(torch.equal(value, expected[name]) for name, value in whole_parameters(model).items())


@spmd(world=2)
def test_units_are_gathered_as_planned_from_the_second_step_on() -> None:
    model, root, unit_nbytes = sharded(3)
    train(model, 1)
    plan = root.prefetcher.coordinator.plan("train")
    assert plan.bytes_gathered < plan.bytes_on_demand == 2 * NUM_BLOCKS * unit_nbytes
    seen: list[list[str]] = []
    for block in model:
        block.up.register_forward_pre_hook(lambda m, args: seen.append([g.state.value for g in root.groups]))
    comm.reset_traffic()
    train(model, 1, first=1)
    assert comm.traffic()["gather.calls"] == len(plan.gathers)
    for i, states in enumerate(seen):
        assert states[i] == "unsharded"
        assert i == NUM_BLOCKS - 1 or states[i + 1] != "sharded", "the next unit is under way"
    assert root.prefetcher.coordinator.num_departures == 0


@spmd(world=2)
def test_steps_that_depart_from_the_plan_train_on_and_are_planned_anew() -> None:
    """Another order, a unit left out, a unit twice, evaluation in between; equal to the same steps at stage 2."""
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3], [1, 1, 3, 0], [0, 1, 2, 3], [3]]

    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for i in order:
                x = self.blocks[i](x)
            return x

    def result(stage: int) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(0)
        model = sc.shard(Picking(), stage=stage)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.01)
        for step, order in enumerate(orders):
            model(rows(step, sc.Mesh().rank, 4, 7), order).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(rows(step, 0, 2, 7), list(reversed(order)))
        return whole_parameters(model), find_root(model)

    expected, _ = result(2)
    found, root = result(3)
    assert root.prefetcher.coordinator.num_departures > 0
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@spmd(world=2)
def test_what_is_kept_between_forward_and_backward_is_released_before_it_could_be_stale() -> None:
    model, root, _ = sharded(100)
    train(model, 2)
    model(rows(9, 0, 4, 7))  # no backward follows
    assert live_nbytes(root) > 0
    state = sc.state_dict(model)
    assert live_nbytes(root) == 0
    model(rows(9, 0, 4, 7))
    with sc.summon(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = sc.state_dict(model)
    if sc.Mesh().rank == 0:
        assert all(torch.equal(doubled[name], 2 * value) for name, value in state.items())


@spmd(world=2)
def test_a_budget_below_a_unit_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"budget"):
        sharded(0.5)
    with pytest.raises(ConfigError, match="budget=0"):
        sc.shard(Block(), stage=3, budget=0)
    with pytest.raises(ConfigError, match="give one of them"):
        sc.shard(Block(), stage=3, budget=10**6, prefetch=PrefetchLimits())
    with pytest.raises(ConfigError, match="below stage 3 parameters are whole"):
        sc.shard(Block(), stage=2, budget=10**6)


@spmd(world=2)
def test_the_error_of_a_small_budget_names_modules_and_a_budget_that_suffices() -> None:
    sc.shard(Block(), stage=3)  # another model must not show in the names
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.LayerNorm(7))
    with pytest.raises(PlanError, match=r"unit '0\.[01]' alone has") as caught:
        sc.shard(model, stage=3, units=[Block], budget=100)
    found = re.search(r"a forward through '0\.[01]' has '0\.[01]' .* \+ 'root' .* = (\d+) bytes", str(caught.value))
    assert found is not None, str(caught.value)
    enough = int(found[1])
    sc.shard(model, stage=3, units=[Block], budget=enough - 1)  # what was refused may be tried again
    with pytest.raises(PlanError, match=rf'"0\.0" .* \+ "root" .*smallest workable budget is {enough} bytes'):
        model(rows(0, 0, 4, 7))
    other = nn.Sequential(nn.Sequential(Block(), Block()), nn.LayerNorm(7))
    sc.shard(other, stage=3, units=[Block], budget=enough)
    train(other, 2)


@spmd(world=2)
def test_groups_of_one_unit_have_numbers_in_its_plan() -> None:
    model = nn.Sequential(Block(), Block())
    model[0].up.bias.requires_grad_(False)
    sc.shard(model, stage=3)
    train(model, 2)
    names = {name for name, _, _ in find_root(model).prefetcher.coordinator.plan("train").gathers}
    assert names == {"0 (group 1 of 2)", "0 (group 2 of 2)", "1"}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("1GB", "budget=8 * 2**30 for 8 GiB"),
        (1e9, "budget=1000000000"),
        (1.5, "8 GiB"),
        (float("inf"), "8 GiB"),
        (float("nan"), "8 GiB"),
        (True, "8 GiB"),
        (-1, "an int of 1 to"),
        (1 << 63, "an int of 1 to"),
    ],
)
def test_a_budget_that_is_no_number_of_bytes_is_refused_with_what_to_write(value: Any, advice: str) -> None:
    text = rf"^budget={re.escape(repr(value))}: expected bytes, as .*{re.escape(advice)}"
    with pytest.raises(ConfigError, match=text):
        sc.shard(nn.Linear(2, 2), budget=value)
    with pytest.raises(ConfigError, match=text):
        PrefetchLimits(budget=value)


def test_limits_of_prefetching_are_whole_numbers_of_bytes() -> None:
    for name in ("max_live_nbytes", "prefetch_nbytes", "max_reuse_nbytes", "persistence_nbytes"):
        with pytest.raises(ConfigError, match=rf"{name}=2\.5: expected bytes, as an int of 0 to"):
            PrefetchLimits(**{name: 2.5})
    with pytest.raises(ConfigError, match=r"persistence_nbytes=None: expected bytes, as an int of 0 .*- 1; write"):
        PrefetchLimits(persistence_nbytes=None)  # type: ignore[arg-type]
    assert PrefetchLimits(budget=torch.tensor(7)).budget == 7  # type: ignore[arg-type]


@spmd(world=2)
def test_a_parameter_used_outside_its_unit_while_that_is_gathered_ahead_is_there_in_every_backward() -> None:
    """The root uses a block's weight when the plan has that block whole already; and again in a second backward."""

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor, borrows: bool) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x @ self.blocks[1].up.weight.t() if borrows else x

    torch.manual_seed(0)
    alone = Borrowing()
    model = sc.shard(copy.deepcopy(alone), stage=3, budget=1 << 20)
    for each in (model, alone):
        optimizer: Any = (
            sc.optimizer(torch.optim.SGD, model, lr=0.1)
            if each is model
            else torch.optim.SGD(alone.parameters(), lr=0.1)
        )
        for borrows in (False, True, True):
            loss = each(rows(0, 0, 4, 7), borrows).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


@spmd(world=2)
def test_a_state_dict_taken_inside_summon_outlives_it() -> None:
    model, _, _ = sharded()
    with sc.summon(model):
        inside = model.state_dict()
    outside = model.state_dict()
    assert all(torch.equal(inside[name], value) for name, value in outside.items())


class _SlowLink:
    """Gathers that take at least ``seconds`` each, one after the other, and note how long ranks wait for them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.free_at = 0.0
        self.exposed = 0.0

    def gather(self, *args: Any) -> Any:
        handle = comm.gather_shards(*args)
        self.free_at = max(self.free_at, time.monotonic()) + self.seconds
        return _SlowHandle(self, handle, self.free_at)


class _SlowHandle:
    def __init__(self, link: _SlowLink, handle: comm.Handle, ready_at: float) -> None:
        self._link, self._handle, self._ready_at = link, handle, ready_at

    def wait(self) -> None:
        before = time.monotonic()
        time.sleep(max(self._ready_at - before, 0.0))
        self._handle.wait()
        self._link.exposed += time.monotonic() - before


@spmd(world=2)
def test_most_gather_time_is_hidden_under_a_budget_of_three_units() -> None:
    """12 equal units, a gather 0.8 of a unit's computation: at most a third of what on-demand gathers expose."""
    compute = 0.02
    exposed = {}
    for name, limits in (("on demand", {"max_live_nbytes": 0}), ("planned", {"budget": 3})):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(12)))
        unit_nbytes = nbytes_of_a_unit()
        sc.shard(model, stage=3, prefetch=PrefetchLimits(**{key: value * unit_nbytes for key, value in limits.items()}))
        for block in model:
            block.up.register_forward_hook(lambda m, args, out: time.sleep(compute))
            block.up.register_full_backward_hook(lambda m, grads, out: time.sleep(compute))
        link = _SlowLink(0.8 * compute)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "comm", _Redirected(link))
            train(model, 1)
            link.exposed = 0.0
            train(model, 2, first=1)
        exposed[name] = link.exposed
    assert exposed["planned"] <= exposed["on demand"] / 3, exposed


class _Redirected:
    """``shardcore.comm`` with slow gathers."""

    def __init__(self, link: _SlowLink) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return self._link.gather if name == "gather_shards" else getattr(comm, name)
