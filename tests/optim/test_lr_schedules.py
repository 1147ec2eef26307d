"""The learning-rate schedules against their documented formulas, at their edges, and through torch's conventions."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, SequentialLR, StepLR

from shardcore.config import REQUIRED, SCHEDULES
from shardcore.errors import CheckpointError, ConfigError
from shardcore.optim.lr_schedules import (
    ClosedFormLR,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)

CLASSES: list[type[ClosedFormLR]] = [LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR]
SHORT: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2},
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 4},
}
SHORT["OneCycle"] |= {"decay_lr_rate": 0.5, "decay_mom_rate": 0.01}


def sgd(*lrs: float, momentum: float = 0.0) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)]
    return torch.optim.SGD(groups, lr=1.0, momentum=momentum)


def update(optimizer: Optimizer, scheduler: LRScheduler) -> list[float]:
    """One update with gradient 1; the learning rates it used."""
    used = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    return used


def first_lrs(num_updates: int, make: Callable[[Optimizer], LRScheduler], *lrs: float) -> list[float]:
    """The learning rates of the first group's updates."""
    optimizer = sgd(*lrs)
    scheduler = make(optimizer)
    return [update(optimizer, scheduler)[0] for _ in range(num_updates)]


# ------------------------------------------------------------------------------------------------------ formulas
def test_a8_the_first_update_already_uses_the_schedules_value() -> None:
    optimizer = sgd(1.0)
    scheduler = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    assert scheduler.get_last_lr() == [0.0]
    weight = optimizer.param_groups[0]["params"][0]
    weights = []
    lrs = []
    for _ in range(6):
        lrs += update(optimizer, scheduler)
        weights.append(weight.item())
    assert lrs == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert weights == [0.0, -0.25, -0.75, -1.5, -2.5, -3.5]


def test_warmup_by_the_logarithm() -> None:
    lrs = first_lrs(6, lambda optimizer: WarmupLR(optimizer, 0.1, 0.5, 4))
    assert lrs == pytest.approx([0.1 + 0.4 * share for share in (0, 0.5, math.log(3) / math.log(4), 1, 1, 1)])


def test_warmup_and_decay() -> None:
    lrs = first_lrs(8, lambda optimizer: WarmupDecayLR(optimizer, 6, 0.1, 0.5, 2, "linear"))
    assert lrs == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])


def test_warmup_and_cosine() -> None:
    lrs = first_lrs(8, lambda optimizer: WarmupCosineLR(optimizer, 6, 0.5, 2, 0.1, "linear"), 2.0)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * quarter / 4)) / 2 for quarter in range(5)]
    assert lrs == pytest.approx([1.0, 1.5, *(2 * ratio for ratio in cosine), 0.2])


def test_range_test_slope_and_stairs() -> None:
    lrs = first_lrs(5, lambda optimizer: LRRangeTest(optimizer, 0.1, 2, 0.5))
    assert lrs == pytest.approx([0.1, 0.125, 0.15, 0.175, 0.2])
    lrs = first_lrs(5, lambda optimizer: LRRangeTest(optimizer, 0.1, 2, 0.5, True))
    assert lrs == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2])


def test_one_cycle_rises_falls_and_decays() -> None:
    def make(optimizer: Optimizer) -> OneCycle:
        return OneCycle(optimizer, 0.2, 1.0, 0.5, 2, 4, decay_step_size=2)

    lrs = first_lrs(11, make)
    assert lrs == pytest.approx([0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2 / 1.25, 0.2 / 1.5, 0.2 / 1.75, 0.2 / 2])


def test_one_cycle_in_stairs() -> None:
    def make(optimizer: Optimizer) -> OneCycle:
        return OneCycle(optimizer, 0.0, 1.0, 0.0, 4, 8, 2, 4)

    assert first_lrs(14, make) == [0, 0, 0.5, 0.5, 1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0]
    # A count that divides the steps lands on each of them, whatever the rounding of a quotient would do.
    scheduler = OneCycle(sgd(), 0.0, 1.0, cycle_first_step_size=100, cycle_first_stair_count=100)
    assert [scheduler.lr_at(step)[0] for step in range(101)] == [step / 100 for step in range(101)]


@pytest.mark.parametrize("name", SHORT)
def test_what_is_applied_is_what_lr_at_foretells(name: str) -> None:
    optimizer = sgd(1.0, 0.5)
    scheduler = build_scheduler(optimizer, name, SHORT[name])
    assert isinstance(scheduler, ClosedFormLR)
    foretold = [scheduler.lr_at(step) for step in range(20)]
    assert [update(optimizer, scheduler) for _ in range(20)] == foretold
    assert scheduler.last_epoch == 20
    assert scheduler.get_last_lr() == scheduler.lr_at(20)


