"""What travels between the test process and its rank processes, and how it is pickled."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from shardcore.testing.rewriting import exec_module


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionRef:
    """A module-level function by the place it can be found again in another process."""

    module: str
    """Name of the module in ``sys.modules`` of the test process."""
    path: str
    """Source file of the module; test modules need not be importable by name."""
    qualname: str
    """Name of the function in its module."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionRef:
        """Describe ``function``; raises ``TypeError`` unless it is a plain function at the top of a module."""
        if not inspect.isfunction(function) or "." in function.__qualname__:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{name} cannot run on rank processes: they find a function by module and name, "
                "so it must be a plain function at the top of its module (no lambda, closure or method)"
            )
        path = Path(inspect.getsourcefile(function) or "").resolve()
        return cls(module=function.__module__, path=str(path), qualname=function.__qualname__)

    def load(self) -> Callable[..., Any]:
        """Import the module (once per process) and return the function, without its ``spmd`` wrapper."""
        function = getattr(import_from_path(self.module, self.path), self.qualname)
        return getattr(function, "spmd_body", function)  # type: ignore[no-any-return]


def import_from_path(name: str, path: str) -> ModuleType:
    """Module ``name``, imported from the file ``path`` unless this process has it already."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import module {name!r} from {path!r}: not a Python source file", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec_module(module, spec.loader, path)
    except BaseException:
        del sys.modules[name]
        raise
    return module


WarningFilter = tuple[Literal["default", "error", "ignore", "always", "module", "once"], str, type[Warning], str, int]


def current_warning_filters() -> tuple[WarningFilter, ...]:
    """The filters of this process in a form that ``apply_warning_filters`` of another process takes."""

    def text(pattern: re.Pattern[str] | str | None) -> str:
        return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""

    return tuple(
        (action, text(message), category, text(module), lineno)  # type: ignore[misc]
        for action, message, category, module, lineno in warnings.filters
    )


def apply_warning_filters(filters: Sequence[WarningFilter]) -> None:
    """Replace the filters of this process."""
    warnings.resetwarnings()
    for action, message, category, module, lineno in filters:
        warnings.filterwarnings(action, message, category, module, lineno, append=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStore:
    """Ask rank 0 to start a key-value store; the value of its report is the TCP port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinStore:
    """Ask a rank to connect to the store of rank 0, for all jobs to come."""

    port: int
    """TCP port of the store on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One call of one function on one rank."""

    function: FunctionRef
    """What to call."""
    arguments: bytes
    """Pickled ``(args, kwargs)``; unpickled after the function's module is there."""
    rank: int
    """Global rank, and local rank: all ranks are on this machine."""
    world: int
    """Number of ranks."""
    number: int
    """Counts the runs; keeps their keys apart in the store."""
    backend: str | None
    """Backend of the default process group; ``None`` starts no group."""
    port: int | None
    """``MASTER_PORT``; ``None`` sets no environment variables."""
    timeout: float
    """Time limit of the call in seconds; the process group's own is longer, so that this one speaks first."""
    sys_path: tuple[str, ...]
    """Module search path of the test process."""
    filters: tuple[WarningFilter, ...]
    """Warning filters of the test process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """All ranks are through the body: close the process group and clean up."""


Request = HostStore | JoinStore | Job | Release


def dumps(value: object) -> bytes:
    """Pickle with tensors as compact CPU copies: only the elements a view shows, never its whole storage."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of ``dumps``."""
    return pickle.loads(data)


def pickle_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """``dumps((args, kwargs))``, with an error that names the argument which cannot travel."""
    for name, value in [*((str(i), a) for i, a in enumerate(args)), *kwargs.items()]:
        try:
            dumps(value)
        except Exception as exc:
            raise TypeError(
                f"argument {name!r} of type {type(value).__name__} cannot be sent to the rank processes ({exc}); "
                "pass plain values (numbers, strings, paths, tensors) and build the rest in the body"
            ) from exc
    return dumps((tuple(args), dict(kwargs)))


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if obj.layout is not torch.strided:
            return NotImplemented
        data = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (data, obj.dtype, tuple(obj.shape), obj.requires_grad, type(obj))


def _rebuild_tensor(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, cls: type[torch.Tensor]
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).view(shape)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
