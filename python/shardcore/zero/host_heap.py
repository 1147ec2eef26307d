"""What glibc does with freed memory, in two phases of a CPU rank's life.

While a model is built, whole units come and go and the process must stay small: freed memory goes back to the kernel.
By default glibc learns from the first large block that is freed to keep such blocks, by chance up to a whole model.

In training, stages 2 and 3 release buffers at every use. Memory that goes back to the kernel then is cleared by it page
by page when it is next needed: a fifth of a step. Caching allocators on GPUs keep it; so does glibc if it is asked to.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SMALL_NBYTES = 1 << 20
_MOST_OF_HEAP_NBYTES = 32 << 20
"""The largest block that glibc takes from the heap; larger ones are mapped each time."""


def give_back_freed_memory() -> None:
    """A model is about to be built: blocks of a MiB or more go back to the kernel when they are freed. Left alone is
    what glibc's own settings in the environment say, and any other C library.
    """
    _set(mmap_threshold=_SMALL_NBYTES, trim_threshold=_SMALL_NBYTES, top_pad=_SMALL_NBYTES)


def keep_freed_memory() -> None:
    """A model is about to be trained: freed memory is kept for the next allocation, unless ``SHARDCORE_KEEP_MEMORY=0``
    says that it is not to be.
    """
    if os.environ.get("SHARDCORE_KEEP_MEMORY", "1") != "0":
        _set(mmap_threshold=_MOST_OF_HEAP_NBYTES, trim_threshold=2**31 - 1, top_pad=64 << 20)


def _set(mmap_threshold: int, trim_threshold: int, top_pad: int) -> None:
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, mmap_threshold)
        library.mallopt(_TRIM_THRESHOLD, trim_threshold)
        library.mallopt(_TOP_PAD, top_pad)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    settings = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if settings & os.environ.keys() or not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
