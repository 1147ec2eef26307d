"""The reference loop against torch's own tools, and the comparisons against what they must tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from shardcore.testing import twin, zoo


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches(name: str, count: int, batch_size: int = 4) -> list[zoo.Batch]:
    return [zoo.batch(name, seed, batch_size) for seed in range(count)]


@pytest.mark.parametrize("name", ["mlp", "frozen", "unused", "tied", "nested"])
def test_the_loop_is_the_textbook_loop(name: str) -> None:
    run = twin.reference(lambda: zoo.build(name), batches(name, 6), adamw, accumulation=2, clip=0.5)
    model = zoo.build(name)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(3):
        losses = [zoo.loss(model, zoo.batch(name, 2 * step + i, 4)) for i in range(2)]
        sum(losses[1:], losses[0]).div(2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert run.grad_norms[step] == pytest.approx(norm.item(), rel=1e-5)
        assert run.losses[step] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert len(run.losses) == 3
    twin.assert_close_trees(run.parameters, dict(model.named_parameters()), rtol=1e-5, atol=1e-6)


def test_accumulation_equals_the_joined_batch() -> None:
    small = batches("mlp", 4)
    joined = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in (small[:2], small[2:])]
    a = twin.reference(lambda: zoo.build("mlp"), small, sgd, accumulation=2)
    b = twin.reference(lambda: zoo.build("mlp"), joined, sgd)
    twin.assert_close_trees(a.parameters, b.parameters, rtol=1e-6, atol=1e-7)


def test_clipping_bounds_the_update() -> None:
    run = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 1), sgd, clip=1e-3)
    start = zoo.build("mlp").state_dict()
    update = math.sqrt(sum(float((run.parameters[n] - p).double().square().sum()) for n, p in start.items()))
    assert run.grad_norms[0] > 1e-3
    assert update == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_the_scheduler_steps_once_per_step() -> None:
    def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)

    one = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 2), sgd, accumulation=2)
    two = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 6), sgd, accumulation=2, scheduler=halve)
    twin.assert_bitwise(two.parameters, one.parameters)  # the rate is 0 from the second step on


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_masters_in_float32(dtype: torch.dtype) -> None:
    low = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 4), sgd, dtype=dtype, loss_scale=128.0)
    full = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 4), sgd)
    assert {p.dtype for p in low.parameters.values()} == {torch.float32}
    assert low.skipped == []
    twin.assert_close_trees(low.losses, full.losses, rtol=2e-2, atol=1e-3)
    assert any(not torch.equal(p.to(dtype).float(), p) for p in low.parameters.values()), "more digits than the copy"


def test_an_overflow_skips_the_step() -> None:
    run = twin.reference(lambda: zoo.build("mlp"), batches("mlp", 2), adamw, dtype=torch.float16, loss_scale=2.0**24)
    assert run.skipped == [0, 1]
    twin.assert_bitwise(run.parameters, {n: p.detach() for n, p in zoo.build("mlp").named_parameters()})


def test_parts_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="whole steps of 2"):
        twin.reference(lambda: zoo.build("mlp"), batches("mlp", 3), sgd, accumulation=2)


# ---------------------------------------------------------------------------------------------------- comparisons


def test_trees_within_tolerance_are_close() -> None:
    a = {"x": [torch.tensor([1.0, 2.0]), 3], "y": ("word", None)}
    b = {"x": [torch.tensor([1.0, 2.0 + 1e-6]), 3], "y": ("word", None)}
    twin.assert_close_trees(a, b, rtol=1e-5, atol=0.0)
    with pytest.raises(AssertionError, match=r"\['x'\]\[0\]: 1 of 2 elements differ by up to"):
        twin.assert_close_trees(a, b, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        ({"a": 1.0}, {"b": 1.0}, r"only in actual \['a'\], only in expected \['b'\]"),
        ([1.0], [1.0, 2.0], "1 items, expected 2"),
        (torch.zeros(2), torch.zeros(2, 1), "shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2), [0.0, 0.0], "Tensor, expected list"),
        (torch.tensor(math.nan), torch.tensor(0.0), "1 of 1 elements"),
        ("a", "b", "'a', expected 'b'"),
        (1, 2, "1 of 1 elements"),
    ],
)
def test_what_differs_is_told(actual: object, expected: object, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        twin.assert_close_trees(actual, expected, rtol=1e-3, atol=1e-3)


def test_all_differences_are_listed() -> None:
    with pytest.raises(AssertionError) as caught:
        twin.assert_bitwise({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 0.0, "b": 2.0, "c": 0.0})
    assert "['a']" in str(caught.value)
    assert "['c']" in str(caught.value)
    assert "['b']" not in str(caught.value)


def test_bitwise_means_every_bit() -> None:
    x = torch.tensor([1.0, math.nan, 0.0, math.inf])
    twin.assert_bitwise({"x": x, "e": torch.empty(0)}, {"x": x.clone(), "e": torch.empty(0)})
    twin.assert_bitwise(math.nan, math.nan)
    for value, other in [(0.0, -0.0), (1.0, 1.0 + 2**-23)]:
        with pytest.raises(AssertionError, match="1 of 1 elements differ, the first at 0"):
            twin.assert_bitwise(torch.tensor([value]), torch.tensor([other]))
    twin.assert_bitwise(x.reshape(2, 2).t(), x.clone().reshape(2, 2).t())
