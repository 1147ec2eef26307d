"""Stage 3: tensors that leave or enter a unit's forward unseen. The unit is gathered when backward needs it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.zero import PrefetchLimits
from zero.following import check_follows, rows, seeded

STEPS = 3


class Keeping(nn.Module):
    """A block that leaves a loss on itself, from parameters that matrix products and element-wise kernels read."""

    def __init__(self, kept: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.router = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, 6))
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh()
        aux = (self.norm(self.router(y)) * self.gain).tanh()
        if self.kept is None:
            self.aux = aux
        else:
            self.kept.append(aux)
        return y


class Stack(nn.Module):
    """Blocks whose kept losses count besides the output (``both``), or alone."""

    def __init__(self, *, both: bool, elsewhere: bool) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] | None = [] if elsewhere else None
        self.blocks = nn.ModuleList(Keeping(self.kept) for _ in range(3))
        self.both = both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        kept = [block.aux for block in self.blocks] if self.kept is None else list(self.kept)
        if self.kept is not None:
            self.kept.clear()
        loss = sum(aux.square().mean() for aux in kept)
        return loss + x.square().mean() if self.both else loss


class Adapted(nn.Module):
    """A frozen layer with a trained adapter; what it takes and gives is inside an object."""

    def __init__(self, *, frozen_first: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.frozen_first = frozen_first

    def forward(self, packet: Any) -> Any:
        x = packet.inner[0]
        if self.frozen_first:
            base = self.frozen(x)
            return Opaque((base + self.up(self.down(x))).tanh())
        adapted = self.up(self.down(x))
        return Opaque((self.frozen(x) + adapted).tanh())


class Opaque:
    """An object that is no container."""

    __slots__ = ("inner",)

    def __init__(self, x: torch.Tensor) -> None:
        self.inner = [x]


class Adapters(nn.Module):
    """Adapted layers between plain ones."""

    def __init__(self, *, frozen_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Adapted(frozen_first=frozen_first) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packet = Opaque(self.first(x))
        for block in self.blocks:
            packet = block(packet)
        return packet.inner[0].square().mean()


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 6)).backward()


BUILDS = {
    "output too": lambda: Stack(both=True, elsewhere=False),
    "alone": lambda: Stack(both=False, elsewhere=False),
    "in a list": lambda: Stack(both=True, elsewhere=True),
    "adapter last": lambda: Adapters(frozen_first=False),
    "adapter first": lambda: Adapters(frozen_first=True),
}


@dataclass(slots=True)
class Slotted:
    """An output without ``__dict__``."""

    x: torch.Tensor


class Embedded(nn.Module):
    """Parameters that autograd does not save, since their gradients need indices and inputs only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.first = nn.Linear(4, 6)
        self.way = way

    def forward(self, x: torch.Tensor, box: list[torch.Tensor]) -> Any:
        y = self.table((x[:, 0].abs() * 4).long().clamp(max=8)) + self.first(x)
        if self.way == "attribute":
            self.y = y
        elif self.way == "appended":
            box.append(y)
        return {"deque": deque([y]), "slots": Slotted(y), "iterator": iter([y])}.get(self.way)


class AfterEmbedded(nn.Module):
    """Takes what it left; while an exception is handled, as in a retry, a forward that returns None has not failed."""

    def __init__(self, way: str, *, handles: bool) -> None:
        super().__init__()
        self.embedded = Embedded(way)
        self.head = nn.Linear(6, 1)
        self.handles = handles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.handles:
            return self.head(self.find(x).tanh())
        try:
            raise KeyError("a cache")
        except KeyError:
            return self.head(self.find(x).tanh())

    def find(self, x: torch.Tensor) -> torch.Tensor:
        box: list[torch.Tensor] = []
        out = self.embedded(x, box)
        match self.embedded.way:
            case "attribute":
                return self.embedded.y
            case "appended":
                return box[0]
            case "slots":
                return out.x
            case _:
                return next(iter(out))


@spmd(world=[1, 2])
def test_gradients_that_need_no_parameter_arrive() -> None:
    def square(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 4)).square().mean().backward()

    for way in ("attribute", "appended", "deque", "slots", "iterator"):
        for handles in (False, True):

            def build(way: str = way, handles: bool = handles) -> nn.Module:
                return AfterEmbedded(way, handles=handles)

            check_follows(build, square, stage=3, units=[Embedded], steps=STEPS)


@pytest.mark.parametrize("case", BUILDS)
@spmd(world=[1, 2])
def test_hidden_ways_follow_the_plain_loop(case: str) -> None:
    model = check_follows(
        BUILDS[case], play, stage=3, units=lambda name, module: isinstance(module, (Keeping, Adapted)), steps=STEPS
    )
    units = [unit for unit in find_root(model).units if isinstance(unit.module, (Keeping, Adapted))]
    assert any(unit.is_watched for unit in units) or sc.Mesh().data_world == 1, "these go on under watch"


@spmd(world=2)
def test_units_without_hidden_ways_are_watched_once() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def square(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 6)).square().mean().backward()

    model = check_follows(build, square, stage=3, units=[nn.Linear], steps=1)
    assert not any(unit.is_watched for unit in find_root(model).units)


@spmd(world=2)
def test_a_hidden_way_that_opens_late_is_an_error_and_then_known() -> None:
    mesh = sc.Mesh(device="cpu")
    model = sc.shard(
        seeded(BUILDS["output too"]), mesh, stage=3, units=[Keeping], prefetch=PrefetchLimits(max_live_nbytes=1)
    )
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)

    def step(*, with_kept: bool) -> None:
        model.both = True
        x = rows(0, mesh.rank, 4, 6)
        for block in model.blocks:
            x = block(x)
        loss = x.square().mean()
        (loss + sum(block.aux.square().mean() for block in model.blocks) if with_kept else loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(with_kept=False)
    step(with_kept=False)
    with pytest.raises(StateError, match=r"needs the parameters of unit 'blocks.\d' \(stage 3\), which are released"):
        step(with_kept=True)
    sc.reset_iteration(model)
    for _ in range(2):
        step(with_kept=True)


class Writing(nn.Module):
    """A block that spoils what autograd saved, as plain torch refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).sigmoid()
        y.mul_(2)
        return y


@spmd(world=2)
def test_writing_over_saved_tensors_is_refused_as_by_torch() -> None:
    model = sc.shard(nn.Sequential(nn.Linear(6, 6), Writing()), stage=3, units=[Writing])
    for x in (rows(0, 0, 4, 6), rows(1, 0, 4, 6)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).mean().backward()
        sc.reset_iteration(model)
    plain = SimpleNamespace(model=nn.Sequential(nn.Linear(6, 6), Writing()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.model(rows(0, 0, 4, 6)).mean().backward()
