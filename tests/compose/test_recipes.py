"""Everything that composes, together: each recipe trains as one process does, in the bytes of the formula."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from compose import recipes
from compose.recipes import Recipe, named
from compose.training import Trained, check, train_alone
from shardcore.testing import run_spmd

RECIPES = recipes.read()
NUM_IN_EVERY_RUN = 8
IN_EVERY_RUN = random.Random(1).sample([r for r in RECIPES if r.world <= 4], NUM_IN_EVERY_RUN)


@cache
def alone(recipe: Recipe) -> Trained:
    """The reference, with as many threads as a rank has: products are then summed in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_alone(recipe)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [r.name for r in IN_EVERY_RUN])
def test_recipe(name: str, tmp_path: Path) -> None:
    recipe = named(name)
    run_spmd(check, recipe.world, recipe, alone(recipe), str(tmp_path), timeout=110)


@pytest.mark.full
@pytest.mark.parametrize("name", [r.name for r in RECIPES])
def test_every_recipe(name: str, tmp_path: Path) -> None:
    recipe = named(name)
    run_spmd(check, recipe.world, recipe, alone(recipe), str(tmp_path), timeout=110)


def test_the_recipes_cover_every_pair() -> None:
    """Whatever two choices can be in one recipe are in one of the file; and eight ranks have everything at once."""
    assert len(RECIPES) >= 120
    assert len(set(RECIPES)) == len(RECIPES)
    assert [r.name for r in RECIPES if recipes.why_not(r)] == []
    wanted = set().union(*map(recipes.pairs_of, recipes.allowed()))
    assert wanted - set().union(*map(recipes.pairs_of, RECIPES)) == set()
    assert set(recipes.full_house()) <= set(RECIPES)
