"""Parent watch: the link between the launcher and a child, by which the child ends when its launcher does.

Launcher and child hold the two ends of a socket pair. When one of them ends, however it does, the other reads the end.
Until then each sends few messages, a line of JSON each:

    launcher  {"NAME": "value", ...}              variables beside the environment, once, when all of them are known
    launcher  {}                                  its own program is over
    child     {"arrived": true}                   it has come as far as `Launcher.launch`
    child     {"error": "...", "text": "..."}     an exception ends it; and, once more, with the text to print of it;
                                                  "lost", if it ends this one alone, says what has become of it
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
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from lightning_hetpipe.errors import VirtualWorkerLost
from lightning_hetpipe.server.process.signals import close_in_forks, forget

VARIABLE = "HETPIPE_VIRTUAL_WORKER"
"""A child's environment variable: 1/2@7 is virtual worker 1 of the node's 2, its end of the pair is descriptor 7."""

AGAIN = "HETPIPE_STARTED_AGAIN"
"""A variable for a child whose earlier process has ended in the middle of a run."""

GRACE = 10.0
"""Seconds that a child whose launcher has ended has to clean up."""

LONGEST = 1 << 16
"""Characters of an error that are sent; the launcher may not read them before the child has ended."""

_BUFFER = 1 << 19  # bytes, for all that a child ever says; the default is 8 KiB on macOS


class LaunchedChild:
    """This process, as a child of our launcher.

    Attributes:
        local: The number of this virtual worker among those of its node.
        per_node: Virtual workers of its node.
        variables: From the launcher. A secret is among them, so that they are no part of the environment, which
            programs inherit that this one starts.
        orphaned: The launcher has ended.
        outlasts: The launcher's own program is over.
        given_up: A run in this process has ended with an exception.
    """

    def __init__(self, local: int, per_node: int, link: socket.socket) -> None:
        self.local = local
        self.per_node = per_node
        self.orphaned = False
        self.outlasts = False
        self.given_up = False
        self._link = link
        self.variables: dict[str, str] = {}
        self._has_variables = threading.Event()

    def watch(self) -> None:
        """End this process with the launcher, from now on."""
        threading.Thread(target=self._watch, args=(os.getppid(),), name="hetpipe-parent-watch", daemon=True).start()

    def arrived(self) -> None:
        """Tell the launcher that this process takes part from here on; waits for the launcher's variables."""
        self.given_up = False
        self._say(arrived=True)
        self._has_variables.wait()  # where the launcher ends meanwhile, `_watch` ends this process

    def failed(self, error: BaseException, text: str = "") -> bool:
        """Tell the launcher which error ends this process, and the text to print; False if that was impossible."""
        lost = error.how if isinstance(error, VirtualWorkerLost) else ""
        return self._say(error=named(error), text=text[-LONGEST:], lost=lost[-LONGEST:])

    def leaves(self) -> None:
        """Tell the launcher that this process needs nothing more.

        Collecting garbage among the objects of torch and Lightning takes most of a second still; a launch that has
        failed does not wait for that.
        """
        if self.given_up:
            gc.freeze()
        self._say(leaving=True)

    def _say(self, **what: Any) -> bool:
        try:
            self._link.sendall(json.dumps(what).encode() + b"\n")
        except OSError:  # the launcher is gone, which `_watch` sees as well; or this is a fork
            return False
        return True

    def _watch(self, launcher: int) -> None:
        """Receive the launcher's variables. Once the launcher has ended, end this process: gently first."""
        heard = b""
        with contextlib.suppress(OSError):  # reset, where the launcher ended without having read all
            while part := self._link.recv(4096):
                *lines, heard = (heard + part).split(b"\n")
                for line in lines:
                    if self._has_variables.is_set():
                        self.outlasts = True
                    else:
                        self.variables = json.loads(line)
                        self._has_variables.set()
        self.orphaned = True
        with contextlib.suppress(OSError):  # whoever read stderr may be gone too
            text = f"hetpipe: process {os.getpid()} ends, as its launcher (process {launcher}) has ended."
            print(text, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)


def pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair: the launcher's end and a child's."""
    ours, childs = socket.socketpair()
    for end in (ours, childs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    close_in_forks(ours)
    return ours, childs


def describe(local: int, per_node: int, end: socket.socket) -> dict[str, str]:
    """The environment variable for a child that inherits ``end``."""
    return {VARIABLE: f"{local}/{per_node}@{end.fileno()}"}


def named(error: BaseException) -> str:
    """The text by which the same error is recognised in several processes."""
    return f"{type(error).__name__}: {error}"[:LONGEST]


@functools.cache
def this_child() -> LaunchedChild | None:
    """This process, if our launcher started it; from the first call on it ends with the launcher.

    The strategy's constructor and our commands call it, and no import does: until then the signal of `guarded` ends the
    process. The variable is removed from the environment, because programs that this one starts inherit that. A program
    that was started before inherits the variable, and not the link.
    """
    description = os.environ.pop(VARIABLE, None)
    if description is None:
        return None
    place, _, descriptor = description.partition("@")
    local, _, per_node = place.partition("/")
    try:
        end = socket.socket(fileno=int(descriptor))
    except OSError:
        return None
    end.set_inheritable(False)
    close_in_forks(end)
    child = LaunchedChild(int(local), int(per_node), end)
    child.watch()
    forget()
    atexit.register(child.leaves)  # as one of the first, and so run as one of the last
    sys.excepthook = functools.partial(_uncaught, child, sys.excepthook)
    return child


def launcher_variables() -> Mapping[str, str]:
    """The launcher's variables; empty where our launcher has not started this process, or has not sent them yet."""
    child = this_child()
    return {} if child is None else child.variables


def _uncaught(
    child: LaunchedChild, before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Leave an error to the launcher, which prints that of all virtual workers once; print no interrupt."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if not child.failed(error, "".join(traceback.format_exception(kind, error, trace))):
        before(kind, error, trace)
