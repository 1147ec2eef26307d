"""Tensor-parallel ranks, experts, stages and copies: saved in one arrangement, loaded in any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from shardcore.checkpoint.stored import open_checkpoint
from shardcore.errors import CheckpointError
from shardcore.pipeline import Pipeline
from shardcore.tensor import MixtureOfExperts
from shardcore.testing import run_spmd, spmd

VOCABULARY, WIDTH, HIDDEN, NUM_BLOCKS, ROWS = 11, 8, 12, 4, 12
FROZEN = {"2.up.weight", "2.up.bias"}


class Block(nn.Module):
    """What is split: ``up`` in rows, ``down`` in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(seed: int) -> nn.Sequential:
    """Embedding, blocks of which one is frozen, and a head that is the embedding's weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, VOCABULARY, bias=False)
    )
    model[-1].weight = model[0].weight
    model[2].up.requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a training is spread over ranks."""

    tp: int = 1
    pp: int = 1
    replicate: int = 1
    stage: int = 1
    world: int = 1
    precision: str | None = None

    @property
    def is_legal(self) -> bool:
        """Whether the axes make up the world."""
        return self.world % (self.tp * self.pp * self.replicate) == 0


class Training:
    """A model with its optimizer."""

    def __init__(self, spread: Spread, seed: int) -> None:
        self.mesh = sc.Mesh(pp=spread.pp, tp=spread.tp, replicate=spread.replicate, device="cpu")
        model: Any = build(seed)
        if spread.tp > 1:
            sc.tensor.parallelize(model, self.mesh["tp"], {"*.up": "colwise", "*.down": "rowwise"})
        if spread.pp > 1:
            model = Pipeline(model, self.mesh, num_microbatches=2, loss_fn=F.cross_entropy)
        self.model = sc.shard(model, self.mesh, stage=spread.stage, precision=spread.precision)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in named if not name.endswith("bias")], "weight_decay": 0.1},
            {"params": [param for name, param in named if name.endswith("bias")], "weight_decay": 0.0},
        ]
        self.optimizer = sc.optimizer("adamw", groups, lr=1e-2, eps=1e-3)

    def steps(self, first: int, last: int) -> list[float]:
        """Train; the mean losses over the whole batches."""
        return [self._step(number) for number in range(first, last)]

    def _step(self, number: int) -> float:
        rank, world = self.mesh.data_rank, self.mesh.data_world
        whole = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(number))
        tokens = whole.chunk(world)[rank]
        if isinstance(self.model, Pipeline):
            loss = self.model.train_batch(_halves(tokens), self.optimizer)
        else:
            loss = F.cross_entropy(self.model(tokens).float(), (tokens + 1) % VOCABULARY)
            loss.backward()
            self.optimizer.step()
            loss = sc.comm.sum_over_ranks(loss.detach().clone(), self.mesh["dp"], "loss") / world
        self.optimizer.zero_grad()
        return float(loss)


