"""Combinations of everything that composes over one mesh, each with a name; what is allowed, and a set that covers all
pairs.

A recipe's name is its list of choices, one of each dimension: ``llama z1 pp2 tp2 - cp1 ep1 full bf16 g2 cpu 1f1b``.
Whoever changes the choices runs ``python tests/compose/recipes.py``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "model": ("llama", "gpt2", "mixtral"),
    "zero": ("z0", "z1", "z2", "z3", "h1", "h2", "h3"),
    "pp": ("pp1", "pp2"),
    "tp": ("tp1", "tp2"),
    "sequence": ("-", "sp"),
    "context": ("cp1", "ring", "ulysses"),
    "experts": ("ep1", "ep2"),
    "activation": ("keep", "full", "selective", "host", "parts"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": ("g1", "g2", "g4"),
    "offload": ("device", "cpu", "nvme", "params"),
    "schedule": ("none", "1f1b", "zb-h1", "interleaved"),
}
"""z: a ZeRO stage over two ranks; h: the stage over two ranks, in two copies. ring, ulysses: two ranks share each
sequence, and shards lie on these, too. host: kept inputs in host memory; parts: among tensor-parallel ranks."""
FILE = Path(__file__).with_name("recipes.txt")
NUM_RECIPES = 128
"""Besides the full-house ones."""
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Recipe:
    """One choice of each dimension."""

    model: str
    zero: str
    pp: str
    tp: str
    sequence: str
    context: str
    experts: str
    activation: str
    precision: str
    accumulation: str
    offload: str
    schedule: str

    @property
    def name(self) -> str:
        """All choices in a row."""
        return " ".join(vars(self).values())

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.zero[1])

    @property
    def copies(self) -> int:
        """Copies of the sharded model."""
        return 2 if self.zero[0] == "h" else 1

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline axis."""
        return int(self.pp[2])

    @property
    def num_tensor(self) -> int:
        """Ranks of the tensor axis."""
        return int(self.tp[2])

    @property
    def num_context(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.context == "cp1" else 2

    @property
    def num_expert(self) -> int:
        """Ranks that have different experts."""
        return int(self.experts[2])

    @property
    def data_world(self) -> int:
        """Data-parallel ranks."""
        return 2 * self.copies

    @property
    def world(self) -> int:
        """All ranks."""
        return self.num_stages * self.num_tensor * self.num_context * self.data_world

    @property
    def num_microbatches(self) -> int:
        """Accumulation steps."""
        return int(self.accumulation[1])


def named(name: str) -> Recipe:
    """The recipe of this name."""
    return Recipe(*name.split())


def read() -> list[Recipe]:
    """The recipes of the file, a line each."""
    return [named(line) for line in FILE.read_text().splitlines()]


def why_not(r: Recipe) -> str:
    """Why there is no such recipe; empty where there is. What the library refuses is in ``test_refusals.py``."""
    rules = {
        "parts of a sequence lie on tensor-parallel ranks": r.sequence == "sp" and r.tp == "tp1",
        "inputs are divided among tensor-parallel ranks": r.activation == "parts" and r.tp == "tp1",
        "stages have a schedule, one stage has none": (r.schedule == "none") != (r.pp == "pp1"),
        "states are offloaded where they are sharded": r.offload in ("cpu", "nvme") and r.stage == 0,
        "parameters are offloaded at stage 3": r.offload == "params" and r.stage < 3,
        "pipelines share no sequences yet": r.context != "cp1" and r.pp == "pp2",
        "experts are those of a model that has some": r.experts == "ep2" and r.model != "mixtral",
        "sixteen ranks": r.world > 8,
    }
    return next((reason for reason, holds in rules.items() if holds), "")


def allowed() -> list[Recipe]:
    """All recipes that there can be."""
    return [r for r in (Recipe(*choices) for choices in product(*DIMENSIONS.values())) if not why_not(r)]


def pairs_of(r: Recipe) -> set[Pair]:
    """The pairs of choices that a recipe covers."""
    return set(combinations(vars(r).items(), 2))


def full_house() -> list[Recipe]:
    """Eight ranks with everything at once."""
    houses = [
        ("z1", "-", "full", "bf16", "g2", "cpu", "1f1b"),
        ("z2", "-", "selective", "fp32", "g4", "device", "zb-h1"),
        ("z3", "-", "parts", "fp32", "g2", "params", "interleaved"),
        ("z3", "-", "host", "fp16", "g4", "nvme", "1f1b"),
    ]
    pipelined = [
        Recipe(model, zero, "pp2", "tp2", sequence, "cp1", "ep1", *others)
        for model in DIMENSIONS["model"]
        for zero, sequence, *others in houses
    ]
    return [
        *pipelined,
        named("llama z2 pp1 tp2 sp ring ep1 full bf16 g2 cpu none"),
        named("gpt2 z3 pp1 tp2 - ulysses ep1 parts fp32 g2 nvme none"),
        named("mixtral z3 pp1 tp2 - ring ep2 selective fp32 g2 params none"),
        named("mixtral z1 pp2 tp2 - cp1 ep2 full fp16 g4 cpu zb-h1"),
    ]


def choose() -> list[Recipe]:
    """A set that covers every pair that is allowed, filled up by lot, and the full-house recipes."""
    draw = random.Random(0)
    candidates = allowed()
    left = set().union(*map(pairs_of, candidates))
    chosen: list[Recipe] = []
    while left:
        best = max(draw.sample(candidates, 400), key=lambda r: (len(pairs_of(r) & left), -r.world))
        if not pairs_of(best) & left:
            best = max(candidates, key=lambda r: (len(pairs_of(r) & left), -r.world))
        chosen.append(best)
        left -= pairs_of(best)
    houses = full_house()
    rest = [r for r in candidates if r not in chosen and r not in houses]
    chosen += draw.sample(rest, max(0, NUM_RECIPES - len(chosen)))
    return [*chosen, *(r for r in houses if r not in chosen)]


if __name__ == "__main__":
    FILE.write_text("".join(f"{r.name}\n" for r in choose()))
