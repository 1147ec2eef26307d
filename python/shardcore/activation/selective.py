"""The selective policy: the outputs of matrix products and fused attention are kept, everything cheap is computed again
(Korthikanti et al. 2022, section 5, turned round: what to keep is named, not what to repeat).

Two modes see every operation of a region: one keeps outputs in the first run, the other hands them out again in the
second. torch's own modes do the same under its compiler, which reads its marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardcore import _torch_private as private

_NAMES = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
"""Of ``torch.ops.aten``, where the installed torch has them. No batched product: attention that is written out uses it
for its scores [batch, heads, sequence, sequence], the very tensors that must not be kept.
"""


def _operations() -> Iterator[Any]:
    for name in _NAMES:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield from (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)


KEPT_OPERATIONS = frozenset(_operations())
"""Operations whose outputs the selective policy keeps."""


class _Output:
    """What an operation returned."""

    def __init__(self, value: Any) -> None:
        self._is_tensor = isinstance(value, torch.Tensor)
        items = [value] if self._is_tensor else list(value)
        self._items = [private.alias(item) if isinstance(item, torch.Tensor) else item for item in items]
        self._seen = [(tensor, private.version(tensor)) for tensor in self.tensors]
        self.is_overwritten = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in it."""
        return [item for item in self._items if isinstance(item, torch.Tensor)]

    def again(self) -> Any | None:
        """The same once more; None if it was written to in place since, so that it must be computed again."""
        if self.is_overwritten or any(private.version(tensor) != version for tensor, version in self._seen):
            return None
        items = [private.alias(item) if isinstance(item, torch.Tensor) else item for item in self._items]
        return items[0] if self._is_tensor else tuple(items)

    def watch(self, tensor: torch.Tensor) -> None:
        """Look at this one's count of writes, too: it shows the same memory, but torch does not count it as a view (a
        linear layer without bias reshapes its product in this way).
        """
        shown = private.alias(tensor)
        self._seen.append((shown, private.version(shown)))


_Outputs = defaultdict[Any, list[_Output]]


class _Keeping(private.DispatchMode):
    """Keeps outputs in the order of the calls of each operation."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._by_storage: dict[int, _Output] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of a region run as they are."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATIONS:
            output = _Output(value)
            self._outputs[func].append(output)
            self._by_storage.update((id(tensor.untyped_storage()), output) for tensor in output.tensors)
        elif func.namespace == "c10d":  # collectives write in place, and do not count it
            for output, _ in self._kept_among((args, kwargs)):
                output.is_overwritten = True
        else:
            for output, tensor in self._kept_among(value):
                output.watch(tensor)
        return value

    def _kept_among(self, tree: Any) -> Iterator[tuple[_Output, torch.Tensor]]:
        """Kept outputs whose memory a tensor in the tree shows."""
        for leaf in [tree] if isinstance(tree, torch.Tensor) else private.flatten(tree)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                output = self._by_storage.get(id(leaf.untyped_storage()))
                if output is not None:
                    yield output, leaf

    def __exit__(self, *exception: Any) -> None:
        self._by_storage.clear()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]


class _Replaying(private.DispatchMode):
    """Returns what was kept instead of computing it."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._num_calls: defaultdict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of a region run as they are."""
        return True

    def __enter__(self) -> Any:
        self._num_calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in KEPT_OPERATIONS:
            index = self._num_calls[func]
            self._num_calls[func] += 1
            kept = self._outputs[func]
            value = kept[index].again() if index < len(kept) else None
            if value is not None:
                return value
        return func(*args, **(kwargs or {}))


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What the first and any later run of one region are entered under."""
    outputs: _Outputs = defaultdict(list)
    return _Keeping(outputs), _Replaying(outputs)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


compiled_contexts = partial(create_selective_checkpoint_contexts, _policy)
"""The same for regions that torch compiles."""
