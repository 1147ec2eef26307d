"""Contexts in which models are built that do not fit one rank: ``sharded_init`` and ``empty_init``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.zero.host_heap import give_back_freed_memory
from shardcore.zero.pieces import Keeper, to_meta
from shardcore.zero.sharding import as_mesh

if TYPE_CHECKING:
    from shardcore.mesh import DeviceMesh

_Register = Callable[[nn.Module, str, nn.Parameter], None]


@contextmanager
def sharded_init(
    mesh: Mesh | Axis | DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    module: nn.Module | None = None,
) -> Iterator[None]:
    """Modules built inside are sharded as they are constructed. Collective over the data-parallel axis of ``mesh``.

    Every constructor runs as usual and draws the same random numbers; when the next module begins, the parameters of
    the last one shrink to this rank's piece. Whatever uses them later, inside or after, sees them whole, and all ranks
    must use them alike; what is written counts as the first rank writes it, as in ``shardcore.shard``. The result,
    after ``shardcore.shard(model, ...)`` at any stage, is to the last bit that of the model built without the context.
    No rank holds more than its pieces, the largest module, and buffers.

    Args:
        mesh: as in :func:`shardcore.shard`; None means all ranks, which join the job here if they have not yet.
        dtype: floating parameters are created in it, and initialised in it; None leaves them as the model has them (to
        be cast by ``shardcore.shard(precision=...)``).
        module: a model that exists already; its parameters shrink on entry, as if it had been built inside.

    Raises:
        ConfigError: a wrong mesh or dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"sharded_init(dtype={dtype}): expected a floating dtype, or None")
    where = as_mesh(mesh)
    keeper = Keeper(where["dp"], where.device)

    def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if dtype is not None and param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)
        _keep(keeper, module, name, param)

    for child in module.modules() if module is not None else ():
        for name, param in child.named_parameters(recurse=False):
            register(child, name, param)
    keeper.settle()
    with _Building(register, keeper.settle):
        yield
    keeper.settle()


@contextmanager
def empty_init() -> Iterator[None]:
    """Parameters of modules built inside are on the meta device, and buffers are real, with their values.

    For ``shardcore.load_safetensors`` or ``shardcore.shard``, which give them values piece by piece. Under
    ``torch.device("meta")`` buffers that a constructor computes (masks, frequencies) are lost, and must be computed
    again by ``reset_parameters()``.
    """

    def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if not param.is_meta:
            to_meta(param, name)

    give_back_freed_memory()
    with _Building(register, lambda: None):
        yield


def _keep(keeper: Keeper, module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Keep a parameter that ``module`` has, with its others; the module that holds most sets how much stays whole."""
    keeper.adopt(param, f"{type(module).__name__}.{name}")
    own = {id(p): p.nbytes for p in (*module.parameters(recurse=False), param)}
    keeper.limit_nbytes = max(keeper.limit_nbytes, sum(own.values()))
    if keeper.whole_nbytes > keeper.limit_nbytes:
        keeper.settle(own)


class _Building:
    """While entered, this thread's new parameters go to ``register``, and ``begin_module`` is called as a module
    begins. Only the innermost of nested contexts acts.
    """

    _open: list[_Building] = []  # noqa: RUF012  # one list for the process, as the hooks are
    _remove: Callable[[], None] | None = None

    def __init__(self, register: _Register, begin_module: Callable[[], None]) -> None:
        self._register = register
        self._begin_module = begin_module
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        if not _Building._open:
            _Building._remove = _install_hooks()
        _Building._open.append(self)

    def __exit__(self, *exc_info: object) -> None:
        _Building._open.remove(self)
        if not _Building._open and _Building._remove is not None:
            _Building._remove()
            _Building._remove = None

    @staticmethod
    def current() -> _Building | None:
        """The innermost context of this thread."""
        thread = threading.get_ident()
        return next((b for b in reversed(_Building._open) if b._thread == thread), None)


def _install_hooks() -> Callable[[], None]:
    """Notice parameters and the beginning of modules; the result undoes it. torch tells of the former only."""

    def on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        building = _Building.current()
        if building is not None and param is not None:
            building._register(module, name, param)

    plain_init = nn.Module.__init__

    def begin(module: nn.Module, *args: object, **kwargs: object) -> None:
        building = _Building.current()
        if building is not None:
            building._begin_module()
        plain_init(module, *args, **kwargs)

    handle = register_module_parameter_registration_hook(on_parameter)
    nn.Module.__init__ = begin  # type: ignore[method-assign, assignment]

    def remove() -> None:
        handle.remove()
        nn.Module.__init__ = plain_init  # type: ignore[method-assign]

    return remove
