"""Lists, dicts and objects that a module takes are the caller's own, and keep what the module writes to them."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd
from shardcore.zero.trees import Swaps, map_tensors
from zero.following import check_follows, rows

Pair = namedtuple("Pair", "a b")


@dataclass
class State:
    """What blocks hand on, and add to."""

    x: torch.Tensor
    loss: Any = 0.0


class Writer(nn.Module):
    """A block that leaves an auxiliary loss in what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        loss = self.right(x).square().mean()
        if isinstance(state, list):
            state.append(loss)
        elif isinstance(state, dict):
            state["loss"] = state.get("loss", 0.0) + loss
        else:
            state.loss = state.loss + loss + state.x.mean()
            state.x = self.left(state.x)
        return self.left(x).tanh()


class Net(nn.Module):
    """Two writers, and the sum of what they left."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writer() for _ in range(2))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.make(x)
        for block in self.blocks:
            x = block(x, state)
        left = sum(state) if isinstance(state, list) else state["loss"] if isinstance(state, dict) else state.loss
        return x.square().mean() + left


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [x.mean() * 1.0],
    "dict": lambda x: {"x": x, "loss": x.mean()},
    "dataclass": State,
    "object": lambda x: SimpleNamespace(x=x, loss=0.0),
}


@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=[1, 2])
def test_units_write_to_what_they_are_given(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 3, 5).requires_grad_()).backward()

    for make in CONTAINERS.values():
        check_follows(lambda make=make: Net(make), play, stage=stage, units=[Writer])


class Twice(tuple):
    """Built from its item, not from an iterable."""

    def __new__(cls, x: torch.Tensor) -> Twice:
        made = super().__new__(cls, (x, x))
        made.note = "kept"
        return made


class Named(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, x: torch.Tensor) -> Named:
        return super().__new__(cls, x, x)


@dataclass(slots=True)
class Tree:
    """A node that leads to itself by its children."""

    x: torch.Tensor
    parent: Any = None
    children: deque[Any] = field(default_factory=deque)


def tree(x: torch.Tensor) -> Tree:
    root = Tree(x)
    root.children.append(Tree(x * 2, root))
    return root


def ring(x: torch.Tensor) -> list[Any]:
    made: list[Any] = [x]
    made.append(made)
    return made


SHAPES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], list[torch.Tensor]]]] = {
    "tuple": (Twice, list),
    "named tuple": (Named, lambda pair: [pair.a, pair.b]),
    "tree": (tree, lambda root: [root.x, root.children[0].x]),
    "ring": (ring, lambda made: [made[0]]),
    "of torch": (lambda x: torch.max(x, dim=1), lambda found: [found.values]),
}


class Shaped(nn.Module):
    """A layer whose output is of some shape."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.layer(x).tanh())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
@spmd(world=2)
def test_units_return_what_plain_modules_return(shape: str, stage: int) -> None:
    make, tensors = SHAPES[shape]

    def play(model: nn.Module, step: int, rank: int) -> None:
        sum(tensor.square().sum() for tensor in tensors(model(rows(step, rank, 3, 5)))).backward()

    check_follows(lambda: Shaped(make), play, stage=stage, units=[Shaped])


def test_mapping_keeps_types_and_sharing() -> None:
    x = torch.ones(2)
    mapped = map_tensors(torch.neg, Twice(x))
    assert type(mapped) is Twice
    assert mapped.note == "kept"
    assert mapped[1].tolist() == [-1, -1]
    inner = [x]
    first, second = map_tensors(torch.neg, (inner, inner))
    assert first is second
    assert inner[0] is x
    made = ring(x)
    swaps = Swaps()
    assert map_tensors(torch.neg, made, swaps) is made
    assert made[0].tolist() == [-1, -1]
    swaps.undo()
    assert made[0] is x
    assert made[1] is made


class Taking(nn.Module):
    """A model that writes to its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        assert batch["x"].dtype == torch.bfloat16
        batch["seen"].append(len(batch))
        batch["y"] = self.layer(batch["x"])
        return batch["y"].float().mean()


@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=2)
def test_cast_inputs_are_put_back(stage: int) -> None:
    model = sc.shard(Taking(), stage=stage, precision=sc.Precision(param="bf16"))
    x = rows(0, 0, 3, 5)
    batch: dict[str, Any] = {"x": x, "seen": []}
    for _ in range(2):
        model(batch).backward()
    assert batch["x"] is x
    assert batch["seen"] == [2, 3]
    assert batch["y"].dtype == torch.bfloat16
    with pytest.raises(KeyError):
        model({"x": x})
    assert batch["x"] is x


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(1), 2],
        {"a": torch.ones(1), "b": [3]},
        OrderedDict(a=(torch.ones(1),)),
        State(torch.ones(1)),
        SimpleNamespace(a={"b": torch.ones(1)}),
        (torch.ones(1), Pair(torch.ones(1), "b")),
    ],
    ids=["list", "dict", "nested", "dataclass", "object", "tuples"],
)
def test_values_are_the_same_object_unless_a_tensor_changes(value: Any) -> None:
    assert map_tensors(lambda t: t, value) is value
    before = repr(value)
    doubled = map_tensors(lambda t: t * 2, value)
    assert type(doubled) is type(value)
    assert repr(doubled) == before.replace("1.", "2.")
    assert repr(value) == before
    swaps = Swaps()
    inside = map_tensors(lambda t: t * 2, value, swaps)
    assert (inside is value) == (not isinstance(value, tuple))
    assert repr(inside) == before.replace("1.", "2.")
    swaps.undo()
    assert repr(value) == before


def test_undo_keeps_what_was_written_and_moved() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    items = [first, second]
    swaps = Swaps()
    map_tensors(lambda t: t + 1, items, swaps)
    items.insert(0, torch.tensor([7.0]))
    items[2] = torch.tensor([8.0])
    swaps.undo()
    assert [float(item) for item in items] == [7.0, 1.0, 8.0]
    assert items[1] is first
