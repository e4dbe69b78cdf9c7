"""Signals of processes: those that end a server, and the kernel's signal that a parent has ended.

Linux sends a child a signal of its choice when the *thread* that forked it ends (PR_SET_PDEATHSIG). A child needs that
signal for the seconds in which it imports and cannot watch by itself yet. So that thread must live as long as the
child, or until the child watches by itself, and calls `forget`. Elsewhere nothing is sent: a child notices when its
imports are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, Protocol

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


class Closable(Protocol):
    """A socket, or a file."""

    def close(self) -> None: ...


def close_in_forks(end: Closable) -> None:
    """Close ``end`` in forks, lest a DataLoader worker keeps others from seeing that this process died."""
    held = weakref.ref(end)

    def close() -> None:
        if (kept := held()) is not None:
            kept.close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def exit_now(code: int) -> NoReturn:
    """End the process with ``code``, without taking its interpreter down, once what it has logged is written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    os._exit(code)


class Signals:
    """SIGTERM and SIGINT as bytes in a pipe: a signal handler may take no lock, so it cannot set an event."""

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():  # from here on a second one ends the process at once
            signal.signal(each, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        """The descriptor that can be read once there was one."""
        return self._read

    def read(self) -> int:
        """Return the number of the first one that was not read."""
        return os.read(self._read, 1)[0]
