"""What ties the processes of one launch together: a child knows who it is, what went wrong in it is heard of, and it
ends when its launcher does.

Launcher and child hold the two ends of a socket pair. When one of them ends, however it does, the other reads the end.
Until then they say little to each other, each as a line of JSON:

    launcher  {"NAME": "value", ...}              what it needs to know beside its environment, once, when all is known
    child     {"arrived": true}                   it has come as far as `Launcher.launch`
    child     {"error": "...", "said": "..."}     an exception ends it; and, once more, with what it would have printed
    child     {"leaving": true}                   its program is over, only its interpreter is still to be taken down
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from lightning_hetpipe.server.process import parent_death

VARIABLE = "HETPIPE_VIRTUAL_WORKER"
"""Tells a child who it is: 1/2@7 is virtual worker 1 of the node's 2, its end of the pair in descriptor 7."""

GRACE = 10.0
"""Seconds that a child whose launcher has ended has to clean up."""

LONGEST = 1 << 16
"""Characters of an error that are passed on. The launcher may not read before the child has ended."""

_BUFFER = 1 << 19  # bytes, for all that a child ever says; the default is 8 KiB on macOS


class Started:
    """What our launcher told this process, which it started.

    Attributes:
        local: This virtual worker among those of its node.
        per_node: Their number.
        told: What `Children.give` was given. A secret is in it, so that it is no part of the environment, which the
            programs inherit that this one starts.
        orphaned: The launcher has ended.
        given_up: What the launcher had this process run has ended with an exception.
    """

    def __init__(self, local: int, per_node: int, lifeline: socket.socket) -> None:
        self.local = local
        self.per_node = per_node
        self.orphaned = False
        self.given_up = False
        self._lifeline = lifeline
        self.told: dict[str, str] = {}
        self._is_told = threading.Event()

    def watch(self) -> None:
        """From now on this process ends with the launcher."""
        threading.Thread(target=self._watch, args=(os.getppid(),), name="hetpipe-lifeline", daemon=True).start()

    def arrived(self) -> None:
        """Tells the launcher that this process takes part from here on; waits until it is told what it needs."""
        self.given_up = False
        self._say(arrived=True)
        self._is_told.wait()  # where the launcher ends meanwhile, `_watch` ends this process

    def failed(self, error: BaseException, said: str = "") -> bool:
        """Tells the launcher what ends this process, and what a person should read of it; whether that was possible."""
        return self._say(error=named(error), said=said[-LONGEST:])

    def leaves(self) -> None:
        """Tells the launcher that this process needs nothing more, and only takes a moment still.

        That is most of a second of collecting garbage among the objects of torch and Lightning, for which a launch that
        has failed does not wait.
        """
        if self.given_up:
            gc.freeze()
        self._say(leaving=True)

    def _say(self, **what: Any) -> bool:
        try:
            self._lifeline.sendall(json.dumps(what).encode() + b"\n")
        except OSError:  # the launcher is gone, which `_watch` sees as well; or this is a fork
            return False
        return True

    def _watch(self, launcher: int) -> None:
        """Takes what the launcher sends. Once it has ended, ends this process: gently first."""
        heard = b""
        with contextlib.suppress(OSError):  # reset, where the launcher ended without having read all
            while part := self._lifeline.recv(4096):
                heard += part
                if heard.endswith(b"\n") and not self._is_told.is_set():
                    self.told = json.loads(heard)
                    self._is_told.set()
        self.orphaned = True
        with contextlib.suppress(OSError):  # whoever read stderr may be gone too
            said = f"hetpipe: process {os.getpid()} ends, as its launcher (process {launcher}) has ended."
            print(said, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)


def pair() -> tuple[socket.socket, socket.socket]:
    """The launcher's end and a child's."""
    ours, childs = socket.socketpair()
    for end in (ours, childs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    _close_in_forks(ours)
    return ours, childs


def describe(local: int, per_node: int, end: socket.socket) -> dict[str, str]:
    """The environment variable for a child that inherits ``end``."""
    return {VARIABLE: f"{local}/{per_node}@{end.fileno()}"}


def named(error: BaseException) -> str:
    """By which the same error is known in several processes."""
    return f"{type(error).__name__}: {error}"[:LONGEST]


@functools.cache
def started() -> Started | None:
    """Who this process is, if our launcher started it; from then on it ends with the launcher.

    The package's import calls it first, as what a program does before it makes a Trainer may fail, too. The variable is
    taken out of the environment, lest a program that this one starts believes the same of itself.
    """
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return None
    place, _, descriptor = told.partition("@")
    local, _, per_node = place.partition("/")
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    _close_in_forks(end)
    child = Started(int(local), int(per_node), end)
    child.watch()
    parent_death.forget()
    atexit.register(child.leaves)  # as one of the first, and so run as one of the last
    sys.excepthook = functools.partial(_uncaught, child, sys.excepthook)
    return child


def told() -> Mapping[str, str]:
    """What our launcher has told this process, if that has started it and has come so far."""
    child = started()
    return {} if child is None else child.told


def _uncaught(
    child: Started, before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What all virtual workers run into is printed once, by the launcher. That this one was told to end is no news."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if not child.failed(error, "".join(traceback.format_exception(kind, error, trace))):
        before(kind, error, trace)


def _close_in_forks(end: socket.socket) -> None:
    """Close ``end`` in forks, lest a DataLoader worker keeps the other side from seeing that this process died."""
    held = weakref.ref(end)

    def close() -> None:
        if (kept := held()) is not None:
            kept.close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)
