"""The parameters of a region: those of its first run must be those of the others."""

from __future__ import annotations

import weakref

from torch import nn

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.protocols import RELEASED_VERSION


class Weights:
    """How often the parameters of a module were written to when its region ran first.

    Autograd refuses a backward through parameters that were written to since it saved them. A region has saved none,
    and would compute with the new ones what the forward computed with the old, unseen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._versions = private.versions(list(module.parameters()))

    def check(self) -> None:
        """Compare. Parameters that are released at either time are left to their group, which counts by itself.

        Raises:
            StateError: some were written to.
        """
        module = self._module()
        if module is None:
            return
        names, params = zip(*module.named_parameters(), strict=True) if self._versions else ((), ())
        now = private.versions(params)
        if len(now) != len(self._versions):
            return  # another set of parameters altogether
        for name, before, after in zip(names, self._versions, now, strict=True):
            if before != after and max(before, after) < RELEASED_VERSION:
                raise StateError(
                    f"parameter {name!r} of a recomputed {type(module).__name__} was written to between forward and "
                    "backward (by an optimizer step, or a load of weights), so that backward would compute with other "
                    "values than forward did: call backward first, or repeat the forward"
                )
