"""Combinations that there cannot be, or cannot be yet: each says so, and why, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardcore as sc
from compose.recipes import Recipe, named
from compose.training import build, make
from shardcore.errors import ConfigError
from shardcore.testing import run_spmd, spmd

REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "states of stage 0 elsewhere": (
        "llama z0 pp1 tp1 - cp1 ep1 keep fp32 g1 cpu none",
        ConfigError,
        "stage",
    ),
    "parameters elsewhere below stage 3": (
        "llama z2 pp1 tp1 - cp1 ep1 keep fp32 g1 params none",
        ConfigError,
        "stage",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_recipe_that_is_refused(what: str, tmp_path: Any) -> None:
    name, error, reason = REFUSED[what]
    recipe = named(name)
    run_spmd(refuses, recipe.world, recipe, error, reason, str(tmp_path), timeout=110)


def refuses(recipe: Recipe, error: type[Exception], reason: str, folder: str) -> None:
    with pytest.raises(error, match=reason):
        make(recipe, folder)


@spmd(world=2, timeout=110)
def test_what_the_mesh_has_and_the_model_has_not() -> None:
    """Ranks of an axis that nothing uses would repeat each other's work."""
    model = build(named("llama z1 pp1 tp1 - cp1 ep1 keep fp32 g1 device none"))
    calls: dict[str, Callable[[], Any]] = {
        "pp=2, but LlamaForCausalLM is not one rank's stages": lambda: sc.shard(model, sc.Mesh(pp=2)),
        "tp=2, but LlamaForCausalLM is not split over it": lambda: sc.shard(model, sc.Mesh(tp=2)),
    }
    for reason, call in calls.items():
        with pytest.raises(ConfigError, match=reason):
            call()


@spmd(world=2, timeout=110)
def test_a_model_on_meta_is_not_split() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"'0\.weight' is on the meta device"):
        sc.tensor.parallelize(model, sc.Mesh(tp=2), {"0": "colwise"})
