"""Where the loss scale and 1/accumulation enter: at the loss, once per backward, whichever models it passes through.

Scaling at a model's outputs instead would miss gradients that reach parameters another way (a penalty on the weights, a
part that is called by itself), and would scale twice what passes two outputs (a generator behind a discriminator, a
model applied to its own output). One backward has one factor: that of the first model found from the loss. A model that
wants another one corrects its gradients as they arrive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.protocols import find_slot
from shardcore.zero.saved import explain_released

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardcore.zero.root import Root

_MARK = "shardcore model"
_SCALED = "shardcore loss scale"

_roots: weakref.WeakSet[Root] = weakref.WeakSet()


@dataclass(slots=True)
class _Backward:
    """The outermost backward that runs now."""

    factor: float = 1.0
    is_found: bool = False
    """Some model lies on the way from the loss, and ``factor`` is its own."""
    num_hidden: int = 0
    """Backwards inside it, of graphs that it could not see, that were scaled by themselves."""


_running = _Backward()


def install(root: Root) -> None:
    """Scale the losses of ``root`` from now on."""
    _roots.add(root)
    private.around_any_backward(_run)


def mark_output(tensor: torch.Tensor, root: Root) -> None:
    """Let a search from the loss end at this output of the model."""
    if tensor.grad_fn is not None:
        private.notes_of(tensor.grad_fn)[_MARK] = weakref.ref(root)


def mark_scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Say that ``loss`` was multiplied by ``scale`` already. Returns it."""
    if loss.grad_fn is not None:
        private.notes_of(loss.grad_fn)[_SCALED] = scale
    return loss


def running_factor() -> float:
    """By what the loss of the running backward was multiplied."""
    return _running.factor


def _run(losses: Sequence[Any], gradients: Sequence[torch.Tensor | None], accumulates: bool, run: private.Run) -> Any:
    with _explained():
        if not accumulates:
            return run(gradients)
        if private.in_backward():
            return _run_inside(losses, gradients, run)
        return _run_outermost(losses, gradients, run)


def _run_outermost(losses: Sequence[Any], gradients: Sequence[torch.Tensor | None], run: private.Run) -> Any:
    global _running
    root = _first_model(losses)
    before, _running = _running, _Backward() if root is None else _Backward(root.output_scale, True)
    try:
        return run(_scaled(losses, gradients))
    except Exception as error:
        if any(root.backward_running for root in _roots):
            comm.report_failure(error)
        raise
    finally:
        _running = before


def _run_inside(losses: Sequence[Any], gradients: Sequence[torch.Tensor | None], run: private.Run) -> Any:
    """A backward inside a backward (reentrant checkpointing), whose graph the outer one could not look into."""
    root = None if _running.is_found else _first_model(losses)
    if root is None:
        return run(gradients)
    if _running.num_hidden:
        raise StateError(
            "the loss scale (or 1/accumulation) cannot be applied once: several models in this backward are hidden "
            "inside reentrant checkpoints, one of which may lie behind another. Use checkpoint(..., "
            "use_reentrant=False), or checkpoint blocks inside the model"
        )
    _running.num_hidden += 1
    _running.factor, _running.is_found = root.output_scale, True
    try:
        return run(_scaled(losses, gradients))
    finally:
        _running.factor, _running.is_found = 1.0, False


def _scaled(losses: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The gradients of the losses, times the running factor, less what :func:`mark_scaled` says."""
    if _running.factor == 1.0:
        return gradients
    factors = [_running.factor / private.notes_of(_start(loss)).get(_SCALED, 1.0) for loss in losses]
    return tuple(None if grad is None else grad * by for grad, by in zip(gradients, factors, strict=True))


def _first_model(losses: Sequence[Any]) -> Root | None:
    """The model whose factor a backward from ``losses`` takes: one with a real loss scale if there is any on the way,
    since a factor can be taken out of gradients as they arrive, but small ones that have vanished cannot come back.
    """
    wanted = {root for root in _roots if root.output_scale != 1.0}
    losses = [loss for loss in losses if isinstance(loss, GradientEdge) or loss.requires_grad]
    scaled = {root for root in wanted if root.loss_scale != 1.0}
    for candidates in (scaled, wanted - scaled):
        found = _search(losses, candidates) if candidates else None
        if found is not None:
            return found
    return None


def _search(losses: Sequence[Any], wanted: set[Root]) -> Root | None:
    """Walk the graph from the losses to the first output or parameter of one of these models."""
    starts = {_start(loss) for loss in losses}
    pending, seen = list(starts), set(starts)
    while pending:
        node = pending.pop()
        root = _model_at(node)
        if root in wanted:
            return root
        if _SCALED in private.notes_of(node) and node not in starts:
            raise StateError("a part of the loss has been through engine.scale(): apply it to the whole loss, or not")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return None


def _start(loss: Any) -> Node:
    return loss.node if isinstance(loss, GradientEdge) else get_gradient_edge(loss).node


def _model_at(node: Node) -> Root | None:
    """The model of which ``node`` is a marked output, or a parameter."""
    param = getattr(node, "variable", None)
    if isinstance(param, torch.Tensor):
        slot = find_slot(param)
        root: Root | None = None if slot is None else slot.group.root
        return root
    mark: weakref.ref[Root] | None = private.notes_of(node).get(_MARK)
    return None if mark is None else mark()


@contextmanager
def _explained() -> Iterator[None]:
    """What torch says of parameters that are not there, in words that help."""
    try:
        yield
    except RuntimeError as error:
        explained = explain_released(error)
        if explained is None:
            raise
        raise explained from error
