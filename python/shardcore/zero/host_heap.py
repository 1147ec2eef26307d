"""Buffers that are released and taken again should not cost page faults.

Stages 2 and 3 release buffers at every use. By default glibc gives such memory back to the kernel, which clears it page
by page when it is next needed: a fifth of a step on CPU. Caching allocators on GPUs keep it; this asks glibc to do so.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MOST_OF_HEAP_NBYTES = 32 << 20
"""The largest block that glibc takes from the heap; larger ones are mapped each time."""


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocation, where its C library is glibc.

    ``SHARDCORE_KEEP_MEMORY=0`` leaves the allocator alone, as do glibc's own settings in the environment.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if os.environ.get("SHARDCORE_KEEP_MEMORY", "1") == "0" or settings & os.environ.keys():
        return
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_MMAP_THRESHOLD, _MOST_OF_HEAP_NBYTES)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    library.mallopt(_TOP_PAD, 64 << 20)