# ---------------------------------------------------------------------------------------------------------- edges
@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("total", [1, 2])
@pytest.mark.parametrize("warm", [0, 1, 2])
def test_a7_short_warmups_and_runs_stay_finite(warm: int, total: int, warmup_type: str) -> None:
    common = {"warmup_num_steps": warm, "warmup_type": warmup_type}
    for name, params in (
        ("WarmupLR", common),
        ("WarmupDecayLR", {**common, "total_num_steps": total, "warmup_max_lr": 1.0}),
        ("WarmupCosineLR", {**common, "total_num_steps": total}),
    ):
        lrs = first_lrs(6, lambda optimizer, name=name, params=params: build_scheduler(optimizer, name, params))
        assert all(math.isfinite(lr) and 0.0 <= lr <= 1.0 for lr in lrs)
        assert lrs[0] == (1.0 if warm == 0 else 0.0)
        if name == "WarmupLR":
            assert lrs[max(warm, 1) :] == [1.0] * (6 - max(warm, 1))


def test_a7_one_cycle_without_a_decay_step_does_not_decay() -> None:
    lrs = first_lrs(9, lambda optimizer: OneCycle(optimizer, 0.25, 1.0, 0.5, 2, 2, decay_step_size=0))
    assert lrs == [0.25, 0.625, 1.0, 0.625, 0.25, 0.25, 0.25, 0.25, 0.25]


@given(data=st.data(), steps=st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_a7_every_setting_in_range_gives_finite_values_within_bounds(data: st.DataObject, steps: list[int]) -> None:
    count, length = st.integers(0, 20), st.integers(1, 20)
    rate = st.floats(0, 10)
    warmup = {"warmup_num_steps": count, "warmup_type": st.sampled_from(["log", "linear"])}
    drawn: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "WarmupLR": warmup,
        "WarmupDecayLR": {**warmup, "total_num_steps": length, "warmup_max_lr": rate},
        "WarmupCosineLR": {**warmup, "total_num_steps": length, "cos_min_ratio": st.floats(0, 1)},
        "OneCycle": {
            "cycle_min_lr": st.floats(0, 1),
            "cycle_max_lr": st.floats(1, 10),
            "cycle_first_step_size": length,
            "cycle_second_step_size": length,
            "cycle_first_stair_count": count,
            "decay_step_size": count,
            "decay_lr_rate": rate,
        },
    }
    name = data.draw(st.sampled_from(sorted(drawn)))
    params = {key: data.draw(strategy) for key, strategy in drawn[name].items()}
    scheduler = build_scheduler(sgd(10.0), name, params)
    assert isinstance(scheduler, ClosedFormLR)
    for step in steps:
        (lr,) = scheduler.lr_at(step)
        assert 0.0 <= lr <= 10.0 * (1 + 1e-12)


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("total", [0, -1])
def test_a16_no_steps_at_all_are_refused_naming_the_field(name: str, total: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\.total_num_steps: expected an integer >= 1, got {total}"):
        build_scheduler(sgd(), name, {"total_num_steps": total})


def test_a16_a_single_step_works() -> None:
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        params = {"total_num_steps": 1, "warmup_num_steps": 0}
        assert first_lrs(
            1, lambda optimizer, name=name, params=params: build_scheduler(optimizer, name, params), 1e-3
        ) == [1e-3]


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, r"WarmupLR\.warmup_num_steps: expected an integer >= 0, got -1"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"WarmupLR\.warmup_type: expected one of \"log\", \"linear\""),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"lr_range_test_step_size: expected an integer >= 1, got 0"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, r"first_step_size: expected"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0}, r"cycle_max_mom: expected a number"),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, r"expected one number, or one for each .* \(2\), got 1"),
    ],
)
def test_values_out_of_range_are_named(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_scheduler(sgd(1.0, 0.5), name, params)


# ------------------------------------------------------------------------------------------- groups and momentum
def test_lists_give_each_group_its_own_values() -> None:
    scheduler = WarmupLR(sgd(1.0, 0.5), [0.0, 0.1], [1.0, 0.2], 2, "linear")
    assert scheduler.lr_at(1) == [0.5, pytest.approx(0.15)]
    cycle = OneCycle(sgd(1.0, 0.5), [0.0, 0.1], [1.0, 0.3], cycle_first_step_size=2)
    assert cycle.lr_at(2) == [1.0, pytest.approx(0.3)]
    assert LRRangeTest(sgd(1.0, 0.5), (0.1, 0.2), 1).lr_at(1) == [0.2, 0.4]


def test_without_lists_the_groups_keep_their_own_rates() -> None:
    assert WarmupLR(sgd(1.0, 0.5), warmup_num_steps=0).lr_at(0) == [1.0, 0.5]
    assert WarmupCosineLR(sgd(1.0, 0.5), 4, warmup_num_steps=0).lr_at(0) == [1.0, 0.5]


def test_one_cycle_mirrors_momentum_and_lets_it_decay() -> None:
    optimizer = sgd(momentum=0.5)
    scheduler = OneCycle(optimizer, 0.1, 1.0, 0.0, 2, decay_step_size=1, decay_mom_rate=0.1)
    momenta = []
    for _ in range(6):
        momenta.append(optimizer.param_groups[0]["momentum"])
        update(optimizer, scheduler)
    assert momenta == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.99])


