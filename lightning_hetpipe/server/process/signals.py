"""Child processes, their start and their end: signals that end a server, and the signal that a parent has ended.

Linux sends a child a chosen signal when the *thread* that forked it ends (PR_SET_PDEATHSIG). A child needs this signal
for the seconds in which it imports and cannot watch its parent yet. So that thread must live until the child ends, or
watches and calls `forget`. On other systems, a child notices its parent's end only after its imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import IO, Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended, as shells report it."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM has ended, as shells report it."""

PARENT_GONE = 0
"""Result of `until_signal` if no signal but the parent's end ended the server."""

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


def how(code: int) -> str:
    """Describe the end of a process by its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died by {signal.Signals(-code).name}"
    except ValueError:
        return f"died by signal {-code}"


def forget() -> None:
    """Cancel the signal, because this process watches its parent itself now."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET, 0, 0, 0, 0)


def close_in_forks(end: socket.socket | IO[bytes]) -> None:
    """Close ``end`` in forks. Otherwise a DataLoader worker would hide from other processes that this process died."""
    held = weakref.ref(end)

    def close() -> None:
        if (kept := held()) is not None:
            kept.close()

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


def until_signal(server: AbstractContextManager[Any], ready: Callable[[str], None], parent: int | None = None) -> int:
    """Let ``server`` serve until SIGTERM, SIGINT or the parent's end. Return the signal's number, or `PARENT_GONE`.

    This must be called in the main thread. A handler may take no lock, so signals are bytes in a pipe and no event.

    Args:
        ready: Called once the server serves, with its ``address``.
        parent: Descriptor of a file that the parent holds open, and to which it writes nothing more. None: no parent.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def note(number: int, frame: FrameType | None) -> None:
        os.write(write, bytes([number]))

    try:
        with handled({signal.SIGTERM: note, signal.SIGINT: note}), server as serving:
            ready(serving.address)
            readable, _, _ = select.select([read] if parent is None else [read, parent], [], [])
            return os.read(read, 1)[0] if read in readable else PARENT_GONE
    finally:  # a second signal has ended the process at once
        os.close(read)
        os.close(write)
