"""Import a test module on a rank with pytest's rewritten ``assert``, so that a failure shows the values compared.

pytest rewrites test modules only in the process that collects them. Rank processes apply the same rewriting
where pytest offers it, and import the module plainly where it does not.
"""

from __future__ import annotations

import ast
import importlib.abc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def exec_module(module: ModuleType, loader: importlib.abc.Loader, path: str) -> None:
    """Run the body of ``module`` from its source at ``path``."""
    rewrite = _assert_rewriter()
    if rewrite is None:
        loader.exec_module(module)
        return
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite(tree, source, path)
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)


def _assert_rewriter() -> Callable[..., Any] | None:
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return None
    return rewrite_asserts
