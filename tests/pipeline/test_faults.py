"""What users of other pipelines met: shapes that change, data that end, values that get lost."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from pipeline.models import Data, loss_fn, tied
from pipeline.twin import Recipe, assert_follows, make, parameters, train, train_alone
from shardcore.errors import ConfigError, PlanError, RankMismatchError, StateError
from shardcore.pipeline import Arguments, LayerSpec, Pipeline, Recompute, TiedLayerSpec
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


@spmd(world=2)
def test_e1_shapes_may_change_at_each_micro_batch() -> None:
    recipe = Recipe(m=3, data=Data(lengths=(5, 9, 3, 12, 1, 7)))
    assert_follows(train(recipe, sc.Mesh(pp=2)), train_alone(recipe))


@spmd(world=3)
def test_e3_evaluation_between_steps_changes_nothing() -> None:
    mesh = sc.Mesh(pp=3)
    recipe = Recipe(model="dropping", m=3, data=Data(sizes=(4,)))
    plain = train(recipe, mesh)
    pipe, optimizer = make(recipe, mesh)
    data = recipe.data.of_rank(0, 1, recipe.m, recipe.steps)
    losses = []
    for size in (2, 7, 4, 1, 3):
        losses.append(float(pipe.train_batch(data, optimizer)))
        again = [float(pipe.eval_batch(Data(sizes=(size,)).of_rank(0, 1, 3, 1))) for _ in range(2)]
        assert again[0] == again[1]
    assert pipe.training
    assert_bitwise([losses, parameters(pipe)], [plain.losses, plain.parameters])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@spmd(world=3)
def test_e4_every_rank_gets_the_last_stages_loss(dtype: str) -> None:
    mesh = sc.Mesh(pp=3)
    pipe = Pipeline(tied(), mesh, num_microbatches=2, loss_fn=loss_fn)
    sc.shard(pipe, mesh, stage=0, precision=sc.Precision(param=dtype))
    loss, outputs = pipe.eval_batch(Data().of_rank(0, 1, 2, 1), return_outputs=True)
    losses = sc.comm.exchange(float(loss), mesh["pp"], "losses")
    assert len(set(losses)) == 1
    assert (outputs is not None) == (mesh.rank == 2)
    if outputs is not None:
        wanted = [float(loss_fn(out, Data().batch(0, i)[1]).float()) for i, out in enumerate(outputs)]
        assert losses[0] == pytest.approx(sum(wanted) / 2, rel=1e-6)


@spmd(world=2)
def test_e5_evaluation_counts_its_own_micro_batches() -> None:
    mesh = sc.Mesh(pp=2)
    pipe, _ = make(Recipe(m=4), mesh)
    loss, outputs = pipe.eval_batch(Data().of_rank(0, 1, 2, 1), num_microbatches=2, return_outputs=True)
    if outputs is not None:
        assert len(outputs) == 2
        wanted = [float(loss_fn(out, Data().batch(0, i)[1])) for i, out in enumerate(outputs)]
        assert float(loss) == pytest.approx(sum(wanted) / 2, rel=1e-6)


@spmd(world=3)
def test_e6_data_that_end_are_an_error_everywhere() -> None:
    mesh = sc.Mesh(pp=3)
    pipe, optimizer = make(Recipe(m=4), mesh)
    data = None if mesh.rank == 1 else (Data().batch(0, i) for i in range(7))
    pipe.train_batch(data, optimizer)
    start = time.monotonic()
    with pytest.raises(StateError, match="data exhausted after 3 of 4"):
        pipe.train_batch(data, optimizer)
    assert time.monotonic() - start < 10


@spmd(world=3)
def test_e6_one_iterator_that_ends_early() -> None:
    mesh = sc.Mesh(pp=3)
    pipe, optimizer = make(Recipe(m=4), mesh)
    with pytest.raises(StateError, match="data exhausted after 2 of 4"):
        pipe.train_batch((Data().batch(0, i) for i in range(2 if mesh.rank == 2 else 8)), optimizer)


class Raises(nn.Module):
    """Fails at its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, or an error."""
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third micro-batch is bad")
        return self.lin(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@spmd(world=4, grace=30)
def test_a_rank_that_raises_ends_all(schedule: str) -> None:
    mesh = sc.Mesh(pp=4)
    layers = [nn.Linear(4, 4) for _ in range(8)]
    layers[1] = Raises()
    pipe = Pipeline(
        nn.Sequential(*layers), mesh, schedule=schedule, num_microbatches=6, loss_fn=F.mse_loss, partition="uniform"
    )
    data = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 6)
    start = time.monotonic()
    with pytest.raises((ValueError, RankMismatchError), match="the third micro-batch is bad"):
        pipe.train_batch(data)
    assert time.monotonic() - start < 10


class Pair(NamedTuple):
    """A tuple of the user's own class."""

    x: torch.Tensor
    rest: Any