def _halves(tokens: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return iter([(half, (half + 1) % VOCABULARY) for half in tokens.chunk(2)])


def save(spread: Spread, folder: str) -> list[float]:
    """Train, save, and train on."""
    training = Training(spread, seed=0)
    training.steps(0, 3)
    sc.checkpoint.save(f"{folder}/first", training.model, training.optimizer, client_state={"is": "kept"})
    return training.steps(3, 6)


def load(spread: Spread, folder: str) -> list[float]:
    """Load, save again at once, and train on."""
    training = Training(spread, seed=1)
    training.steps(10, 11)
    loaded = sc.checkpoint.load(f"{folder}/first", training.model, training.optimizer)
    assert loaded == {"is": "kept"}
    assert training.optimizer.num_steps == 3
    sc.checkpoint.save(f"{folder}/second", training.model, training.optimizer, tag="again")
    return training.steps(3, 6)


def move(first: Spread, second: Spread, folder: str) -> None:
    """All tensors of both checkpoints are equal to the last bit, and training follows."""
    losses = run_spmd(save, first.world, first, folder)
    again = run_spmd(load, second.world, second, folder)
    stored = [open_checkpoint(Path(folder, name))[0] for name in ("first", "second")]
    kinds = [{key: info for key, info in each.tensors.items() if not key[0].startswith("rank/")} for each in stored]
    assert kinds[0].keys() == kinds[1].keys()
    differ = {found.name for found in sc.checkpoint.diff(f"{folder}/first", f"{folder}/second")}
    # A frozen parameter has no master, so it has the precision of the model that was saved.
    assert differ <= (set() if first.precision == second.precision else FROZEN)
    assert {key[1] for key in kinds[0] if key[0] == "weight"} == {name for name, _ in build(0).named_parameters()}
    if first.precision == second.precision:
        assert stored[0].training["weights"] == stored[1].training["weights"]
    for each in stored:
        assert each.training["weights"]["0.weight"]["aliases"] == [f"{NUM_BLOCKS + 1}.weight"]
        assert sc.checkpoint.verify(each.folder) == []
    assert again[0] == pytest.approx(losses[0], rel=1e-5 if first.precision == second.precision is None else 0.1)


PAIRS = {
    "tp to none": (Spread(tp=2, stage=1, world=4), Spread(stage=3, world=3)),
    "none to tp": (Spread(stage=2, world=2), Spread(tp=2, stage=3, world=4)),
    "tp to tp": (Spread(tp=4, stage=0, world=4), Spread(tp=2, stage=2, world=2, precision="bf16")),
    "copies": (Spread(tp=2, replicate=2, stage=3, world=4), Spread(tp=3, stage=1, world=3)),
    "g21 stages to none": (Spread(pp=2, stage=1, world=4), Spread(stage=3, world=1)),
    "g21 stages to more": (Spread(pp=2, stage=0, world=2), Spread(pp=4, stage=1, world=4)),
    "stages to tp": (Spread(pp=4, stage=1, world=4), Spread(tp=2, pp=2, stage=1, world=4)),
    "none to stages": (Spread(stage=3, world=2, precision="bf16"), Spread(pp=2, stage=2, world=4, precision="bf16")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_training_moves_between_arrangements(name: str, tmp_path: Path) -> None:
    move(*PAIRS[name], str(tmp_path))


SAME = [
    Spread(pp=2, stage=1, world=4, precision="bf16"),
    Spread(pp=2, stage=0, world=2),
    Spread(tp=2, stage=3, world=4),
    pytest.param(Spread(pp=2, stage=2, world=4), marks=pytest.mark.full),
    pytest.param(Spread(pp=2, stage=0, world=2, precision="bf16"), marks=pytest.mark.full),
    pytest.param(Spread(tp=2, pp=2, stage=1, world=4), marks=pytest.mark.full),
]


@pytest.mark.parametrize("spread", SAME, ids=str)
def test_g27_the_same_arrangement_goes_on_to_the_last_bit(spread: Spread, tmp_path: Path) -> None:
    straight = run_spmd(save, spread.world, spread, str(tmp_path))
    assert run_spmd(load, spread.world, spread, str(tmp_path)) == straight


def spreads() -> st.SearchStrategy[Spread]:
    drawn = st.builds(
        Spread,
        tp=st.sampled_from([1, 2, 3, 4]),
        pp=st.sampled_from([1, 1, 2, 4]),
        replicate=st.sampled_from([1, 1, 2]),
        stage=st.sampled_from([0, 1, 2, 3]),
        world=st.sampled_from([1, 2, 3, 4]),
        precision=st.sampled_from([None, None, "bf16"]),
    )
    return drawn.filter(lambda spread: spread.is_legal)


@pytest.mark.full
@pytest.mark.timeout(3600)
@given(first=spreads(), second=spreads())
@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_a_training_moves_between_any_two_arrangements(
    tmp_path_factory: pytest.TempPathFactory, first: Spread, second: Spread
) -> None:
    move(first, second, str(tmp_path_factory.mktemp("move")))


def experts(sizes: dict[str, int], stage: int, seed: int) -> tuple[sc.Mesh, nn.Module, Any]:
    """A layer of experts, over an axis of theirs and the tensor axis."""
    mesh = sc.Mesh(**sizes, device="cpu")
    torch.manual_seed(seed)
    model = sc.shard(MixtureOfExperts(6, 10, 8, 3, mesh), mesh, stage=stage)
    return mesh, model, sc.optimizer("adamw", model, lr=1e-2)


def save_experts(sizes: dict[str, int], stage: int, folder: str) -> None:
    mesh, model, optimizer = experts(sizes, stage, seed=0)
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(mesh.data_rank))).square().mean().backward()
    optimizer.step()
    sc.checkpoint.save(f"{folder}/first", model, optimizer)


def load_experts(sizes: dict[str, int], stage: int, folder: str) -> None:
    _, model, optimizer = experts(sizes, stage, seed=1)
    sc.checkpoint.load(f"{folder}/first", model, optimizer)
    sc.checkpoint.save(f"{folder}/second", model, optimizer)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ep": 2, "tp": 2}, {}),
        ({"ep": 4}, {"tp": 2}),
        ({"tp": 4}, {"ep": 2, "tp": 2}),
        pytest.param({}, {"ep": 2}, marks=pytest.mark.full),
    ],
)
def test_experts_move_between_arrangements(first: dict[str, int], second: dict[str, int], tmp_path: Path) -> None:
    run_spmd(save_experts, 4, first, 1, str(tmp_path))
    run_spmd(load_experts, 4 if second else 1, second, 3, str(tmp_path))
    assert sc.checkpoint.diff(tmp_path / "first", tmp_path / "second") == []
    shape = sc.checkpoint.open_weights(tmp_path / "first")["experts.gate_up_proj"].shape
    assert shape == (8, 20, 6)


