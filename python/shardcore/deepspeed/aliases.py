"""``install()``: ``import deepspeed`` means this package, for code of others that imports it by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardcore.errors import StateError

_OURS = "shardcore.deepspeed"
_THEIRS = "deepspeed"


class _Alias(Loader):
    """Gives the module of our package; its own description stays on it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, which is there already."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run again."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Finds ``deepspeed`` and what is below it in our package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The alias of a name; None for other packages'."""
        if fullname != _THEIRS and not fullname.startswith(f"{_THEIRS}."):
            return None
        module = importlib.import_module(_OURS + fullname.removeprefix(_THEIRS))
        return ModuleSpec(fullname, _Alias(module), is_package=hasattr(module, "__path__"))


def install() -> None:
    """From now on ``import deepspeed`` in this process gives :mod:`shardcore.deepspeed`, and so do its submodules.

    A second call does nothing.

    Raises:
        StateError: DeepSpeed itself has been imported.
    """
    present = sys.modules.get(_THEIRS)
    if present is not None and present is not sys.modules[_OURS]:
        raise StateError(
            "shardcore.deepspeed.install(): DeepSpeed itself is imported already; call install() before whatever "
            "imports it"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
