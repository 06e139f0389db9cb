"""Memory that this process takes, now and at its peak, as Linux tells it; other systems say nothing, and then it is 0.

Not `ru_maxrss`: a process inherits that from the one that started it, and it cannot be set back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """What is in RAM now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was in RAM since the process began, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> bool:
    """Let the peak be what is in RAM now; False where the system does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def return_freed() -> None:
    """Give back what nothing refers to any more and what the allocator keeps for later, so that it is not counted."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed() -> bool:
    """Let freed memory stay with the process, for work that takes and frees the same large blocks again and again, as
    training steps do; else the system clears each anew, a fifth and more of a step's time. The peak grows somewhat.

    Returns:
        Whether the allocator took it: glibc does, unless MALLOC_… variables or another allocator say otherwise.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "LD_PRELOAD" in os.environ:
        return False
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  other C libraries number the options differently
        return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))
    return False


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def _status(name: str) -> int:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
