"""Rooms are entered by their doors, and torch's dangerous corners by the rooms that may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from house import sources

SPEAKS_TO_TORCH_DISTRIBUTED = {"comm", "mesh", "launch", "testing", "_torch_private"}
MAY_USE_TORCH_PRIVATE = {"_torch_private"}
DOORS_OF_THEIR_OWN = {"deepspeed"}
"""Its submodules are public names that users' scripts import."""


def package_files() -> list[Path]:
    """Python files of the package."""
    found = sources.files(".py", "python")
    assert found, "no Python file was found"
    return found


def room_of_file(path: Path) -> str | None:
    """The room a file of the package lies in; None for the package's own door."""
    parts = path.relative_to(sources.PACKAGE).with_suffix("").parts
    return None if parts == ("__init__",) else parts[0]


def is_behind_a_door(name: str) -> bool:
    """Whether the dotted import reaches a file inside a room: ``shardcore.zero.group.X``."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "shardcore" or parts[1] in DOORS_OF_THEIR_OWN:
        return False
    inner = sources.PACKAGE / parts[1] / parts[2]
    if not (inner.with_suffix(".py").exists() or inner.is_dir()):
        return False
    return len(parts) > 3 or parts[2] not in offered(parts[1])


def offered(room: str) -> set[str]:
    """Names that the room's door holds out; one of them may be called like the file that it comes from."""
    tree = sources.tree_of(sources.PACKAGE / room / "__init__.py")
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def torch_names(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that start at ``torch``, imported or used."""
    for name, line in sources.imports(path):
        if name.split(".")[0] == "torch":
            yield name, line
    for node in ast.walk(sources.tree_of(path)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and name.replace(".", "").isidentifier():
                yield name, node.lineno


def test_other_rooms_are_entered_by_the_door() -> None:
    trespasses = [
        f"{sources.name_of(path)}:{line} imports {name}"
        for path in [*package_files(), *sources.files(".py", "examples", "benches")]
        for name, line in sources.imports(path)
        if is_behind_a_door(name)
        and not (sources.PACKAGE in path.parents and sources.room_of(name) == room_of_file(path))
    ]
    assert trespasses == []


def test_only_some_rooms_speak_to_torch_distributed() -> None:
    trespasses = [
        f"{sources.name_of(path)}:{line} uses {name}"
        for path in package_files()
        if room_of_file(path) not in SPEAKS_TO_TORCH_DISTRIBUTED
        for name, line in torch_names(path)
        if name.startswith("torch.distributed")
    ]
    assert trespasses == []


def test_torchs_private_names_live_in_one_file() -> None:
    trespasses = [
        f"{sources.name_of(path)}:{line} uses {name}"
        for path in [*package_files(), *sources.files(".py", "examples", "benches")]
        if not (sources.PACKAGE in path.parents and room_of_file(path) in MAY_USE_TORCH_PRIVATE)
        for name, line in torch_names(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert trespasses == []
