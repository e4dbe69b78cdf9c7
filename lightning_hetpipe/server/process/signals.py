"""Children of processes, and their signals: those that end a server, and the kernel's that a parent has ended.

Linux sends a child a chosen signal when the *thread* that forked it ends (PR_SET_PDEATHSIG). A child needs this signal
for the seconds in which it imports and cannot watch its parent yet. So that thread must live until the child ends, or
watches and calls `forget`. On other systems, a child notices its parent's end only after its imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended, as shells report it."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM has ended, as shells report it."""

_SET = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>

_PROGRAM = f"""
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl({_SET}, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # it may already have ended
    os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` as a child to which SIGTERM is sent when this process ends. Its first word
    is a path."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]


# As with multiprocessing, the search path comes from the parent: the child finds the same modules.
CHILD = """
import json, sys
told = json.loads(sys.stdin.readline() or sys.exit())
sys.path[:] = told.pop("path")
from {} import child
child(**told)
"""


def start_child(module: str, name: str, **more: Any) -> subprocess.Popen[bytes]:
    """Start a child that calls ``child`` of ``module``, with arguments for ``Popen``. ``name`` is for people who list
    processes. The child reads a line of JSON with `search_path` and the arguments of ``child``, because other users can
    read command lines."""
    command = guarded([sys.executable, "-c", CHILD.format(module), name])
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **more)


def search_path() -> dict[str, object]:
    """Return the search path for later children. Its paths are absolute, because a program may change its folder."""
    return {"path": [os.path.abspath(each) for each in sys.path]}


def forget() -> None:
    """Cancel the signal, because this process watches its parent itself now."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET, 0, 0, 0, 0)


class Closable(Protocol):
    """Socket or file."""

    def close(self) -> None: ...


def close_in_forks(end: Closable) -> None:
    """Close ``end`` in forks. Otherwise a DataLoader worker would hide from other processes that this process died."""
    held = weakref.ref(end)

    def close() -> None:
        if (kept := held()) is not None:
            kept.close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def exit_now(code: int) -> NoReturn:
    """Flush logs and output, and end the process with ``code`` without finalising its interpreter."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or no reader
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Context manager in which the signals have these ``handlers``. It is for the main thread."""
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Signals:
    """SIGTERM and SIGINT as bytes in a pipe. A signal handler may take no lock, so it cannot set an event."""

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handled = handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._note))
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)  # from here on a second signal ends the process at once
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        """Return the descriptor that is readable after a signal."""
        return self._read

    def read(self) -> int:
        """Return the number of the first unread signal."""
        return os.read(self._read, 1)[0]
