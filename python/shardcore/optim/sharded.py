"""``shardcore.optimizer``: any element-wise torch optimizer over the shards of a model, as a torch optimizer."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.optim.agreement import OptionChanges, agree_on_options
from shardcore.optim.global_norm import any_gradient, sum_of_squares
from shardcore.optim.held import Held, join
from shardcore.optim.hosted import common_offload, on_host
from shardcore.optim.making import build_inner, default_scale, has_other_step, have_members
from shardcore.optim.pieces import Piece, cut_into_pieces, split
from shardcore.optim.probe import check_elementwise
from shardcore.optim.saving import restore, save
from shardcore.optim.single import OfOneParameter
from shardcore.optim.state_map import StateOfPieces
from shardcore.optim.targets import Options, check_options, find_class, named_options, resolve_targets
from shardcore.optim.tokens import count_tokens, tokens_per_rank
from shardcore.optim.updating import make_update
from shardcore.protocols import LossScale, ShardedGroup, ShardedOptimizerMark, ShardedRoot

_log = logging.getLogger("shardcore")
_FIXED_GROUPS = (
    "parameter groups cannot be added to a sharded optimizer, or taken from it, and keep their parameters and their "
    "order; list all of them in shardcore.optimizer(...)"
)


def optimizer(
    algorithm: type[torch.optim.Optimizer] | str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
    targets: nn.Module | Sequence[nn.Module] | Iterable[nn.Parameter] | Iterable[Options],
    *,
    max_grad_norm: float | None = None,
    loss_scale: LossScale | None = None,
    normalize: Literal["tokens"] | None = None,
    **options: Any,
) -> ShardedOptimizer:
    """An optimizer over sharded modules. Every rank makes the same one. Collective over the data-parallel axis.

    Args:
        algorithm: an element-wise torch optimizer as class, name (``"adamw"``), function of parameter groups, or
        instance
            (built before or after sharding; its groups and options are kept, its state must be empty).
        targets: sharded module(s), parameters, or parameter groups as torch takes them. Ignored parameters stay as
        they are.
        max_grad_norm: clip the global norm of the mean gradient to this, as ``torch.nn.utils.clip_grad_norm_``.
        loss_scale: overrides the scale that the modules' precision asks for.
        normalize: ``"tokens"``: losses are sums over target tokens, whose numbers :meth:`ShardedOptimizer.count_tokens`
            is told; the gradient is that of the mean over all tokens of the step, of all ranks and micro-batches.
        **options: passed on (``lr``, ``betas``, ``weight_decay``, ``fused``, ...).

    Raises:
        ConfigError: parameters that belong to no sharded module, none that is trainable, an optimizer that is not
            element-wise, a non-positive ``max_grad_norm``, a second optimizer of a model whose loss scale is dynamic.
        RankMismatchError: ranks give different options; the message names the first.
    """
    if normalize not in (None, "tokens"):
        raise ConfigError(f"normalize={normalize!r}: expected 'tokens', or None for the mean over micro-batches")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm={max_grad_norm!r}: expected a number above 0, or None for no clipping")
    if isinstance(algorithm, torch.optim.Optimizer):
        if options:
            raise ConfigError(
                f"options {sorted(options)} were given beside an optimizer instance; set them on the instance"
            )
        sharded = ShardedOptimizer.from_instance(algorithm, targets, max_grad_norm, loss_scale)
    else:
        build = find_class(algorithm) if isinstance(algorithm, str) else algorithm
        check_options(build, options)
        roots, groups = resolve_targets(targets)
        sharded = ShardedOptimizer(lambda pieces: build(pieces, **options), roots, groups, max_grad_norm, loss_scale)
    sharded.normalize = normalize
    settings = {"max_grad_norm": max_grad_norm, "loss_scale": sharded.loss_scale, "normalize": normalize}
    agree_on_options(sharded._roots, sharded.inner, sharded.param_groups, settings)
    return sharded


class ShardedOptimizer(OfOneParameter, private.ScalerAware, ShardedOptimizerMark, torch.optim.Optimizer):
    """Runs an inner optimizer on this rank's pieces of the master weights.

    ``param_groups`` lists the model's own parameters with their options, so torch's schedulers work on it. ``step`` is
    collective over the data-parallel axis.
    """

    def __init__(
        self,
        build: Callable[[list[Options]], torch.optim.Optimizer],
        roots: Sequence[ShardedRoot],
        groups: list[Options],
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        self._roots = roots
        options_of = {param: i for i, group in enumerate(groups) for param in group["params"]}
        offload = common_offload(roots)
        tile_numel = offload.tile_numel if offload.states == "nvme" else None
        self._pieces = [piece for root in roots for piece in cut_into_pieces(root.groups, options_of, tile_numel)]
        self._held = Held(roots, options_of)
        self.inner = build_inner(
            build, [{**g, "params": [p.tensor for p in self._pieces if p.options == i]} for i, g in enumerate(groups)]
        )
        """The torch optimizer over this rank's pieces; its ``param_groups`` follow the public ones at each step."""
        check_elementwise(self.inner)
        self._begins_with_states = any(self.inner.state.values())
        if offload.states is not None and offload.ratio == 1:
            self.inner = on_host(self.inner, roots)
        self._update = make_update(self.inner, self._pieces, roots)
        for public, inner in zip(groups, self.inner.param_groups, strict=True):
            for key, value in inner.items():
                public.setdefault(key, value)
        self._groups_are_fixed = False
        with private.without_loading_compiler():
            super().__init__(groups, self.inner.defaults)
        self._groups_are_fixed = True
        self.param_groups = groups
        self.max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale or default_scale(roots)
        join(self, roots)
        self.loss_scale = self._loss_scale
        self.track_grad_norm = False
        """Compute ``grad_norm`` at each step even where nothing else needs it."""
        self.num_steps = 0
        self.num_skipped_steps = 0
        self.step_was_applied = False
        self._unscaled_at: dict[ShardedRoot, int] = {}
        self._normalised_by = 1.0
        self._options = OptionChanges(roots, groups)
        self._members = [list(group["params"]) for group in groups]
        self._norm: torch.Tensor | None = None
        self._taken_over: torch.optim.Optimizer | None = None
        self._state_of_instance: Any = None

    @classmethod
    def from_instance(
        cls,
        instance: torch.optim.Optimizer,
        targets: Any,
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
    ) -> ShardedOptimizer:
        """Take over an optimizer that the user built; its groups are matched to the sharded parameters by identity.

        The instance's ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` become the sharded ones, so that
        a loop that still calls it trains.
        """
        if isinstance(instance, ShardedOptimizer):
            raise ConfigError(
                "this optimizer is sharded already; pass the torch optimizer it was made from, or use it as it is"
            )
        if has_other_step(instance):
            raise ConfigError(
                f"{type(instance).__name__}.step was replaced on this instance, which sharding would undo: change step "
                "on the optimizer that shardcore.optimizer returns, or by register_step_pre_hook"
            )
        if any(state.get("step") != 0 for state in instance.state.values()):
            raise StateError(
                f"{type(instance).__name__} has made steps already; build it anew, its state cannot be sharded"
            )
        named = named_options(instance, targets)
        roots, groups = resolve_targets(named)

        def build(pieces: list[Options]) -> torch.optim.Optimizer:
            groups = [{**g, "params": p["params"]} for g, p in zip(instance.param_groups, pieces, strict=True)]
            if instance.state:  # one that makes its states when it is built, as Adagrad does
                make: Callable[..., torch.optim.Optimizer] = type(instance)
                known = inspect.signature(make).parameters
                return make(groups, **{key: value for key, value in instance.defaults.items() if key in known})
            inner = copy.copy(instance)
            inner.param_groups = groups
            return inner

        sharded = cls(build, roots, groups, max_grad_norm, loss_scale)
        # The very dicts of the instance, since schedulers made for it write into them.
        for group in groups:
            group.pop("param_names", None)
        sharded.param_groups = instance.param_groups
        private.share_step_hooks(instance, sharded)
        private.replace_step(instance, sharded.step)
        sharded._taken_over, sharded._state_of_instance = instance, instance.state
        instance.zero_grad = sharded.zero_grad  # type: ignore[method-assign]
        instance.state_dict = sharded.state_dict  # type: ignore[method-assign]
        instance.load_state_dict = sharded.load_state_dict  # type: ignore[method-assign]
        return sharded

    @property
    def state(self) -> Any:
        """The inner optimizer's states by this rank's pieces. They may be written to, so a save that still reads them
        in the background is waited for; what was taken out of it before must stay as it is until then.
        """
        self._wait_for_readers()
        return StateOfPieces(self.inner.state)

    @state.setter
    def state(self, state: Any) -> None:
        """An empty one forgets all states. torch's constructor sets one, too; there the inner optimizer's stays."""
        if not self._groups_are_fixed:
            return
        if state:
            raise StateError("optimizer.state of a sharded optimizer is set by load_state_dict, or emptied")
        self.state.clear()

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the losses; setting it changes what plain backwards multiply by, too."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        self._loss_scale = scale
        for root in self._roots:
            root.set_loss_scale(scale)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's mean gradient before clipping, after unscaling; None if it was not needed."""
        return None if self._norm is None else float(self._norm)

    @property
    def normalize(self) -> Literal["tokens"] | None:
        """``"tokens"`` where losses are sums over tokens; see :func:`optimizer`."""
        return "tokens" if self._roots[0].sums_over_tokens else None

    @normalize.setter
    def normalize(self, by: Literal["tokens"] | None) -> None:
        for root in self._roots:
            root.sums_over_tokens = by is not None
            root.num_tokens.clear()

    def count_tokens(self, num_tokens: int | float | torch.Tensor) -> None:
        """Tell of the target tokens over which this rank's loss of a micro-batch was summed; 0 is fine.

        Args:
            num_tokens: a number (or weight), or a tensor of one element; a CUDA tensor makes ``step()`` wait for it.

        Raises:
            StateError: the optimizer was made without ``normalize="tokens"``.
            ConfigError: a negative number.
        """
        count_tokens(self, self._roots, num_tokens)

    def holds(self, param: nn.Parameter) -> bool:
        """Whether this optimizer updates the parameter."""
        return param in self._held.params

    def has_unscaled(self, root: Any) -> bool:
        """Whether it has taken the loss scale out of its gradients since the last backward or clearing."""
        return bool(self._unscaled_at.get(root) == root.num_passes)

    def scale_again(self, root: Any) -> None:
        """A backward is about to add to the gradients. Where a step has taken the loss scale out of them, and they were
        not cleared, it is put back, so that all have one scale.
        """
        if self.has_unscaled(root):
            factor = self._normalised_by * self.loss_scale.scale
            if factor != 1.0:
                for grad in self._held.grads(root):
                    grad.mul_(factor)

    def states(self) -> list[torch.Tensor]:
        """The tensors of its states on this rank, of one dim or more."""
        values = [value for state in self.inner.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the window's gradients. Collective over the data-parallel axis.

        Clips, skips a step with non-finite gradients where the precision asks for it (see ``step_was_applied``), and
        starts gathering updated parameters where these are whole.

        Raises:
            StateError: no backward has produced a gradient since the last ``zero_grad``; or fp16 overflow at the
            minimum scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._taken_over is not None:
            private.mark_stepped(self._taken_over)
        try:
            self._step()
        except Exception as error:
            comm.report_failure(error)
            raise
        return loss

    def add_param_group(self, param_group: Options) -> None:
        """Groups are laid out once, when the optimizer is made.

        Raises:
            StateError: called by the user.
        """
        if self._groups_are_fixed:
            raise StateError(_FIXED_GROUPS)
        super().add_param_group(param_group)

    def check_grad_scaler(self) -> None:
        """``torch.amp.GradScaler`` is stepping this optimizer.

        Raises:
            StateError: gradients are not on the parameters, so that it would find none to unscale.
        """
        if all(param.grad is None for group in self.param_groups for param in group["params"]):
            raise StateError(
                "torch.amp.GradScaler finds no gradients on sharded parameters: leave it out, and let shardcore.shard("
                'model, ..., precision="fp16") scale losses and skip steps with overflows by itself'
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the window's gradients of the parameters held; with ``set_to_none=False`` they count as zeros."""
        for root in self._roots:
            root.clear_gradients_of(self._held.slots[root], set_to_none)
            root.num_tokens.pop(self, None)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, in torch's form: ``state`` by index, ``param_groups`` with indices as ``params``. Indices
        count this rank's pieces, whose parameters and ranges stand in ``pieces``; ``masters`` holds the master weights
        where parameters are 16-bit. It loads only into the same model on the same mesh. Tensors are not copied.
        """
        self._check_here("state_dict of the optimizer")
        self._wait_for_readers()
        return {**save(self._pieces, self._update, self.param_groups), **self._counters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank; masters become the parameters. Collective over the
        data-parallel axis.

        Raises:
            ConfigError: it comes from another model, mesh or set of parameter groups; on every rank.
        """
        self._check_here("load_state_dict of the optimizer")
        self._wait_for_readers()
        restore(self._pieces, self._update, self.param_groups, self._roots, state_dict)
        self.loss_scale.load_state_dict(state_dict["loss_scale"])
        self.num_steps = int(state_dict["num_steps"])
        self.num_skipped_steps = int(state_dict["num_skipped_steps"])

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a sharded optimizer can be neither copied nor pickled: make another by shardcore.optimizer(...), and load "
            "this one's state_dict() into it"
        )

    def _check_here(self, what: str) -> None:
        for root in self._roots:
            root.check_here(what=what)

    def _wait_for_readers(self) -> None:
        """A checkpoint that is written in the background reads states; those on a disk by one reader at a time."""
        for root in self._roots:
            root.about_to_change()

    def _counters(self) -> dict[str, Any]:
        return {
            "loss_scale": self.loss_scale.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def _step(self) -> None:
        self.step_was_applied = False
        if self._taken_over is not None:
            self._follow(self._taken_over)
        if not have_members(self.param_groups, self._members):
            raise StateError(_FIXED_GROUPS)
        self._options.note_changes(self.param_groups)
        self._wait_for_readers()
        has_gradient = self._held.with_gradient(self._roots)
        if not any_gradient(self._roots, found=any(has_gradient.values())):
            raise StateError(
                "step() without gradients: call loss.backward() (engine.backward(loss)) first, on every rank"
            )
        divisor = self._divisor()
        factor = self._gradient_factor(divisor)
        if factor is None:
            self._skip(self._held.groups)
            return
        if not all(map(self.has_unscaled, self._roots)):
            self._normalised_by = divisor / self.loss_scale.scale
        self._unscaled_at = {root: root.num_passes for root in self._roots}
        self.loss_scale.update(overflow=False)
        self._run_update(self._active_pieces(has_gradient), factor)
        for group in self._held.groups:
            if any(has_gradient.get(slot.param, False) for slot in group.slots):
                group.publish(copied=self._update.writes_parameters(group))
        self.num_steps += 1
        self.step_was_applied = True

    def _run_update(self, pieces: list[Piece], factor: float | torch.Tensor) -> None:
        groups = self._held.groups
        for group in groups:
            group.adopt_edits_if_any()
        for public, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in public.items() if key not in ("params", "param_names")})
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            self._held.multiply(factor)
        self._update.run(pieces)

    def _follow(self, instance: torch.optim.Optimizer) -> None:
        """Honour what was set on the instance that was taken over: other groups, an empty state."""
        self.param_groups = instance.param_groups
        if instance.state is not self._state_of_instance:
            self.state = instance.state
            self._state_of_instance = instance.state

    def _divisor(self) -> float:
        """By what the sums in the shards are divided: the loss scale and what normalises the window. Collective where
        gradients are normalised by tokens.
        """
        root = self._roots[0]
        if self.has_unscaled(root):
            return 1.0  # a second step with the same gradients
        if not root.sums_over_tokens:
            return self.loss_scale.scale / root.window_correction
        return self.loss_scale.scale * tokens_per_rank(self, self._roots)

    def _gradient_factor(self, scale: float) -> float | torch.Tensor | None:
        """What unscales and clips the gradients. None if the step must be skipped for an inf or NaN on any rank."""
        skips = any(root.skip_nonfinite for root in self._roots)
        if not (skips or self.max_grad_norm is not None or self.track_grad_norm):
            self._norm = None
            return 1 / scale
        self._norm = norm = self._global_norm() / scale
        if skips and not math.isfinite(norm):
            return None
        if self.max_grad_norm is None:
            return 1 / scale
        factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0) / scale
        return float(factor) if norm.device.type == "cpu" else factor

    def _global_norm(self) -> torch.Tensor:
        """The 2-norm of the whole reduced gradient: one partial sum per group and rank, each element counted once."""
        return torch.stack([sum_of_squares(root, self._held) for root in self._roots]).sum().sqrt()

    def _skip(self, groups: Sequence[ShardedGroup]) -> None:
        scale = self.loss_scale.scale
        self.num_skipped_steps += 1
        where = _first_nonfinite(groups)
        try:
            self.loss_scale.update(overflow=True)
        except StateError as error:
            raise StateError(f"step {self.num_steps + self.num_skipped_steps}: {error} {where}") from None
        if self._roots[0].data_axis.rank == 0:
            changed = "" if self.loss_scale.scale == scale else f"; loss scale {scale:g} -> {self.loss_scale.scale:g}"
            _log.warning(
                "step %d skipped: non-finite gradient (%s)%s; %d skipped so far",
                self.num_steps + self.num_skipped_steps,
                where or "on another rank",
                changed,
                self.num_skipped_steps,
            )

    def _active_pieces(self, has_gradient: dict[nn.Parameter, bool]) -> list[Piece]:
        """The pieces to update; those of which only a part has a gradient are cut."""
        active: list[Piece] = []
        for piece in list(self._pieces):
            flags = {has_gradient[slot.param] for slot in piece.slots}
            parts = self._split(piece) if len(flags) == 2 else [piece]
            active.extend(part for part in parts if has_gradient[part.slots[0].param])
        return active

    def _split(self, piece: Piece) -> list[Piece]:
        parts = split(piece, self.inner)
        position = self._pieces.index(piece)
        self._pieces[position : position + 1] = parts
        return parts


def _first_nonfinite(groups: Sequence[ShardedGroup]) -> str:
    """Where this rank's shard has its first inf or NaN, for the log."""
    for group in groups:
        for slot in group.slots:
            start, stop, offset = group.local_range(slot)
            if not torch.isfinite(group.grad_shard[offset : offset + stop - start]).all():
                return f"first in {slot.name!r}"
    return ""
