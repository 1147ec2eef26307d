"""The optimizer and the learning-rate schedule that a configuration asks for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardcore.config.names import nearest
from shardcore.config.parameters import (
    LATER_OPTIMIZERS,
    OPTIMIZERS,
    REMOVED_OPTIMIZERS,
    SCHEDULES,
    Parameter,
    check_parameters,
)
from shardcore.config.sections import OptimizerConfig, SchedulerConfig
from shardcore.config.walk import ESCAPE, Findings

_TORCH_ADAMW_DECAY = 0.01
_ADAM_SWITCHES = {"bias_correction": "Adam without bias correction", "fp32_optimizer_states": "16-bit states"}


def choose_optimizer(
    given: dict[str, Any], drop_in: bool, findings: Findings, classes: Collection[str] | None = None
) -> OptimizerConfig | None:
    """The optimizer section, in torch's names; None if the file has none or it has a problem.

    ``classes`` names what can be built besides what is known here; None accepts any name, to be judged when it is
    built. ``given`` has "type" and "params" as the file gives them. DeepSpeed's Adam decouples weight decay unless
    ``adam_w_mode`` is false, so "Adam" becomes torch's AdamW here; in drop-in mode AdamW decays nothing unless told
    to, as there.
    """
    name = _type_of("optimizer", given, findings)
    if name is None:
        return None
    params, folded = dict(given.get("params", {})), name.casefold()
    if folded in REMOVED_OPTIMIZERS:
        reason = REMOVED_OPTIMIZERS[folded]
        findings.problems.append(f'not supported by this library: optimizer.type "{name}"; remove it ({reason})')
        return None
    if folded in LATER_OPTIMIZERS:
        findings.problems.append(f'optimizer.type: "{name}" is not available yet; {LATER_OPTIMIZERS[folded]}')
        return None
    if params.pop("max_grad_norm", None) is not None:
        findings.problems.append("optimizer.params.max_grad_norm: give it at the top level, as gradient_clipping")
    known = next((known for known in OPTIMIZERS if known.casefold() == folded), None)
    if known is None and _is_unknown("optimizer", name, OPTIMIZERS, classes, findings):
        return None
    checked = _checked("optimizer.params", params, OPTIMIZERS.get(known or ""), findings)
    if known in ("Adam", "AdamW"):
        return _adam(known, checked, drop_in, findings)
    return OptimizerConfig(type=known or name, params=checked)


def choose_scheduler(
    given: dict[str, Any], findings: Findings, classes: Collection[str] | None = None
) -> SchedulerConfig | None:
    """The scheduler section; None if the file has none or it has a problem. ``classes`` as for the optimizer."""
    name = _type_of("scheduler", given, findings)
    if name is None:
        return None
    known = next((known for known in SCHEDULES if known.casefold() == name.casefold()), None)
    if known is None and _is_unknown("scheduler", name, SCHEDULES, classes, findings):
        return None
    params = _checked("scheduler.params", given.get("params", {}), SCHEDULES.get(known or ""), findings)
    return SchedulerConfig(type=known or name, params=params)


def _type_of(section: str, given: dict[str, Any], findings: Findings) -> str | None:
    name = given.get("type")
    if name is None and given and not any(problem.startswith(f"{section}.type") for problem in findings.problems):
        findings.problems.append(f"{section}.type: missing; name the class to build, or take the section out")
    return name


def _is_unknown(
    section: str, name: str, checked: Collection[str], classes: Collection[str] | None, findings: Findings
) -> bool:
    """Whether no class is called ``name``, as far as that is known here; it is then a problem."""
    if classes is None or name.casefold() in {known.casefold() for known in classes}:
        return False
    names = {*checked, *classes}
    guess = nearest(name, names)
    hint = f'did you mean "{guess}"?' if guess else f"known: {', '.join(sorted(names))}"
    findings.problems.append(f'{section}.type: no {section} is called "{name}"; {hint}')
    return True


def _checked(
    path: str, given: dict[str, Any], known: dict[str, Parameter] | None, findings: Findings
) -> dict[str, Any]:
    """The parameters without null and "auto"; those of a type that is not known here are checked when it is built."""
    findings.escaped += [f"{path}.{name}" for name in given if name.startswith(ESCAPE)]
    params = {name: value for name, value in given.items() if not name.startswith(ESCAPE)}
    if known is not None:
        return check_parameters(path, params, known, findings.problems, findings.notes)
    automatic = [name for name, value in params.items() if isinstance(value, str) and value == "auto"]
    findings.notes += [f'{path}.{name}: "auto" stands for the default of the class' for name in automatic]
    return {name: value for name, value in params.items() if value is not None and name not in automatic}


def _adam(name: str, params: dict[str, Any], drop_in: bool, findings: Findings) -> OptimizerConfig:
    decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
    torch_adam = params.pop("torch_adam", False)
    for switch, feature in _ADAM_SWITCHES.items():
        if params.pop(switch, True) is False:
            findings.problems.append(f"optimizer.params.{switch}: false is not supported ({feature}); use true")
    if name == "Adam" and decoupled:
        findings.notes.append(
            'optimizer.type: "Adam" decays weights apart from the gradient (AdamW), as in DeepSpeed; '
            "params.adam_w_mode: false makes it plain Adam"
        )
    if "weight_decay" not in params:
        params["weight_decay"] = _default_decay(name, drop_in and not torch_adam, findings)
    return OptimizerConfig(type="AdamW" if decoupled else "Adam", params=params)


def _default_decay(name: str, as_deepspeed: bool, findings: Findings) -> float:
    if name == "Adam":
        return 0.0
    if not as_deepspeed:
        return _TORCH_ADAMW_DECAY
    findings.notes.append(
        f"optimizer.params.weight_decay: not given, so it is 0 as in DeepSpeed (torch's AdamW: {_TORCH_ADAMW_DECAY})"
    )
    return 0.0
