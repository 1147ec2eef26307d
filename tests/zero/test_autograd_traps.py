"""Units used in every way autograd allows give the gradients of the plain model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block
from zero.twin import whole_parameters

STAGES = [0, 1, 2, 3]
all_stages = pytest.mark.parametrize("stage", STAGES)


class Stack(nn.Module):
    """Three blocks, the first applied ``repeats`` times."""

    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.repeats = repeats
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats - 1):
            x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(rows(step, rank, 4, 7)).square().mean()


def play_plain(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()


@all_stages
@spmd(world=2)
def test_c11_layer_applied_four_times(stage: int) -> None:
    check_follows(lambda: Stack(4), play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_c11_two_forwards_before_one_backward(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        (loss_of(model, step, rank) + 0.5 * loss_of(model, step + 50, rank)).backward()

    check_follows(Stack, play, stage=stage)


@all_stages
@spmd(world=2)
def test_c11_two_backwards_through_one_graph(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model, step, rank)
        loss.backward(retain_graph=True)
        loss.backward()

    check_follows(Stack, play, stage=stage)


class TwoHeads(nn.Module):
    """A trunk with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(7, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.trunk:
            x = block(x)
        return self.heads[0](x), self.heads[1](x)


@all_stages
@spmd(world=2)
def test_c12_two_losses_with_separate_backwards(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        a, b = model(rows(step, rank, 4, 7))
        a.square().mean().backward(retain_graph=True)
        b.square().mean().backward()

    def play_sum(model: nn.Module, step: int, rank: int) -> None:
        a, b = model(rows(step, rank, 4, 7))
        (a.square().mean() + b.square().mean()).backward()

    check_follows(TwoHeads, play, stage=stage, reference_play=play_sum)


class Checkpointed(nn.Module):
    """One block applied in two checkpointed regions, with plain blocks around."""

    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for i in (1, 2, 1):
            x = self._recomputed(self.blocks[i], x)
        return self.head(x)

    def _recomputed(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


@all_stages
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@spmd(world=2)
def test_b20_block_in_two_checkpointed_regions(stage: int, use_reentrant: bool, accumulation: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(accumulation):
            x = rows(10 * step + micro, rank, 4, 7).requires_grad_()
            model(x).square().mean().backward()

    def build() -> nn.Module:
        return Checkpointed(use_reentrant=use_reentrant)

    def without(model: nn.Module, step: int, rank: int) -> None:
        model.use_reentrant = None  # type: ignore[assignment]
        play(model, step, rank)

    check_follows(build, play, stage=stage, reference_play=without)


@all_stages
@spmd(world=2)
def test_b20_whole_model_recomputed_around_its_blocks(stage: int) -> None:
    """Nested: the outer region recomputes the inner ones."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(use_reentrant=False)
            self.last = Block(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]

    check_follows(Outer, play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_c13_reentrant_checkpoint_with_a_gradient_for_a_vector(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        out = model(rows(step, rank, 4, 7).requires_grad_())
        out.backward(rows(step + 70, rank, *out.shape))

    check_follows(lambda: Checkpointed(use_reentrant=True), play, stage=stage, steps=4)


class Borrower(nn.Module):
    """Uses the weight of a block that it does not call, and a transposed view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = x + F.linear(torch.tanh(F.linear(x, self.blocks[2].up.weight)), self.blocks[2].down.weight)
        x = self.blocks[1](x)
        return x @ self.blocks[1].up.weight.t()


@all_stages
@spmd(world=2)
def test_weights_used_outside_their_module(stage: int) -> None:
    check_follows(Borrower, play_plain, stage=stage)


class SavedView(nn.Module):
    """A unit whose output keeps a view of its weight alive over the release."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewLayer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ViewLayer(nn.Module):
    """``x @ w.t()``: autograd saves the view, not the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.t() + x @ self.weight[:, ::2].repeat(1, 2)[:, :7])


@all_stages
@spmd(world=2)
def test_saved_views_survive_the_release(stage: int) -> None:
    check_follows(SavedView, play_plain, stage=stage)


class InPlace(nn.Module):
    """Changes the outputs of its units in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y.add_(x)
            x = torch.relu_(y)
        return self.last(x)


@all_stages
@spmd(world=2)
def test_in_place_operations_on_a_units_output(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        out = model(rows(step, rank, 4, 7).requires_grad_())
        out += 1.0
        loss = out.square().mean()
        loss /= 2
        loss.backward()

    check_follows(InPlace, play, stage=stage)


@all_stages
@spmd(world=2)
def test_units_in_another_order_each_step_and_some_left_out(stage: int) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.order = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in self.order:
                x = self.blocks[i](x)
            return x

    def play(model: nn.Module, step: int, rank: int) -> None:
        model.order = [[0, 1, 2, 3], [3, 1], [2, 0, 2], [0, 1, 2, 3], [1]][step]  # type: ignore[assignment]
        play_plain(model, step, rank)

    check_follows(Router, play, stage=stage, steps=5)


@all_stages
@spmd(world=2)
def test_frozen_unit_between_trained_ones_still_passes_gradients(stage: int) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.blocks[1].requires_grad_(False)
        return model

    check_follows(build, play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_state_dict_between_forward_and_backward(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model, step, rank)
        state = model.state_dict()
        assert state["blocks.0.up.weight"].shape == (13, 7)
        loss.backward()

    check_follows(Stack, play, stage=stage)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # the compiler's own look at its inputs
@pytest.mark.parametrize("stage", [0, 2, 3])
@spmd(world=2)
def test_compiled_blocks_train_as_eager_ones(stage: int) -> None:
    """The graphs run as they are, since generated kernels round otherwise: tracing and the hooks must get along."""
    graphs: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            block.compile(backend=keep_graph)
        return model

    def eager(model: nn.Module, step: int, rank: int) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block._compiled_call_impl = None
        play_plain(model, step, rank)

    torch._dynamo.reset()
    check_follows(build, play_plain, stage=stage, reference_play=eager)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert 1 <= len(graphs) <= 6, "one graph for all blocks, and few recompilations"
    assert len(calls) >= 5, "the block's own operations are in the graph"


class Overwriting(nn.Module):
    """A frozen layer with an adapter, whose first operation writes to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(x)
        return self.frozen(x) + self.up(self.down(x))


class Overwritten(nn.Module):
    """Such blocks behind plain layers; ``around`` is what saves their tensors."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.blocks = nn.ModuleList(Overwriting() for _ in range(3))
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if self.around == "checkpoint":
                x = checkpoint(lambda x, layer=layer, block=block: block(layer(x)), x, use_reentrant=False)
            else:
                with save_on_cpu() if self.around == "cpu" else nullcontext():
                    x = block(layer(x))
        return x


@spmd(world=2)
def test_units_that_write_to_their_inputs_stay_until_autograd_has_read_them() -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 6)).square().mean().backward()

    for around in ("", "cpu", "checkpoint"):
        check_follows(lambda around=around: Overwritten(around), play, stage=3, units=[Overwriting])


class Picky(nn.Module):
    """Looks at what it is given: attributes, identity, and a layout that has no views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, q: torch.Tensor, k: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        y = (q * q.factor) @ self.weight
        return (y if q is k else y * 2) + torch.sparse.mm(sparse, self.weight)


class Offered(nn.Module):
    """A block that gives it these."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.picky = Picky()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.factor = 3.0
        return self.picky(x, x, (x.relu() * 0.1).to_sparse())


@all_stages
@spmd(world=2)
def test_inputs_keep_what_units_look_at(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 6, 6)).square().mean().backward()

    check_follows(Offered, play, stage=stage, units=[Picky])


class Sums(nn.Module):
    """Sums of parameters, whose gradients need none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.first = nn.Linear(4, 6)
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0].abs() * 4).long().clamp(max=8)) + self.first(x) + self.bias


@spmd(world=[1, 2])
def test_a_graph_from_before_the_step_brings_its_gradients() -> None:
    """As in torch, where nothing that was saved has changed since."""
    for stage in (0, 1, 2, 3):
        for units in ("auto", [nn.Embedding, nn.Linear]):
            train_by_old_graphs(stage, units)


def train_by_old_graphs(stage: int, units: Any) -> None:
    mesh = sc.Mesh()
    model = sc.shard(seeded(Sums), mesh, stage=stage, units=units)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    plain = seeded(Sums)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        losses = [model(rows(2 * step + i, mesh.data_rank, 4, 4)).square().mean() for i in range(2)]
        expected = [
            sum(plain(rows(2 * step + i, rank, 4, 4)).square().mean() for rank in range(mesh.data_world))
            / mesh.data_world
            for i in range(2)
        ]
        for loss, reference in zip(losses, expected, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.backward()
            alone.step()
            alone.zero_grad()
    torch.testing.assert_close(whole_parameters(model), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)
