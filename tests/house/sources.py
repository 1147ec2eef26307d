"""Reads the repository's own source: files, functions and their lengths, imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "python" / "shardcore"
PROGRAMS = ("python", "examples", "benches")
"""Folders whose Python is held to the budgets; tests are held to none but their own good taste."""


@dataclass(frozen=True)
class Function:
    """One function of either language, with the lines it spans."""

    where: str
    """``path::qualified.name``, the key of an allow list."""
    num_lines: int


def files(suffix: str, *folders: str) -> list[Path]:
    """Source files below ``folders``, without what a build leaves there."""
    found = (path for folder in folders for path in (REPO / folder).rglob(f"*{suffix}"))
    return sorted(path for path in found if not {"target", "__pycache__", ".venv"} & set(path.parts))


def name_of(path: Path) -> str:
    """The path as the repository speaks of it."""
    return path.relative_to(REPO).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), filename=str(path))


def num_lines(path: Path) -> int:
    """Lines of the file, blank ones and comments included."""
    return len(path.read_text().splitlines())


# ------------------------------------------------------------------------------------------------------------ Python


def python_functions(path: Path) -> Iterator[Function]:
    """Every function and method, nested ones too, from ``def`` to the last line; docstrings do not count."""

    def walk(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                num_lines = child.end_lineno - child.lineno + 1 - _docstring_lines(child)
                yield Function(f"{name_of(path)}::{prefix}{child.name}", num_lines)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from walk(child, f"{prefix}{child.name}." if named else prefix)

    return walk(tree_of(path), "")


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def imports(path: Path, *, at_import_time_only: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import, relative ones made absolute; names of ``from a import b`` give ``a.b``.

    With ``at_import_time_only`` the imports inside functions and below ``if TYPE_CHECKING`` are left out.
    """
    package = list(path.relative_to(REPO / "python").parent.parts) if PACKAGE in path.parents else []

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
            if at_import_time_only and lazy:
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *([child.module] if child.module else [])])
                yield from ((f"{source}.{alias.name}", child.lineno) for alias in child.names)
            yield from walk(child)

    return walk(tree_of(path))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def room_of(module: str) -> str | None:
    """``zero`` for ``shardcore.zero.group``; None for what is not inside shardcore."""
    parts = module.split(".")
    return parts[1] if parts[0] == "shardcore" and len(parts) > 1 else None


# -------------------------------------------------------------------------------------------------------------- Rust

_RUST_TOKENS = re.compile(
    r"""
      //[^\n]* | /\*.*?\*/                            # comments
    | b?r(?P<hashes>\#*)".*?"(?P=hashes)              # raw strings
    | b?"(?:\\.|[^"\\])*"                             # strings
    | b?'(?:\\.[^']*|[^'\\])'                         # characters, but not lifetimes
    """,
    re.VERBOSE | re.DOTALL,
)
_RUST_FUNCTION = re.compile(r"\bfn\s+(\w+)")


def rust_functions(path: Path) -> Iterator[Function]:
    """Every ``fn`` with a body, from its name to its closing brace."""
    text = _RUST_TOKENS.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())
    for match in _RUST_FUNCTION.finditer(text):
        end = _closing_brace(text, match.end())
        if end is not None:
            yield Function(f"{name_of(path)}::{match.group(1)}", text.count("\n", match.start(), end) + 1)


def _closing_brace(text: str, start: int) -> int | None:
    """Where the body that begins after ``start`` ends; None for a declaration, which ends in a semicolon."""
    depth = 0
    nesting = 0  # of parentheses and brackets: a semicolon inside `[u8; 4]` ends nothing
    for position in range(start, len(text)):
        character = text[position]
        if character in "([":
            nesting += 1
        elif character in ")]":
            nesting -= 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        elif character == ";" and depth == nesting == 0:
            return None
    return None
