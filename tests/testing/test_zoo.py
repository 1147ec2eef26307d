"""The zoo: models that depend on their seed alone, and losses that average over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcore.testing import twin, zoo

every_model = pytest.mark.parametrize("name", zoo.names())


@every_model
def test_a_seed_decides(name: str) -> None:
    before = torch.get_rng_state()
    a, b, c = zoo.build(name), zoo.build(name), zoo.build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before), "torch's own random state is left alone"
    twin.assert_bitwise(a.state_dict(), b.state_dict())
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))
    twin.assert_bitwise(zoo.batch(name, 3, 4), zoo.batch(name, 3, 4))


@every_model
@pytest.mark.parametrize("world", [2, 4])
def test_equal_slices_average_to_the_global_batch(name: str, world: int) -> None:
    batch = zoo.batch(name, 0, 8)

    def gradients(batches: list[zoo.Batch]) -> dict[str, torch.Tensor]:
        model = zoo.build(name)
        for part in batches:
            (zoo.loss(model, part) / len(batches)).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    whole = gradients([batch])
    sliced = gradients([zoo.rank_slice(batch, rank, world) for rank in range(world)])
    tolerance = 2e-2 if name == "mixed_dtype" else 1e-6  # bfloat16 rounds each slice's gradient
    twin.assert_close_trees(sliced, whole, rtol=tolerance, atol=tolerance)


@every_model
def test_a_model_learns(name: str) -> None:
    model, batch = zoo.build(name), zoo.batch(name, 1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        losses.append(zoo.loss(model, batch).item())
        optimizer.zero_grad()
        zoo.loss(model, batch).backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_models_are_what_their_names_say() -> None:
    numels = {p.numel() for p in zoo.build("odd").parameters()}
    assert {0, 1, 3, 7, 11, 13} <= numels
    assert any(not p.is_contiguous() for p in zoo.build("odd").parameters())
    frozen = [n for n, p in zoo.build("frozen").named_parameters() if not p.requires_grad]
    assert frozen == ["embed.weight", "embed.bias", "middle.bias"]
    assert {p.dtype for p in zoo.build("mixed_dtype").parameters()} == {torch.float32, torch.bfloat16, torch.float64}
    for name in ("tied", "tiny_gpt"):
        model = zoo.build(name)
        assert len(list(model.named_parameters(remove_duplicate=False))) == len(list(model.parameters())) + 1


def without_gradient(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.grad is None]


def test_the_batch_decides_whether_the_branch_is_used() -> None:
    seen = set()
    for seed in range(8):
        model, batch = zoo.build("unused"), zoo.batch("unused", seed, 4)
        zoo.loss(model, batch).backward()
        assert len(batch["gate"].unique()) == 1
        is_open = bool(batch["gate"][0])
        assert without_gradient(model) == ["never"] + ([] if is_open else ["branch.weight", "branch.bias"])
        seen.add(is_open)
    assert seen == {False, True}


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="no model 'lion' in the zoo; there are mlp"):
        zoo.build("lion")
    with pytest.raises(ValueError, match="3 equal slices"):
        zoo.rank_slice(zoo.batch("mlp", 0, 4), 0, 3)