class Mixed(nn.Module):
    """Passes on everything that values may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, pair: Pair) -> Pair:
        """The pair, its floats changed."""
        mask, ids, nothing, number, flag, half = pair.rest
        assert mask.dtype == torch.bool
        assert ids.dtype == torch.int64
        assert ids.tolist() == [3, 1, 4]
        assert mask.tolist() == [True, False, True]
        assert (nothing, number, flag) == (None, 7, True)
        assert half.dtype == torch.bfloat16
        assert half.shape == (0, 2)
        return Pair(self.lin(pair.x), (mask, ids, nothing, number, flag, half))


def first_of(pair: Pair, labels: torch.Tensor) -> torch.Tensor:
    """Mean square of the floats."""
    return F.mse_loss(pair.x, labels)


@spmd(world=3)
def test_e7_values_of_every_kind_arrive() -> None:
    mesh = sc.Mesh(pp=3)
    rest = (
        torch.tensor([True, False, True]),
        torch.tensor([3, 1, 4]),
        None,
        7,
        True,
        torch.zeros(0, 2, dtype=torch.bfloat16),
    )
    pipe = Pipeline([LayerSpec(Mixed) for _ in range(3)], mesh, num_microbatches=2, loss_fn=first_of)
    pipe.train_batch(iter([(Pair(torch.ones(2, 4), rest), torch.zeros(2, 4))] * 2))
    assert all(p.grad is not None for p in pipe.parameters())


@spmd(world=2)
def test_e7_what_cannot_travel_is_named() -> None:
    mesh = sc.Mesh(pp=2)
    pipe = Pipeline(
        [nn.Linear(4, 4), lambda x: (x, lambda: None), nn.Linear(4, 4)], mesh, loss_fn=F.mse_loss, partition=[0, 2, 3]
    )
    with pytest.raises((ConfigError, RankMismatchError), match="output of stage 0"):
        pipe.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))


class Named(nn.Module):
    """Takes its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float, bias: torch.Tensor | None = None) -> Arguments:
        """Arguments for the next one."""
        y = self.lin(x) * scale
        return Arguments((y if bias is None else y + bias,), {"scale": scale, "bias": bias})


@spmd(world=2)
def test_keyword_arguments() -> None:
    mesh = sc.Mesh(pp=2)
    inputs = Arguments((torch.ones(2, 4),), {"scale": 0.5, "bias": torch.ones(4)})
    pipe = Pipeline([LayerSpec(Named), LayerSpec(Named)], mesh, loss_fn=lambda out, y: F.mse_loss(out.args[0], y))
    pipe.train_batch(iter([(inputs, torch.zeros(2, 4))]))
    assert all(p.grad is not None for p in pipe.parameters())


@spmd(world=3)
def test_e9_tied_weights_stay_equal() -> None:
    mesh = sc.Mesh(pp=3)
    recipe = Recipe(m=3, steps=10, clip=0.5)
    run = train(recipe, mesh)
    assert_follows(run, train_alone(recipe))
    copies = {name: value for name, value in run.parameters.items() if name in ("0.weight", "7.weight")}
    texts = sc.comm.exchange([v.tolist() for v in copies.values()], mesh["pp"], "copies")
    assert [len(each) for each in texts] == [1, 0, 1]
    assert texts[0] == texts[2]


