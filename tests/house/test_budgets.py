"""Files and functions stay short enough to be read at one sitting."""

from __future__ import annotations

import ast

from house import sources
from house.sources import Function

PYTHON_FILE, PYTHON_FUNCTION, ENGINE_FILE = 500, 50, 300
RUST_FILE, RUST_FUNCTION = 600, 60
PUBLIC_METHODS = 20

ALLOWED = {
    "python/shardcore/engine/queries.py::Queries": "the drop-in engine answers every query that existing scripts make",
}
"""What may exceed its budget: ``path`` or ``path::name`` -> the reason."""


def over(found: dict[str, int], budget: int) -> dict[str, int]:
    """What exceeds the budget without a reason."""
    return {where: length for where, length in found.items() if length > budget and where not in ALLOWED}


def lengths(functions: list[Function]) -> dict[str, int]:
    """The longest function of each name."""
    found: dict[str, int] = {}
    for function in functions:
        found[function.where] = max(function.num_lines, found.get(function.where, 0))
    return found


def test_python_files() -> None:
    found = {
        sources.name_of(path): sources.num_lines(path) for path in sources.files(".py", *sources.PROGRAMS, "tests")
    }
    assert found, "no Python file was found"
    assert over(found, PYTHON_FILE) == {}


def test_the_engine_is_sugar() -> None:
    found = {sources.name_of(path): sources.num_lines(path) for path in sources.files("engine.py", "python")}
    assert over(found, ENGINE_FILE) == {}


def test_python_functions() -> None:
    found = [
        function for path in sources.files(".py", *sources.PROGRAMS) for function in sources.python_functions(path)
    ]
    assert found, "no Python function was found"
    assert over(lengths(found), PYTHON_FUNCTION) == {}


def test_rust_files() -> None:
    found = {sources.name_of(path): sources.num_lines(path) for path in sources.files(".rs", "crates")}
    assert found, "no Rust file was found"
    assert over(found, RUST_FILE) == {}


def test_rust_functions() -> None:
    found = [function for path in sources.files(".rs", "crates") for function in sources.rust_functions(path)]
    assert found, "no Rust function was found"
    assert over(lengths(found), RUST_FUNCTION) == {}


def test_public_methods() -> None:
    found = {}
    for path in sources.files(".py", "python"):
        for node in ast.walk(sources.tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name[0] != "_"]
                found[f"{sources.name_of(path)}::{node.name}"] = len(methods)
    assert over(found, PUBLIC_METHODS) == {}


def test_every_exception_still_exists() -> None:
    for where, reason in ALLOWED.items():
        assert (sources.REPO / where.split("::")[0]).exists(), where
        assert reason