@spmd(world=2)
def test_whole_weights_of_a_split_model(tmp_path: Path) -> None:
    training = Training(Spread(tp=2, stage=1, world=2), seed=0)
    training.steps(0, 1)
    sc.checkpoint.save(tmp_path / "run", training.model, training.optimizer)
    whole = sc.state_dict(training.model, rank0_only=False)
    weights = sc.checkpoint.open_weights(tmp_path / "run")
    assert weights.keys() == whole.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.read(), whole[name]), name
    other = Training(Spread(tp=1, stage=3, world=2), seed=4)
    if training.mesh.rank == 0:
        sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "out")
    torch.distributed.barrier()
    sc.checkpoint.from_hf(tmp_path / "out", other.model)
    again = Training(Spread(tp=2, stage=0, world=2), seed=5)
    sc.checkpoint.from_hf(tmp_path / "out", again.model)
    for model in (other.model, again.model):
        for name, value in sc.state_dict(model, rank0_only=False).items():
            assert torch.equal(value, whole[name]), name


@spmd(world=2)
def test_g6_names_on_one_side_only_in_stages(tmp_path: Path) -> None:
    training = Training(Spread(pp=2, stage=1, world=2), seed=0)
    sc.checkpoint.save(tmp_path, training.model, training.optimizer)
    mesh = training.mesh
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(NUM_BLOCKS - 1)), nn.Linear(WIDTH, VOCABULARY)]
    other = sc.shard(Pipeline(nn.Sequential(*layers), mesh, num_microbatches=2, loss_fn=F.cross_entropy), mesh, stage=1)
    with pytest.raises(CheckpointError) as raised:
        sc.checkpoint.load(tmp_path, other)
    assert "4.bias" in str(raised.value) or mesh.rank == 0
    report = sc.checkpoint.load(tmp_path, other, strict=False).report
    everywhere = sc.comm.exchange(report.missing, mesh.everyone, "missing")
    assert {name for names in everywhere for name in names} == {"4.weight", "4.bias"}
    assert "4.norm.weight" in report.unexpected
