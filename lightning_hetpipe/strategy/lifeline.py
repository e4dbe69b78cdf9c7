"""What ties the processes of one launch together: a child knows who it is, and ends when its launcher does.

Launcher and child hold the two ends of a socket pair. Neither sends anything but one byte, with which the child says
that it has come as far as `Launcher.launch`; but when one of them ends, however it does, the other reads the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import weakref
from dataclasses import dataclass

VARIABLE = "HETPIPE_VIRTUAL_WORKER"
"""Tells a child who it is: 1/2@7 is virtual worker 1 of the node's 2, its end of the pair in descriptor 7."""

GRACE = 10.0
"""Seconds that a child whose launcher has ended has to clean up."""

_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass(frozen=True)
class Started:
    """What our launcher told this process, which it started."""

    local: int
    per_node: int
    lifeline: socket.socket

    def arrived(self) -> None:
        """Tells the launcher that this process takes part from here on."""
        with contextlib.suppress(OSError):  # it is gone, which `_watch` sees as well
            self.lifeline.send(b".")


def pair() -> tuple[socket.socket, socket.socket]:
    """The launcher's end and a child's."""
    ours, childs = socket.socketpair()
    _ends.add(ours)
    return ours, childs


def describe(local: int, per_node: int, end: socket.socket) -> dict[str, str]:
    """The environment variable for a child that inherits ``end``."""
    return {VARIABLE: f"{local}/{per_node}@{end.fileno()}"}


@functools.cache
def started() -> Started | None:
    """Who this process is, if our launcher started it; from then on it ends with the launcher.

    The variable is taken out of the environment, lest a program that this one starts believes the same of itself.
    """
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return None
    place, _, descriptor = told.partition("@")
    local, _, per_node = place.partition("/")
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    _ends.add(end)
    threading.Thread(target=_watch, args=(end, os.getppid()), name="hetpipe-lifeline", daemon=True).start()
    return Started(int(local), int(per_node), end)


def _watch(end: socket.socket, launcher: int) -> None:
    """Ends this process once the launcher has ended: as if told to, and by force if that does not help."""
    with contextlib.suppress(OSError):  # reset, where the launcher ended without having read the byte
        end.recv(1)
    with contextlib.suppress(OSError):  # whoever read stderr may be gone too
        print(f"hetpipe: process {os.getpid()} ends, as its launcher (process {launcher}) has ended.", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _close_in_fork() -> None:
    """A DataLoader worker that held an end open would keep the other side from seeing that this process died."""
    for end in list(_ends):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)