def both_tied() -> list[LayerSpec]:
    """The first and the last layer share weight and bias."""
    ends = [TiedLayerSpec("ends", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]) for _ in range(2)]
    return [ends[0], *(LayerSpec(nn.Linear, 4, 4) for _ in range(4)), ends[1]]


def vectors(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three micro-batches of a step."""
    draw = torch.Generator().manual_seed(step)
    return [(torch.randn(2, 4, generator=draw), torch.randn(2, 4, generator=draw)) for _ in range(3)]


@pytest.mark.parametrize(("stage", "reduce"), [(1, "once"), (2, "once"), (2, "per_microbatch")])
@spmd(world=3)
def test_e9_every_tied_attribute_stays_equal(stage: int, reduce: str) -> None:
    """Weight and bias under AdamW, clipped; gradients reduced once a step, or while later backwards still run."""
    mesh = sc.Mesh(pp=3)
    pipe = Pipeline(both_tied(), mesh, num_microbatches=3, loss_fn=F.mse_loss, reduce=reduce)
    sc.shard(pipe, mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.AdamW, pipe, lr=0.05, max_grad_norm=0.1)
    layers = sc.pipeline.build_layers(both_tied())
    alone = nn.ModuleDict({layer.name: layer.module for layer in layers})
    reference = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for step in range(10):
        pipe.train_batch(iter(vectors(step)), optimizer)
        sc.testing.reference_step(layers, vectors(step), reference, loss_fn=F.mse_loss, step=step, max_grad_norm=0.1)
    found, wanted = parameters(pipe), dict(alone.named_parameters(remove_duplicate=False))
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-5)
    for kind in ("weight", "bias"):
        mine = [value.tolist() for name, value in found.items() if name in (f"0.{kind}", f"5.{kind}")]
        first, middle, last = sc.comm.exchange(mine, mesh["pp"], "copies")
        assert (len(first), middle) == (1, [])
        assert first == last


@spmd(world=2)
def test_e12_evaluations_leave_the_buffers_of_recomputation_alone() -> None:
    """Many more evaluations than the buffers have room for, between steps."""
    mesh = sc.Mesh(pp=2)
    runs = []
    for num_evaluations in (0, 20):
        settings = sc.activation.Settings(contiguous=True, num_checkpoints=2)
        options = {"recompute": Recompute(interval=1, function=partial(sc.activation.checkpoint_with, settings))}
        pipe, optimizer = make(Recipe(model="dropping", m=3, options=options), mesh)
        data = Data().of_rank(0, 1, 3, 3)
        losses = []
        for _ in range(3):
            losses.append(float(pipe.train_batch(data, optimizer)))
            found = {float(pipe.eval_batch(Data(seed=1).of_rank(0, 1, 2, 1), 2)) for _ in range(num_evaluations)}
            assert len(found) <= 1
        runs.append([losses, parameters(pipe)])
    plain = train(Recipe(model="dropping", m=3, steps=3), mesh)
    assert_bitwise(runs, [[plain.losses, plain.parameters]] * 2)


@pytest.mark.parametrize("partition", ["uniform", "parameters"])
@spmd(world=[1, 2, 3, 4])
def test_e13_no_layer_is_lost(partition: str, world: int) -> None:
    mesh = sc.Mesh(pp=world)
    for count in range(1, 10):
        layers = [LayerSpec(nn.Linear, 2, 2) for _ in range(count)]
        if count < world:
            with pytest.raises(PlanError):
                Pipeline(layers, mesh, partition=partition)
            continue
        names = list(Pipeline(layers, mesh, partition=partition).state_dict())
        everywhere = [name for some in sc.comm.exchange(names, mesh["pp"], "names") for name in some]
        assert everywhere == [f"{i}.{kind}" for i in range(count) for kind in ("weight", "bias")]


@spmd(world=3)
def test_e14_a_stage_without_layers_or_parameters_is_refused() -> None:
    mesh = sc.Mesh(pp=3)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    with pytest.raises(PlanError):
        Pipeline(layers, mesh, partition=[0, 2, 2, 4])
    with pytest.raises(ConfigError, match=r"ranks \[1\] would run layers without parameters"):
        Pipeline(layers, mesh, partition=[0, 2, 3, 4])


@spmd(world=2)
def test_a_stage_may_be_frozen() -> None:
    mesh = sc.Mesh(pp=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    pipe = Pipeline(model, mesh, num_microbatches=2, loss_fn=F.mse_loss)
    sc.shard(pipe, mesh, stage=1)
    optimizer = sc.optimizer("sgd", pipe, lr=0.1, max_grad_norm=1.0)
    before = parameters(pipe)
    pipe.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2), optimizer)
    changed = [name for name, value in parameters(pipe).items() if not torch.equal(value, before[name])]
    assert changed == ([] if mesh.rank == 0 else ["1.weight", "1.bias"])


@spmd(world=2)
def test_e18_a_smaller_last_micro_batch() -> None:
    """Each micro-batch counts the same, or by its labels: the loss of the whole batch at once."""
    mesh = sc.Mesh(pp=2)
    recipe = Recipe(m=3, data=Data(sizes=(4, 4, 1)))
    assert_follows(train(recipe, mesh), train_alone(recipe))


@spmd(world=4)
def test_e18_weighted_by_tokens() -> None:
    mesh = sc.Mesh(pp=2)
    data = Data(sizes=(4, 4, 1), lengths=(5, 2))
    pipe, optimizer = make(Recipe(m=3, stage=2, options={"normalize": "tokens"}), mesh)
    loss = pipe.train_batch(data.of_rank(mesh.data_rank, 2, 3, 1), optimizer)
    layers = sc.pipeline.build_layers(tied())
    batches = [data.batch(0, i) for i in range(6)]
    weights = [labels.numel() for _, labels in batches]
    wanted, norm = sc.testing.reference_step(layers, batches, loss_fn=loss_fn, weights=weights)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe", "interleaved"])
@spmd(world=2)
def test_evaluation_on_every_placement(schedule: str) -> None:
    """Any number of micro-batches, by the stages' own placement: the loss that training starts from."""
    mesh = sc.Mesh(pp=2)
    pipe, _ = make(Recipe(schedule=schedule), mesh)
    layers = sc.pipeline.build_layers(tied())
    for count in (1, 2, 5):
        batches = [Data().batch(0, i) for i in range(count)]
        wanted, _ = sc.testing.reference_step(layers, batches, loss_fn=loss_fn)
        assert float(pipe.eval_batch(iter(batches), count)) == pytest.approx(wanted, rel=1e-5)


def peak(schedule: str, m: int, mesh: sc.Mesh) -> int:
    """Most bytes of tensors that a step adds on this rank."""
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    pipe = Pipeline(layers, mesh, schedule=schedule, num_microbatches=m, loss_fn=F.mse_loss)
    batches = [(torch.ones(2048, 8), torch.zeros(2048, 8))] * m
    pipe.train_batch(iter(batches))
    with sc.testing.PeakTensorBytes() as measured:
        pipe.train_batch(iter(batches))
    return measured.peak_nbytes - measured.start_nbytes


@spmd(world=2)
def test_memory_of_1f1b_does_not_grow_with_micro_batches() -> None:
    mesh = sc.Mesh(pp=2)
    few, many, everything = peak("1f1b", 8, mesh), peak("1f1b", 24, mesh), peak("gpipe", 24, mesh)
    message = 2048 * 8 * 4
    assert many - few <= 4 * message  # how many messages are under way depends on timing
    assert everything - many >= 16 * message


@spmd(world=2, grace=30)
def test_a_pipeline_that_failed_says_so() -> None:
    mesh = sc.Mesh(pp=2)
    pipe = Pipeline([Raises(), nn.Linear(4, 4)], mesh, num_microbatches=4, loss_fn=F.mse_loss)
    data = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 8)
    with pytest.raises((ValueError, RankMismatchError)):
        pipe.train_batch(data)
    with pytest.raises(StateError, match="step has failed on this mesh"):
        pipe.train_batch(data)
