"""What stands inside ``optimizer.params`` and ``scheduler.params``: names, kinds and defaults by type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from shardcore.config.kinds import BOOL, INVALID, Kind, choice, integer, list_of, number, one_or_list, parse, show
from shardcore.config.names import unknown_names
from shardcore.errors import ConfigError


class _Required(Enum):
    REQUIRED = "required"


REQUIRED: Final = _Required.REQUIRED
"""Stands in for the default of a parameter that has none."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named argument of an optimizer or a schedule."""

    kind: Kind
    """What the value may be."""
    default: object = REQUIRED
    """The value where none is given; None means that the optimizer or the library chooses."""


_RATE = number(low=0)
_RATES = one_or_list(_RATE)
_FRACTION = number(low=0, below=1)
_STEPS = integer(low=1)
_STEPS_OR_NONE = integer(low=0)
_WARMUP = {
    "warmup_num_steps": Parameter(_STEPS_OR_NONE, 1000),
    "warmup_type": Parameter(choice("log", "linear"), "log"),
}
_LAST = {"last_batch_iteration": Parameter(integer(low=-1), -1)}

SCHEDULES: dict[str, dict[str, Parameter]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Parameter(_RATES, 1e-3),
        "lr_range_test_step_size": Parameter(_STEPS, 2000),
        "lr_range_test_step_rate": Parameter(_RATE, 1.0),
        "lr_range_test_staircase": Parameter(BOOL, False),
        **_LAST,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter(_RATES),
        "cycle_max_lr": Parameter(_RATES),
        "decay_lr_rate": Parameter(_RATE, 0.0),
        "cycle_first_step_size": Parameter(_STEPS, 2000),
        "cycle_second_step_size": Parameter(_STEPS, None),
        "cycle_first_stair_count": Parameter(_STEPS_OR_NONE, 0),
        "cycle_second_stair_count": Parameter(_STEPS_OR_NONE, None),
        "decay_step_size": Parameter(_STEPS_OR_NONE, 0),
        "cycle_momentum": Parameter(BOOL, True),
        "cycle_min_mom": Parameter(one_or_list(_FRACTION), 0.8),
        "cycle_max_mom": Parameter(one_or_list(_FRACTION), 0.9),
        "decay_mom_rate": Parameter(_RATE, 0.0),
        **_LAST,
    },
    "WarmupLR": {
        "warmup_min_lr": Parameter(_RATES, 0.0),
        "warmup_max_lr": Parameter(_RATES, None),
        **_WARMUP,
        **_LAST,
    },
    "WarmupDecayLR": {
        "total_num_steps": Parameter(_STEPS),
        "warmup_min_lr": Parameter(_RATES, 0.0),
        "warmup_max_lr": Parameter(_RATES, 1e-3),
        **_WARMUP,
        **_LAST,
    },
    "WarmupCosineLR": {
        "total_num_steps": Parameter(_STEPS),
        "warmup_min_ratio": Parameter(number(low=0, high=1), 0.0),
        "cos_min_ratio": Parameter(number(low=0, high=1), 1e-4),
        **_WARMUP,
        **_LAST,
    },
}
"""The schedules of `shardcore.optim.lr_schedules`, under the parameter names that DeepSpeed gave them."""

_SWITCHES = {
    **{name: Parameter(BOOL, False) for name in ("maximize", "capturable", "differentiable")},
    **{name: Parameter(BOOL, None) for name in ("foreach", "fused")},
}
_ADAM = {
    "lr": Parameter(_RATE, 1e-3),
    "betas": Parameter(list_of(_FRACTION, 2), (0.9, 0.999)),
    "eps": Parameter(_RATE, 1e-8),
    "weight_decay": Parameter(_RATE, 0.0),
    "amsgrad": Parameter(BOOL, False),
    "bias_correction": Parameter(BOOL, True),
    "torch_adam": Parameter(BOOL, False),
    "adam_w_mode": Parameter(BOOL, True),
    "fp32_optimizer_states": Parameter(BOOL, True),
    **_SWITCHES,
}

OPTIMIZERS: dict[str, dict[str, Parameter]] = {
    "Adam": _ADAM,
    "AdamW": {**_ADAM, "weight_decay": Parameter(_RATE, None)},
    "Adagrad": {
        "lr": Parameter(_RATE, 1e-2),
        "lr_decay": Parameter(_RATE, 0.0),
        "weight_decay": Parameter(_RATE, 0.0),
        "initial_accumulator_value": Parameter(_RATE, 0.0),
        "eps": Parameter(_RATE, 1e-10),
        **_SWITCHES,
    },
    "SGD": {
        "lr": Parameter(_RATE, 1e-3),
        "momentum": Parameter(_RATE, 0.0),
        "dampening": Parameter(number(), 0.0),
        "weight_decay": Parameter(_RATE, 0.0),
        "nesterov": Parameter(BOOL, False),
        **_SWITCHES,
    },
}
"""Optimizer types whose parameters are checked while the file is read; any other torch class is checked when built."""

_ONE_BIT = "compressed one-bit optimizers; use AdamW"
_MUP = "muP optimizers; give the groups that muP makes to AdamW or SGD as parameter groups"
REMOVED_OPTIMIZERS = {
    "onebitadam": _ONE_BIT, "onebitlamb": _ONE_BIT, "zerooneadam": _ONE_BIT,
    "muadam": _MUP, "muadamw": _MUP, "musgd": _MUP,
    "lamb": "it needs the norm of each whole tensor; use AdamW",
}  # fmt: skip
"""Optimizer types that are known and will not be there, in lower case, with the reason."""

LATER_OPTIMIZERS = {"lion": "use AdamW", "muon": "it needs whole matrices; use AdamW"}
"""Optimizer types that are known and not there yet, in lower case, with what to use."""


def check_parameters(
    path: str, given: Mapping[str, object], known: Mapping[str, Parameter], problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """The given parameters, parsed; null counts as not given, and "auto" as the default, which goes to ``notes``.

    Unknown names, values of the wrong kind, missing required parameters, and an "auto" that no default supplies
    each add one line to ``problems``.
    """
    problems += unknown_names(path, given, known)
    parsed: dict[str, Any] = {}
    for name, parameter in known.items():
        value, full = given.get(name), f"{path}.{name}"
        if value == "auto" and parameter.default is REQUIRED:
            problems.append(f'{full} is "auto" and nothing supplies it: write {parameter.kind.expected} instead')
        elif value == "auto":
            notes.append(f'{full}: "auto" stands for the default, {_shown_default(parameter)}')
        elif value is not None:
            found = parse(parameter.kind, full, value, problems)
            if found is not INVALID:
                parsed[name] = found
        elif parameter.default is REQUIRED:
            problems.append(f"{full}: missing; expected {parameter.kind.expected}")
    return parsed


def schedule_settings(schedule: str, given: Mapping[str, object]) -> dict[str, Any]:
    """The settings of one of `SCHEDULES`, parsed and completed with the defaults.

    Raises:
        ConfigError: one line per parameter that is unknown, missing or out of range.
    """
    known, problems = SCHEDULES[schedule], list[str]()
    parsed = check_parameters(schedule, given, known, problems, [])
    if problems:
        raise ConfigError("; ".join(problems))
    return {name: parsed.get(name, parameter.default) for name, parameter in known.items()}


def _shown_default(parameter: Parameter) -> str:
    return "which the library chooses" if parameter.default is None else show(parameter.default)
