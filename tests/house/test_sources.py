"""The readers that the other tests of this folder rely on see what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from house import sources


@pytest.fixture
def in_repo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sources, "REPO", tmp_path)
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "python" / "shardcore")
    return tmp_path


def test_rust_functions_are_measured_past_strings_and_lifetimes(in_repo: Path) -> None:
    path = in_repo / "a.rs"
    path.write_text(
        "trait T { fn declared(&self) -> [u8; 4]; }\n"
        "fn one<'a>(x: &'a str) -> char {\n"
        '    let s = "}"; // }\n'
        '    let r = r#"}"}"#; /* { */\n'
        "    if x == s { return '}'; }\n"
        "    '\\''\n"
        "}\n"
        "fn two() {}\n"
    )
    found = {function.where: function.num_lines for function in sources.rust_functions(path)}
    assert found == {"a.rs::one": 6, "a.rs::two": 1}


def test_python_functions_are_named_by_their_class(in_repo: Path) -> None:
    path = in_repo / "a.py"
    path.write_text("class A:\n    def f(self):\n        def g():\n            return 1\n        return g\n")
    found = {function.where: function.num_lines for function in sources.python_functions(path)}
    assert found == {"a.py::A.f": 4, "a.py::A.f.g": 2}


def test_imports_are_absolute_and_lazy_ones_are_told_apart(in_repo: Path) -> None:
    path = in_repo / "python" / "shardcore" / "zero" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch.distributed as dist\n"
        "from . import b\n"
        "from .c import d\n"
        "if TYPE_CHECKING:\n    import e\n"
        "def f():\n    import g\n"
    )
    eager = {"torch.distributed", "shardcore.zero.b", "shardcore.zero.c.d"}
    assert {name for name, _ in sources.imports(path, at_import_time_only=True)} == eager
    assert {name for name, _ in sources.imports(path)} == eager | {"e", "g"}
