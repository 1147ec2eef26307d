"""The type stubs of the Rust core describe the core that is installed. (`make lint` compares them with its source.)"""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType

from house import sources


def described() -> dict[str, set[str]]:
    """Classes and functions of the stub file, with the public methods of each class."""
    found: dict[str, set[str]] = {}
    for node in ast.parse((sources.PACKAGE / "_core.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            members = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            found[node.name] = {name for name in members if not name.startswith("_")}
    return found


def installed(module: ModuleType) -> dict[str, set[str]]:
    """The same of the built extension."""
    found: dict[str, set[str]] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        members = vars(value) if inspect.isclass(value) else ()
        found[name] = {member for member in members if not member.startswith("_")}
    return found


def test_stubs_and_core_have_the_same_names() -> None:
    assert described() == installed(importlib.import_module("shardcore._core"))
