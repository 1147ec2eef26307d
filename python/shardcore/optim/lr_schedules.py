"""DeepSpeed's learning-rate schedules as torch schedulers, each a closed formula of the number of steps taken.

Throughout, ``k`` is the number of optimizer steps taken so far. The value at ``k = 0`` is applied when a schedule is
constructed, so the first update already uses it; ``scheduler.step()`` after each update moves ``k`` on by one. A linear
warm-up from 0 to 1 over 4 steps thus gives the updates 0, 0.25, 0.5, 0.75, 1, 1, ...; DeepSpeed's own warm-ups give
their first value to the first two updates, and are one behind from there. Since every value follows from
``k`` alone, `ClosedFormLR.lr_at` tells any of them in advance, and a schedule resumes bit for bit.

Learning rates and momenta are numbers for all parameter groups, or lists with one number a group. A parameter that is
unknown, missing or out of range raises `ConfigError` with its name.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardcore.config import nearest, schedule_settings, unknown_names
from shardcore.errors import CheckpointError, ConfigError

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


class ClosedFormLR(LRScheduler):
    """A schedule whose values depend on the number of steps taken alone.

    Settings belong to the constructor and the position to the state, so a resumed run may lengthen its schedule.
    """

    name: ClassVar[str]
    """The schedule's name in a configuration file."""

    def __init__(self, optimizer: Optimizer, **settings: Any) -> None:
        self._settings = schedule_settings(self.name, settings)
        super().__init__(optimizer, self._settings["last_batch_iteration"])

    @abstractmethod
    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each parameter group at the present step."""
        return list(self.lr_at(self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Position, base learning rates, and the optimizer's learning rates of this moment, as plain numbers."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": self._base_lrs(),
            "lrs": [float(group["lr"]) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Moves to a saved position and gives the optimizer the learning rates it had there.

        Raises:
            CheckpointError: the state is not one of this schedule, or has another number of parameter groups.
        """
        groups = self.optimizer.param_groups
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise CheckpointError(f"{self.name}: not a state of this schedule: {', '.join(missing)} missing")
        if len(state_dict["lrs"]) != len(groups):
            raise CheckpointError(
                f"{self.name}: the state has {len(state_dict['lrs'])} parameter groups, the optimizer {len(groups)}; "
                "load it with the groups it was saved with"
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.base_lrs = list(state_dict["base_lrs"])
        for group, lr in zip(groups, state_dict["lrs"], strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = list(state_dict["lrs"])

    def _base_lrs(self) -> list[float]:
        return [float(lr) for lr in self.base_lrs]

    def _per_group(self, name: str) -> list[float]:
        """A setting as one value per parameter group."""
        value, num_groups = self._settings[name], len(self.optimizer.param_groups)
        if not isinstance(value, tuple):
            return [value] * num_groups
        if len(value) != num_groups:
            raise ConfigError(
                f"{self.name}.{name}: expected one number, or one for each of the optimizer's parameter groups "
                f"({num_groups}), got {len(value)}"
            )
        return list(value)


class LRRangeTest(ClosedFormLR):
    """Raises the learning rate to find where training stops being stable (Smith, arXiv 1506.01186).

    lr(k) = min_lr * (1 + step_rate * k / step_size), the quotient rounded down with ``lr_range_test_staircase``.
    """

    name = "LRRangeTest"

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            lr_range_test_min_lr=lr_range_test_min_lr,
            lr_range_test_step_size=lr_range_test_step_size,
            lr_range_test_step_rate=lr_range_test_step_rate,
            lr_range_test_staircase=lr_range_test_staircase,
            last_batch_iteration=last_batch_iteration,
        )

    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""
        period = self._settings["lr_range_test_step_size"]
        interval = step // period if self._settings["lr_range_test_staircase"] else step / period
        factor = 1.0 + self._settings["lr_range_test_step_rate"] * interval
        return [min_lr * factor for min_lr in self._per_group("lr_range_test_min_lr")]


class OneCycle(ClosedFormLR):
    """One rise and fall of the learning rate, momentum mirrored, then a slow decay (Smith, arXiv 1803.09820).

    With F and S the sizes of the first and the second step (S = F unless given), and the height h(k) of the cycle,

        h(k) = k / F                      for k <= F, in ``cycle_first_stair_count`` equal stairs if that is not 0
        h(k) = 1 - (k - F) / S            for F < k <= F + S, in ``cycle_second_stair_count`` stairs (first's if None)
        lr(k) = min_lr + (max_lr - min_lr) * h(k)
        momentum(k) = max_mom - (max_mom - min_mom) * h(k)

    and after the cycle, with d = (k - F - S) / decay_step_size (0, no decay, where ``decay_step_size`` is 0),

        lr(k) = min_lr / (1 + decay_lr_rate * d)
        momentum(k) = max_mom * (1 + decay_mom_rate * d)

    Momentum is a group's ``momentum``, or the first of its ``betas``. A group without either, and SGD whose momentum
    is 0, has none to cycle and is left alone, as all are with ``cycle_momentum`` false.
    """

    name = "OneCycle"

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._keys = [_momentum_key(group) if cycle_momentum else None for group in optimizer.param_groups]
        super().__init__(
            optimizer,
            cycle_min_lr=cycle_min_lr,
            cycle_max_lr=cycle_max_lr,
            decay_lr_rate=decay_lr_rate,
            cycle_first_step_size=cycle_first_step_size,
            cycle_second_step_size=cycle_second_step_size,
            cycle_first_stair_count=cycle_first_stair_count,
            cycle_second_stair_count=cycle_second_stair_count,
            decay_step_size=decay_step_size,
            cycle_momentum=cycle_momentum,
            cycle_min_mom=cycle_min_mom,
            cycle_max_mom=cycle_max_mom,
            decay_mom_rate=decay_mom_rate,
            last_batch_iteration=last_batch_iteration,
        )

    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""
        low, high = self._per_group("cycle_min_lr"), self._per_group("cycle_max_lr")
        height = self._height(step)
        factor = 1.0 / (1.0 + self._settings["decay_lr_rate"] * self._decay(step))
        return [(bottom + (top - bottom) * height) * factor for bottom, top in zip(low, high, strict=True)]

    def momentum_at(self, step: int) -> list[float]:
        """The momentum of each parameter group after ``step`` optimizer steps, where the group has one."""
        low, high = self._per_group("cycle_min_mom"), self._per_group("cycle_max_mom")
        height = self._height(step)
        factor = 1.0 + self._settings["decay_mom_rate"] * self._decay(step)
        return [(top - (top - bottom) * height) * factor for bottom, top in zip(low, high, strict=True)]

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each parameter group at the present step; sets the groups' momentum too."""
        # torch's composite schedulers reach a member through this method alone, hence the side effect.
        self._set_momenta(self.momentum_at(self.last_epoch))
        return super().get_lr()

    def state_dict(self) -> dict[str, Any]:
        """As for every schedule, and the momentum of each group (None where it has none)."""
        return {**super().state_dict(), "momenta": self._momenta()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As for every schedule; the groups get their momentum back as well."""
        super().load_state_dict(state_dict)
        self._set_momenta(state_dict["momenta"])

    def _cycle_steps(self) -> tuple[int, int]:
        first = self._settings["cycle_first_step_size"]
        second = self._settings["cycle_second_step_size"]
        return first, first if second is None else second

    def _height(self, step: int) -> float:
        """How far up the cycle is, from 0 to 1 and back; 0 after it."""
        first, second = self._cycle_steps()
        stairs, second_stairs = (self._settings[f"cycle_{half}_stair_count"] for half in ("first", "second"))
        if step <= first:
            return _climb(step, first, stairs)
        return 1.0 - _climb(min(step - first, second), second, stairs if second_stairs is None else second_stairs)

    def _decay(self, step: int) -> float:
        """Decay intervals since the end of the cycle."""
        period, after = self._settings["decay_step_size"], step - sum(self._cycle_steps())
        return after / period if period > 0 and after > 0 else 0.0

    def _momenta(self) -> list[float | None]:
        values = [None if key is None else group[key] for group, key in zip(self._groups, self._keys, strict=True)]
        return [value[0] if isinstance(value, tuple | list) else value for value in values]

    def _set_momenta(self, momenta: Sequence[float | None]) -> None:
        for group, key, momentum in zip(self._groups, self._keys, momenta, strict=True):
            if key == "betas":
                group["betas"] = (momentum, *group["betas"][1:])
            elif key is not None:
                group[key] = momentum

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class WarmupLR(ClosedFormLR):
    """Warms up from ``warmup_min_lr`` to ``warmup_max_lr`` (None: the group's own rate) and stays there.

    lr(k) = min_lr + (max_lr - min_lr) * w(k), with N = ``warmup_num_steps`` and

        w(k) = k / N                            for k < N and ``warmup_type`` "linear"
        w(k) = log(k + 1) / log(max(N, 2))      for k < N and ``warmup_type`` "log"
        w(k) = 1                                for k >= N, so N = 0 is the full rate from the first update
    """

    name = "WarmupLR"

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""
        low = self._per_group("warmup_min_lr")
        high = self._base_lrs() if self._settings["warmup_max_lr"] is None else self._per_group("warmup_max_lr")
        share = _warmup(step, self._settings["warmup_num_steps"], self._settings["warmup_type"])
        return [bottom + (top - bottom) * share for bottom, top in zip(low, high, strict=True)]


class WarmupDecayLR(ClosedFormLR):
    """Warms up as `WarmupLR`, then falls in a straight line to ``warmup_min_lr`` at ``total_num_steps``.

    lr(k) = min_lr + (max_lr - min_lr) * g(k), with T = ``total_num_steps``, N = ``warmup_num_steps`` and

        g(k) = w(k)                       for k < N, as in `WarmupLR`
        g(k) = (T - k) / (T - N)          for N <= k < T
        g(k) = 0                          for k >= N and k >= T
    """

    name = "WarmupDecayLR"

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            total_num_steps=total_num_steps,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""
        low, high = self._per_group("warmup_min_lr"), self._per_group("warmup_max_lr")
        warm, total = self._settings["warmup_num_steps"], self._settings["total_num_steps"]
        if step < warm:
            share = _warmup(step, warm, self._settings["warmup_type"])
        else:
            share = max(total - step, 0) / max(total - warm, 1)
        return [bottom + (top - bottom) * share for bottom, top in zip(low, high, strict=True)]


class WarmupCosineLR(ClosedFormLR):
    """Warms up to each group's own rate, then falls to a fraction of it along half a cosine (arXiv 1608.03983).

    lr(k) = base_lr * r(k), with T = ``total_num_steps``, N = ``warmup_num_steps`` and w(k) as in `WarmupLR`:

        r(k) = warmup_min_ratio + (1 - warmup_min_ratio) * w(k)                                  for k < N
        r(k) = cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * (k - N) / (T - N))) / 2       for N <= k < T
        r(k) = cos_min_ratio                                                                     for k >= N and k >= T
    """

    name = "WarmupCosineLR"

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            total_num_steps=total_num_steps,
            warmup_min_ratio=warmup_min_ratio,
            warmup_num_steps=warmup_num_steps,
            cos_min_ratio=cos_min_ratio,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def lr_at(self, step: int) -> list[float]:
        """The learning rate of each parameter group after ``step`` optimizer steps."""
        warm, total = self._settings["warmup_num_steps"], self._settings["total_num_steps"]
        if step < warm:
            floor, share = self._settings["warmup_min_ratio"], _warmup(step, warm, self._settings["warmup_type"])
        else:
            floor = self._settings["cos_min_ratio"]
            share = (1.0 + math.cos(math.pi * _progress(step, warm, total))) / 2.0
        ratio = floor + (1.0 - floor) * share
        return [base_lr * ratio for base_lr in self._base_lrs()]


def build_scheduler(optimizer: Optimizer, type_name: str, params: Mapping[str, Any]) -> LRScheduler:
    """Builds the schedule called ``type_name``: one of this module, or any class of ``torch.optim.lr_scheduler``.

    Letter case counts first; where no name fits exactly it is disregarded.

    Raises:
        ConfigError: no such schedule, unknown or missing parameters, or values that the class refuses.
    """
    cls = _find_class(type_name)
    _check_names(cls, params)
    try:
        return cls(optimizer, **params)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"scheduler.params of {cls.__name__}: {error}") from error


def schedule_names() -> list[str]:
    """The names that :func:`build_scheduler` knows."""
    return sorted(_classes())


def _classes() -> dict[str, type[LRScheduler]]:
    known = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != LRScheduler.__name__}
    return known | {cls.name: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def _find_class(type_name: str) -> type[LRScheduler]:
    known = _classes()
    if type_name in known:
        return known[type_name]
    for name, cls in known.items():
        if name.casefold() == type_name.casefold():
            return cls
    guess = nearest(type_name, known)
    hint = f'did you mean "{guess}"?' if guess else f"known schedules: {', '.join(sorted(known))}"
    raise ConfigError(f'scheduler.type: no schedule is called "{type_name}"; {hint}')


def _check_names(cls: type[LRScheduler], params: Mapping[str, Any]) -> None:
    accepted = list(inspect.signature(cls).parameters.values())[1:]  # without the optimizer
    problems = unknown_names("scheduler.params", params, [parameter.name for parameter in accepted])
    problems += [
        f"scheduler.params.{parameter.name}: missing; {cls.__name__} has no default for it"
        for parameter in accepted
        if parameter.default is inspect.Parameter.empty and parameter.name not in params
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _momentum_key(group: Mapping[str, Any]) -> str | None:
    """Where a parameter group keeps its momentum; None if it has none."""
    if group.get("momentum"):
        return "momentum"
    return "betas" if "betas" in group else None


def _climb(step: int, num_steps: int, stairs: int) -> float:
    """``step`` / ``num_steps``, rounded down to one of ``stairs`` equal stairs; 0 stairs are a slope."""
    return step * stairs // num_steps / stairs if stairs > 0 else step / num_steps


def _warmup(step: int, num_steps: int, warmup_type: str) -> float:
    """w(k) of `WarmupLR`."""
    if step >= num_steps:
        return 1.0
    return step / num_steps if warmup_type == "linear" else math.log(step + 1) / math.log(max(num_steps, 2))


def _progress(step: int, start: int, end: int) -> float:
    """How far ``step`` (at least ``start``) is on the way from ``start`` to ``end``; 1 where there is no way."""
    return (step - start) / (end - start) if step < end else 1.0
