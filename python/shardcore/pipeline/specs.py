"""What a user writes down as a layer: a recipe that is built only where it is needed, and arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.errors import ConfigError


class LayerSpec:
    """A layer that is built later: ``LayerSpec(nn.Linear, 10, 20)``. Only the rank that runs the layer builds it."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ConfigError(f"LayerSpec({typename!r}): expected a module class, or a function that returns a layer")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    @property
    def class_name(self) -> str:
        """Name of the class, as ``partition="type:..."`` sees it."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self) -> Any:
        """Make the layer, from torch's current random state."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [repr(a) for a in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{self.class_name}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the other layers of the same ``key``, wherever these run.

    Args:
        key: names the shared weights.
        typename, *module_args, **module_kwargs: as for :class:`LayerSpec`.
        forward_fn: called as ``forward_fn(module, value)`` instead of ``module(value)``.
        tied_weight_attr: attribute path(s) of the shared parameters, such as ``"weight"`` or ``["weight", "bias"]``.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


@dataclass
class Arguments:
    """Several arguments for the next layer, some by name: a micro-batch's inputs, or what a layer returns.

    Anything else, tuples and dicts included, is passed on as one argument, as in ``nn.Sequential``.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(layer: Callable[..., Any], value: Any) -> Any:
    """``layer`` on ``value``, spread out where it is :class:`Arguments`."""
    if isinstance(value, Arguments):
        return layer(*value.args, **value.kwargs)
    return layer(value)
