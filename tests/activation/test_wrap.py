"""``activation.wrap``: the same module with the same names, numbers and hooks; what cannot be is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from activation.blocks import Block, Stack, passes, seeded
from shardcore.errors import ConfigError, StateError
from shardcore.testing.twin import assert_bitwise

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"policy": "selective"},
    "offloaded": {"offload": "cpu"},
    "selective, offloaded": {"policy": "selective", "offload": "cpu"},
    "contiguous": {"contiguous": True},
    "watched": {"synchronize": True, "profile": True},
}
all_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@all_settings
def test_gradients_and_random_numbers_are_the_same(settings: dict[str, Any]) -> None:
    model = seeded(Stack)
    expected = [passes(model, seed=seed) for seed in range(3)]
    assert sc.activation.wrap(model, **settings) is model
    assert_bitwise([passes(model, seed=seed) for seed in range(3)], expected)
    assert_bitwise(passes(sc.activation.unwrap(model), seed=0), expected[0])


@all_settings
def test_copies_are_wrapped_too_and_by_themselves(settings: dict[str, Any]) -> None:
    model = sc.activation.wrap(seeded(Stack), **settings)
    expected = passes(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert sc.activation.is_wrapped(copied)
        assert_bitwise(passes(copied), expected)
        model = copied


def test_a_model_that_is_let_go_is_freed() -> None:
    model = sc.activation.wrap(seeded(Stack), offload="cpu")
    passes(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_names_and_hooks_stay() -> None:
    model = seeded(Stack)
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    calls: list[str] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append("before"))
        block.register_forward_hook(lambda *_: calls.append("after"))
    sc.activation.wrap(model)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    passes(model)
    assert calls == ["before", "after"] * 3


def count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.up.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_blocks_run_twice_in_training_and_once_without_gradients() -> None:
    model = sc.activation.wrap(seeded(Stack))
    calls = count_calls(model.blocks[1])
    passes(model)
    assert len(calls) == 2
    with torch.no_grad():
        model(torch.ones(2, 5))
    assert len(calls) == 3
    passes(model.eval())
    assert len(calls) == 5


def test_e12_evaluations_between_training_steps_leave_nothing_in_the_contiguous_buffer() -> None:
    """20 without gradients and 20 whose graph is dropped without a backward, of other sizes than in training."""
    model = seeded(Stack)
    expected = [passes(model, seed=seed) for seed in range(3)]
    sc.activation.wrap(model, contiguous=True)
    for seed, values in enumerate(expected):
        for rows in range(1, 21):
            with torch.no_grad():
                model.eval()(torch.ones(rows, 5))
            model(torch.ones(rows, 5))
        model.train()
        assert_bitwise(passes(model, seed=seed), values)


def test_a_block_inside_another_region_is_a_part_of_it() -> None:
    model = sc.activation.wrap(seeded(Stack), offload="cpu")
    expected = passes(model)
    calls = count_calls(model.blocks[1])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sc.activation.checkpoint(self.inner, x)

    assert_bitwise(passes(Outer()), expected)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "units",
    [["Block"], [Block], lambda name, module: name.startswith("blocks.") and name.count(".") == 1],
    ids=["name", "class", "function"],
)
def test_units(units: Any) -> None:
    model = sc.activation.wrap(seeded(Stack), units=units)
    wrapped = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert wrapped == ["blocks.0", "blocks.1", "blocks.2"]
    one = seeded(Stack)
    sc.activation.wrap(one, units=[one.blocks[1]])
    assert [name for name, module in one.named_modules() if "forward" in vars(module)] == ["blocks.1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": ["Blok"]}, "'Blok' is not in the model Stack; its classes are Block"),
        ({"units": "all"}, "units='all': expected 'auto'"),
        ({"units": lambda name, module: False}, "has no such blocks; name their classes"),
        ({"policy": "some"}, "policy='some': expected 'full' or 'selective'"),
        ({"offload": "nvme"}, "offload='nvme': expected None or 'cpu'"),
        ({"partition": True}, "partition=mesh\\['tp'\\]"),
        ({"partition": "tp"}, "partition='tp': say among which ranks"),
        ({"policy": "x", "offload": "y"}, "policy='x'.*; offload='y'"),
        ({"num_checkpoints": 0}, "num_checkpoints=0: expected an integer of at least 1"),
    ],
)
def test_wrong_arguments_change_nothing(options: dict[str, Any], message: str) -> None:
    model = seeded(Stack)
    with pytest.raises(ConfigError, match=message):
        sc.activation.wrap(model, **options)
    assert not sc.activation.is_wrapped(model)


def test_lone_layers_are_no_blocks() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="Sequential has no such blocks"):
        sc.activation.wrap(layers)
    assert sc.activation.is_wrapped(sc.activation.wrap(layers, units=[nn.Linear]))


def test_wrapping_twice_is_refused() -> None:
    model = sc.activation.wrap(seeded(Stack))
    for part in (model, model.blocks[0]):
        with pytest.raises(StateError, match=r"is wrapped already.*unwrap"):
            sc.activation.wrap(part, units=[Block])
    sc.activation.wrap(sc.activation.unwrap(model), policy="selective")


def test_a_forward_that_was_replaced_before_is_recomputed_and_comes_back() -> None:
    model = seeded(Stack)
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda x: 2 * original(x)
    expected = passes(model)
    assert_bitwise(passes(sc.activation.wrap(model)), expected)
    assert_bitwise(passes(sc.activation.unwrap(model)), expected)
    assert "forward" in vars(model.blocks[0])


def test_a_forward_that_was_replaced_afterwards_stays() -> None:
    from functools import partial

    model = sc.activation.wrap(seeded(Stack))
    expected = passes(model)
    ours = model.blocks[0].forward
    model.blocks[0].forward = partial(ours)
    assert_bitwise(passes(model), expected)
    with pytest.raises(StateError, match=r"'blocks.0' cannot be unwrapped"):
        sc.activation.unwrap(model)


def test_profile_says_what_each_block_takes(caplog: pytest.LogCaptureFixture) -> None:
    model = sc.activation.wrap(seeded(Stack), profile=True)
    with caplog.at_level("INFO", "shardcore"):
        passes(model)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" in ")[0].split(": ")[1] for line in said] == [
        *(f"blocks.{i} computed" for i in (0, 1, 2)),
        *(f"blocks.{i} recomputed" for i in (2, 1, 0)),
    ]
