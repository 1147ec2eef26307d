"""What the repository says: documented functions, names of one meaning, commands that exist."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import sources

DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((sources.REPO / "docs").glob("*.md")))]

# Written in two parts, so that this file does not hold what it looks for.
FOREIGN = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", r"\.lib" + "rary", "/fa" + "rm", r"\bpypi\." + "org"]))

BAD_NAMES = {
    r"size": "say what is counted: num_..., ..._numel or ..._nbytes",
    r"n_\w+": "counts are called num_...",
    r"\w*(?<!_n)(?<!^n)bytes": "sizes in bytes are called ..._nbytes",
}
NAME_EXCEPTIONS: dict[str, str] = {}
"""``path::name`` -> why the bad name is right there."""


def text_files() -> Iterator[Path]:
    """Everything a reader of the repository may open."""
    for path in sources.files("", "python", "crates", "tests", "examples", "benches", "docs", ".ci"):
        if path.is_file() and path.suffix not in {".so", ".png", ".pyc"}:
            yield path
    yield from (path for path in sources.REPO.iterdir() if path.is_file())


def test_no_path_of_a_particular_machine() -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if FOREIGN.search(line):
                found.append(f"{sources.name_of(path)}:{number}: {line.strip()}")
    assert found == []


# ------------------------------------------------------------------------------------------------------------- names


def bound_names(path: Path) -> Iterator[tuple[str, int]]:
    """Parameters, variables, fields and attributes that the file gives a name to."""
    for node in ast.walk(sources.tree_of(path)):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def test_names_have_one_meaning() -> None:
    found = []
    for path in sources.files(".py", "python", "examples"):
        for name, line in bound_names(path):
            for pattern, advice in BAD_NAMES.items():
                if re.fullmatch(pattern, name) and f"{sources.name_of(path)}::{name}" not in NAME_EXCEPTIONS:
                    found.append(f"{sources.name_of(path)}:{line}: {name}: {advice}")
    assert found == []


# -------------------------------------------------------------------------------------------------------- docstrings


def undocumented(path: Path) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring."""
    tree = sources.tree_of(path)
    if ast.get_docstring(tree) is None:
        yield sources.name_of(path)

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            if ast.get_docstring(node) is None and not decorators & {"overload", "setter"}:
                yield f"{sources.name_of(path)}:{node.lineno}: {prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    yield from walk(tree.body, "")


def test_every_public_function_says_what_it_does() -> None:
    assert [where for path in sources.files(".py", "python", "examples") for where in undocumented(path)] == []


# ---------------------------------------------------------------------------------------------------------- commands


def commands(document: str) -> list[str]:
    """Lines of the document's shell blocks, without prompts and comments."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", (sources.REPO / document).read_text(), re.DOTALL)
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def make_targets() -> set[str]:
    """Targets that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", (sources.REPO / "Makefile").read_text(), re.MULTILINE))


def scripts() -> set[str]:
    """Commands that the package installs."""
    return set(tomllib.loads((sources.REPO / "pyproject.toml").read_text())["project"]["scripts"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document: str) -> None:
    known = scripts()
    for command in commands(document):
        words = shlex.split(command)
        if words[0] == "make":
            targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
            assert set(targets) <= make_targets(), command
        elif words[0].startswith("shardcore"):
            assert words[0] in known, command
        else:
            assert shutil.which(words[0]) or words[0] in {"cd", "git", "pip"}, command
        for word in words:
            if re.fullmatch(r"(examples|benches|tests|docs)/[\w./-]+", word):
                assert (sources.REPO / word).exists(), command


def test_the_readmes_options_of_the_example_exist() -> None:
    help_text = subprocess.run(
        [sys.executable, sources.REPO / "examples" / "train_gpt.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    lines = [line for line in commands("README.md") if "train_gpt.py" in line or "make train" in line]
    assert lines
    options = {option for line in lines for option in re.findall(r"--[a-z-]+", line)} - {"--nproc-per-node"}
    assert options
    assert {option for option in options if option not in help_text} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = sources.REPO / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_a_page_names_exist(document: str) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (sources.REPO / document).read_text()):
        assert f"\ndef {name}(" in (sources.REPO / path).read_text(), f"{path}::{name}"
