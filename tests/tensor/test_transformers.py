"""Hugging Face models that were split by their own or a recognised plan follow the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_pieces
from shardcore.testing import spmd
from tensor.hugging_face import CONFIGS, batch, build, loss

QUICK = ("llama-tied", "gpt2", "bert", "qwen3", "phi3")


STAYS_WHOLE = {
    "mixtral": "perceptron",  # experts are split otherwise
    "apertus": "perceptron",  # its activation has parameters
    "codegen": "attention",  # its fused weight has an order of its own
    "deepseek": "attention",  # its keys and values are made of one short vector
}


def cells(names: list[str], quick: tuple[str, ...]) -> list[object]:
    """Each name; those that are not quick run in the full product only."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


def tolerance_of(name: str) -> float:
    """Most models round to single precision in their norms, where sums in another order may round the other way."""
    return 1e-11 if name in ("gpt2", "bert", "roberta", "opt", "gpt-neox") else 1e-6


def assert_gradients(split: nn.Module, whole: nn.Module, tolerance: float) -> None:
    """Every parameter and gradient is this rank's part of the whole model's."""
    found = dict(split.named_parameters())
    assert list(found) == [name for name, _ in whole.named_parameters()]
    for name, param in whole.named_parameters():
        pieces = find_pieces(found[name])
        assert torch.equal(found[name], pieces.local(param.detach())), name
        assert (found[name].grad is None) == (param.grad is None), name
        if param.grad is not None:
            difference = float((found[name].grad - pieces.local(param.grad)).abs().max())
            assert difference <= tolerance * max(1.0, float(param.grad.abs().max())), name


def assert_twin(name: str, world: int, *, changes: dict[str, Any] | None = None, **options: object) -> str:
    """Forward, backward and parameter gradients of a split model. Returns the report.

    Args:
        changes: of its configuration; ``options`` are those of ``parallelize``.
    """
    whole, split = build(name, **(changes or {})), build(name, **(changes or {}))
    sc.tensor.parallelize(split, sc.Mesh(tp=world)["tp"], **options)
    inputs = batch()
    value, expected = loss(split, inputs), loss(whole, inputs)
    torch.testing.assert_close(value, expected, rtol=tolerance_of(name), atol=tolerance_of(name))
    value.backward()
    expected.backward()
    assert_gradients(split, whole, tolerance_of(name))
    return sc.tensor.report(split)


@pytest.mark.parametrize("name", cells(list(CONFIGS), QUICK))
@spmd(world=2, timeout=110)
def test_two_ranks(name: str) -> None:
    report = assert_twin(name, 2)
    for kind in ("attention", "perceptron"):
        assert (f"colwise, {kind}" in report) == (STAYS_WHOLE.get(name) != kind), report


@pytest.mark.parametrize("name", cells(["llama", "llama-multi-query", "qwen3", "phi3", "gpt2", "bert"], ("qwen3",)))
@spmd(world=4, timeout=110)
def test_four_ranks(name: str) -> None:
    """Six heads and two key-value heads over four ranks; a multi-query head is held by all of them."""
    report = assert_twin(name, 4)
    if name == "qwen3":
        assert "each part on 2 ranks" in report


@pytest.mark.parametrize("name", cells(["llama", "gpt2", "bert", "qwen3", "phi3", "mistral"], ("gpt2", "qwen3")))
@spmd(world=2, timeout=110)
def test_sequence_parallel(name: str) -> None:
    report = assert_twin(name, 2, sequence=True)
    assert "sequence: activations split" in report


@spmd(world=2, timeout=110)
def test_the_models_own_loss_gathers_no_logits() -> None:
    whole, split = build("llama"), build("llama")
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    inputs = batch()
    out, expected = split(**inputs), whole(**inputs)
    assert out.logits.shape[-1] in (25, 26)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
    out.loss.backward()
    expected.loss.backward()
    assert_gradients(split, whole, tolerance=1e-6)
    split.eval()
    whole.eval()
    with torch.no_grad():
        torch.testing.assert_close(split(**inputs).logits, whole(**inputs).logits, rtol=1e-6, atol=1e-6)
        generated = split.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)
        assert torch.equal(generated, whole.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False))
