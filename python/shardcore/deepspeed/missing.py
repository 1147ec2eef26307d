"""DeepSpeed's names that are not there: what to use instead, however they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_PACKAGE = "shardcore.deepspeed"
_INSTEAD = {
    "init_inference": "call the model under torch.no_grad()",
    "moe": "mixture-of-experts layers of the model's own train as they are",
    "monitor": "write the metrics that your loop has",
    "ops": "optimizers are in ops.adam, ops.adagrad and ops.lion; others are in torch.optim",
    "runtime": "schedules are in runtime.lr_schedules, pipelines in pipe; the configuration is shardcore.config.Config",
}


def describe(name: str, offered: Sequence[str]) -> str:
    """Why ``name``, below the package, is not there."""
    instead = _INSTEAD.get(name.split(".")[0])
    hint = f": {instead}" if instead else f"; it has {', '.join(offered)}"
    return f"{_PACKAGE} does not offer {name!r} yet{hint}"


class _Finder(MetaPathFinder):
    """Asked last, so only for modules that nothing else finds."""

    def __init__(self, offered: Sequence[str]) -> None:
        self._offered = offered

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        """Raise with a hint for a module of the package; other modules are not ours.

        Raises:
            ModuleNotFoundError: without ``name``, since ``from package import name`` would take one with it for an
                ordinary miss and say less.
        """
        if fullname.startswith(f"{_PACKAGE}."):
            raise ModuleNotFoundError(describe(fullname.removeprefix(f"{_PACKAGE}."), self._offered))


def explain_imports(offered: Sequence[str]) -> None:
    """From now on an import of a module that the package does not have says what to use instead."""
    sys.meta_path.append(_Finder(offered))
