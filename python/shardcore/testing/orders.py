"""Programs in a random order that can be executed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from shardcore import plan


def sources() -> st.SearchStrategy[random.Random]:
    """Sources of random choices, each of one drawn number.

    ``st.randoms`` would draw every choice by itself: thousands for a large schedule, which is slow and more than
    hypothesis lets one example draw.
    """
    return st.integers(0, 2**32 - 1).map(random.Random)


def random_order(placement: Sequence[int], num_microbatches: int, source: random.Random) -> list[list[plan.Action]]:
    """One program a rank: forward and backward of every micro-batch, each whole or in two parts.

    Actions are taken one by one, at random among those whose inputs are there, and appended to their rank's program;
    so the programs can be executed in that very order.
    """
    last = len(placement) - 1
    programs: list[list[plan.Action]] = [[] for _ in range(max(placement) + 1)]
    ready = [plan.Action("F", 0, microbatch) for microbatch in range(num_microbatches)]
    split = source.random() < 0.7
    while ready:
        action = ready.pop(source.randrange(len(ready)))
        programs[placement[action.stage]].append(action)
        ready += [plan.Action(kind, stage, action.microbatch) for kind, stage in _enabled(action, last, source, split)]
    return programs


def _enabled(action: plan.Action, last: int, source: random.Random, split: bool) -> list[tuple[str, int]]:
    """What an action makes possible that was not before."""
    stage = action.stage
    backward = "I" if split and source.random() < 0.7 else "B"
    if action.kind == "F":
        return [("F", stage + 1)] if stage < last else [(backward, last)]
    if action.kind == "W":
        return []
    own = [("W", stage)] if action.kind == "I" else []
    return own + ([(backward, stage - 1)] if stage > 0 else [])
