"""Signal of a parent's end from the kernel, for the seconds in which a child imports and cannot watch by itself yet.

Linux sends a child a signal of its choice when the *thread* that forked it ends (PR_SET_PDEATHSIG). So that thread must
live as long as the child, or until the child watches by itself, and calls `forget`. Elsewhere nothing is sent: a child
notices when its imports are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence

_SET = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>

ASK = f"""
import contextlib, ctypes, os, signal, sys
if sys.platform == "linux":
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl({_SET}, signal.SIGTERM, 0, 0, 0)
"""
"""First statements of a child that asks for SIGTERM. The parent may have ended before: check ``os.getppid()`` next."""

_PROGRAM = f"""{ASK}
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: Sequence[str]) -> list[str]:
    """Return ``command``, whose first word is a path, as a child of this process that SIGTERM ends with it."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]


def forget() -> None:
    """Ask for no signal any more: this process watches by itself now."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET, 0, 0, 0, 0)