def test_one_cycle_sets_the_first_beta_of_adam() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(0.9, 0.95))
    scheduler = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=0.7)
    update(optimizer, scheduler)
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.8), 0.95)


@pytest.mark.parametrize(
    ("optimizer", "key", "value"),
    [(sgd(), "momentum", 0.0), (torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))]), "momentum", None)],
)
def test_one_cycle_leaves_alone_what_has_no_momentum(optimizer: Optimizer, key: str, value: float | None) -> None:
    scheduler = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2)
    update(optimizer, scheduler)
    assert optimizer.param_groups[0].get(key) == value
    assert scheduler.state_dict()["momenta"] == [None]


def test_one_cycle_leaves_momentum_alone_when_told_to() -> None:
    optimizer = sgd(momentum=0.5)
    scheduler = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_momentum=False)
    update(optimizer, scheduler)
    assert optimizer.param_groups[0]["momentum"] == 0.5


# --------------------------------------------------------------------------------------------------------- resume
def twin(name: str) -> tuple[Optimizer, ClosedFormLR]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 0.3}, {"params": [parameters[1]], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = build_scheduler(optimizer, name, SHORT[name])
    assert isinstance(scheduler, ClosedFormLR)
    return optimizer, scheduler


def hyperparameters(optimizer: Optimizer) -> list[Any]:
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("num_before", [0, 1, 5, 9])
@pytest.mark.parametrize("name", SHORT)
def test_a_run_resumes_bit_for_bit_through_json(name: str, num_before: int) -> None:
    optimizer, scheduler = twin(name)
    for _ in range(num_before):
        update(optimizer, scheduler)
    state = json.loads(json.dumps(scheduler.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = [(update(optimizer, scheduler), hyperparameters(optimizer)) for _ in range(9)]

    fresh, resumed = twin(name)
    fresh.load_state_dict(saved)
    resumed.load_state_dict(state)
    assert [(update(fresh, resumed), hyperparameters(fresh)) for _ in range(9)] == expected


@pytest.mark.parametrize("name", SHORT)
def test_a_loaded_state_brings_the_optimizers_values_along(name: str) -> None:
    optimizer, scheduler = twin(name)
    for _ in range(5):
        update(optimizer, scheduler)
    fresh, resumed = twin(name)
    resumed.load_state_dict(scheduler.state_dict())
    assert hyperparameters(fresh) == hyperparameters(optimizer)
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_a_resumed_run_may_lengthen_its_schedule() -> None:
    short = WarmupDecayLR(sgd(), 10, 0.0, 1.0, 0)
    longer = WarmupDecayLR(sgd(), 20, 0.0, 1.0, 0)
    longer.load_state_dict(short.state_dict() | {"last_epoch": 5})
    assert longer.get_lr() == [0.75]


def test_a_state_that_does_not_fit_is_refused() -> None:
    scheduler = WarmupLR(sgd(1.0, 0.5))
    with pytest.raises(CheckpointError, match="the state has 1 parameter groups, the optimizer 2"):
        scheduler.load_state_dict(WarmupLR(sgd()).state_dict())
    with pytest.raises(CheckpointError, match=r"not a state of this schedule: .*base_lrs"):
        scheduler.load_state_dict({"last_epoch": 3})
    with pytest.raises(CheckpointError, match="momenta missing"):
        OneCycle(sgd(1.0, 0.5), 0.1, 1.0).load_state_dict(scheduler.state_dict())


def test_a_position_can_be_given_at_construction() -> None:
    optimizer = sgd()
    first = WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    for _ in range(4):
        update(optimizer, first)
    again = WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear", last_batch_iteration=4)
    assert again.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == 0.5


# ----------------------------------------------------------------------------------------------- torch conventions
def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    def make() -> tuple[Optimizer, WarmupLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
        return optimizer, WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")

    optimizer, scheduler = make()
    lr = optimizer.param_groups[0]["lr"]
    assert [update(optimizer, scheduler) for _ in range(3)] == [[0.0], [0.25], [0.5]]
    assert optimizer.param_groups[0]["lr"] is lr
    other, resumed = make()
    other_lr = other.param_groups[0]["lr"]
    resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert other_lr.item() == 0.5
    assert other.param_groups[0]["lr"] is other_lr


def sequence(optimizer: Optimizer) -> SequentialLR:
    parts = [
        WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear"),
        CosineAnnealingLR(optimizer, 6),
        OneCycle(optimizer, 0.25, 1.0, cycle_first_step_size=3),
    ]
    return SequentialLR(optimizer, parts, milestones=[2, 5])


@pytest.mark.parametrize("num_before", [1, 3, 6])
def test_a_member_of_torchs_sequence_runs_and_resumes(num_before: int) -> None:
    optimizer = sgd(momentum=0.5)
    scheduler = sequence(optimizer)
    lrs = [update(optimizer, scheduler)[0] for _ in range(9)]
    assert lrs[:2] == [0.0, 0.5]
    assert lrs[2] == 1.0
    assert lrs[5:] == pytest.approx([0.25, 0.5, 0.75, 1.0])

    stopped = sgd(momentum=0.5)
    before = sequence(stopped)
    for _ in range(num_before):
        update(stopped, before)
    fresh = sgd(momentum=0.5)
    after = sequence(fresh)
    fresh.load_state_dict(stopped.state_dict())
    after.load_state_dict(before.state_dict())
    assert [update(fresh, after)[0] for _ in range(9 - num_before)] == lrs[num_before:]
    assert fresh.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]


# ------------------------------------------------------------------------------------------------ build_scheduler
@pytest.mark.parametrize("cls", CLASSES)
def test_signatures_and_parameter_tables_agree(cls: type[ClosedFormLR]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    empty = inspect.Parameter.empty
    found = {p.name: REQUIRED if p.default is empty else p.default for p in parameters}
    assert found == {name: parameter.default for name, parameter in SCHEDULES[cls.name].items()}
    assert cls.__name__ == cls.name


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("WarmupLR", {}, WarmupLR),
        ("warmuplr", {}, WarmupLR),
        ("onecycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1}, OneCycle),
        ("StepLR", {"step_size": 2}, StepLR),
        ("steplr", {"step_size": 2}, StepLR),
        ("ConstantLR", {}, ConstantLR),
    ],
)
def test_schedules_are_found_by_name(name: str, params: dict[str, Any], cls: type[LRScheduler]) -> None:
    assert type(build_scheduler(sgd(), name, params)) is cls


def test_every_torch_scheduler_that_needs_numbers_alone_can_be_built() -> None:
    needed = {
        "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 4},
        "CosineAnnealingWarmRestarts": {"T_0": 4},
        "LinearLR": {},
        "PolynomialLR": {},
        "ReduceLROnPlateau": {},
    }
    for name, params in needed.items():
        assert type(build_scheduler(sgd(momentum=0.9), name, params)) is getattr(torch.optim.lr_scheduler, name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WarmupDecayLRR", 'no schedule is called "WarmupDecayLRR"; did you mean "WarmupDecayLR"'),
        ("StepRL", 'did you mean "StepLR"'),
        ("nothing like it", "known schedules: .*OneCycle.*WarmupLR"),
        ("LRScheduler", "no schedule is called"),
    ],
)
def test_unknown_schedules_are_refused_with_the_nearest_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_scheduler(sgd(), name, {})


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("StepLR", {"step_sise": 2}, r'step_sise: unknown key; did you mean "scheduler\.params\.step_size"'),
        ("StepLR", {}, r"scheduler\.params\.step_size: missing; StepLR has no default for it"),
        ("WarmupLR", {"warmup_steps": 2}, r'did you mean "scheduler\.params\.warmup_num_steps"'),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: missing"),
        ("OneCycleLR", {"max_lr": 1.0}, r"scheduler\.params of OneCycleLR: "),
        ("MultiStepLR", {"milestones": 3}, r"scheduler\.params of MultiStepLR: "),
    ],
)
def test_wrong_parameters_are_refused(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_scheduler(sgd(momentum=0.9), name, params)
