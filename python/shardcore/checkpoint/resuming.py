"""What an optimizer takes over from a checkpoint: states by the names of parameters, options by groups of names."""

from __future__ import annotations

from typing import Any

import torch

from shardcore.checkpoint.holding import key_of_state
from shardcore.checkpoint.matching import Match
from shardcore.checkpoint.report import Report
from shardcore.checkpoint.stored import Stored, reads_of
from shardcore.checkpoint.training import values_by_name
from shardcore.checkpoint.values import decode
from shardcore.protocols import Fill, ParameterSlot, ShardedOptimizerMark, find_slot

_OF_THIS_RUN = frozenset(
    {
        "params", "param_names", "foreach", "fused", "capturable", "differentiable", "state_dtype", "master",
        "decoupled_weight_decay", "num_threads",
    }
)  # fmt: skip
"""Options that say how an optimizer computes and stores; those of the program stay."""


def check_optimizer(optimizer: ShardedOptimizerMark | None, stored: Stored, report: Report) -> list[str]:
    """What does not fit, apart from missing states, which go into the report."""
    described = stored.training.get("optimizer")
    if optimizer is None:
        return []
    if not described:
        report.notes.append("the checkpoint was saved without an optimizer; its states begin anew")
        report.without_state = _trained_names(optimizer)
        return []
    values, known = values_by_name(described), _grouped_names(described)
    problems = []
    for group, (states, others) in zip(optimizer.param_groups, optimizer.kept_states(), strict=True):
        for slot in _slots(group):
            if not slot.group.trainable:
                continue
            name = stored.name_among((slot.name, *slot.aliases))
            if name is None or name not in known:
                report.without_state.append(slot.name)
                continue
            there = stored.states_of(name) | set(values.get(name, ()))
            if name in values and there != {*states, *others}:
                problems.append(
                    f"the state of {slot.name} has {sorted(there)} in the checkpoint (by {described['class']}), and "
                    f"this optimizer keeps {sorted({*states, *others})}"
                )
    return problems[:3] + ([f"... and {len(problems) - 3} more such states"] if len(problems) > 3 else [])


def load_states(optimizer: ShardedOptimizerMark, stored: Stored, found: Match, *, with_states: bool) -> None:
    """Fill the optimizer's states, and the masters that rest with them. Not collective."""
    described = stored.training.get("optimizer") or {"values": []}
    values = values_by_name(described)

    def values_of(slot: ParameterSlot) -> dict[str, Any] | None:
        name = found.weights.get(slot.name)
        content = values.get(name) if name is not None else None
        return None if content is None else {key: decode(value) for key, value in content.items()}

    def fill(fills: list[Fill]) -> None:
        known = [(one, found.weights[one.slot.name]) for one in fills if one.slot.name in found.weights]
        stored.read(
            read
            for one, name in known
            for read in reads_of(key_of_state(one.name, name), one.slot.param, (one.start, one.stop), one.out)
        )

    optimizer.write_pieces(values_of if with_states else None, fill)


def load_options(optimizer: ShardedOptimizerMark, stored: Stored, report: Report) -> None:
    """Take the options of parameter groups that hold the same parameters, apart from added and removed ones."""
    saved = stored.training["optimizer"]["groups"]
    now = [
        {stored.name_among((s.name, *s.aliases)) or s.name for s in _slots(group)} for group in optimizer.param_groups
    ]
    all_now = {name for names in now for name in names}
    all_saved = {name for group in saved for name in group["params"]}
    for i, (group, names) in enumerate(zip(optimizer.param_groups, now, strict=True)):
        same = [other for other in saved if set(other["params"]) & all_now == names & all_saved != set()]
        by_place = len(saved) == len(now) and not names
        if not same and not by_place:
            report.groups_kept.append(i)
            continue
        options = (same[0] if same else saved[i])["options"]
        for key, value in options.items():
            if key not in _OF_THIS_RUN:
                _set_option(group, key, decode(value))


def load_counters(optimizer: ShardedOptimizerMark, stored: Stored, report: Report) -> None:
    """Steps, and the loss scale where it is of the same kind."""
    described = stored.training["optimizer"]
    optimizer.num_steps = int(described["num_steps"])
    optimizer.num_skipped_steps = int(described["num_skipped_steps"])
    scale, saved = optimizer.loss_scale, described["loss_scale"]
    if type(scale).__name__ == saved["kind"]:
        scale.load_state_dict(decode(saved["state"]))
    else:
        report.notes.append(
            f"the loss scale stays {scale.scale:g}: the checkpoint's is a {saved['kind']}, this run's a "
            f"{type(scale).__name__}"
        )


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):  # schedulers and compiled steps hold on to it
        present.fill_(float(value))
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) and present is not None else value


def _slots(group: dict[str, Any]) -> list[ParameterSlot]:
    return [slot for slot in map(find_slot, group["params"]) if slot is not None]


def _trained_names(optimizer: ShardedOptimizerMark) -> list[str]:
    return [s.name for group in optimizer.param_groups for s in _slots(group) if s.group.trainable]


def _grouped_names(described: dict[str, Any]) -> set[str]:
    return {name for group in described["groups"] for name in group["params"]}
