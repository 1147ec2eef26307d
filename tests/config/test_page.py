"""The page of keys says what the table says."""

from __future__ import annotations

from pathlib import Path

from shardcore.config.page import key_page
from shardcore.config.table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == key_page(), "run: python -m shardcore.config.page > docs/config.md"


def test_every_key_has_a_row() -> None:
    assert all(f"| `{path}` |" in key_page() for path in TABLE)
