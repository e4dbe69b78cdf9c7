"""Parent watch: link between the launcher and a child, by which the child ends when its launcher ends.

Launcher and child hold the two ends of a socket pair. When one process ends in any way, the other reads the end of the
stream. Until then each sends few messages, a line of JSON each:

    launcher  {"NAME": "value", ...}              variables beside the environment, once, when all of them are known
    launcher  {}                                  its own program is over
    child     {"arrived": true}                   it has reached `Launcher.launch`
    child     {"error": "...", "text": "..."}     an exception ends it; sent again with the text to print. "lost" says
                                                  how it was lost, if the exception ends no other process
    child     {"leaving": true}                   its program is over, and only its interpreter has to shut down
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
"""Environment variable of a child. 1/2@7 means virtual worker 1 of the node's 2, with descriptor 7 for its end of the
pair."""

AGAIN = "HETPIPE_STARTED_AGAIN"
"""Variable for a child whose earlier process has ended in the middle of a run."""

GRACE = 10.0
"""Seconds until a child that has to end gets the next stronger signal."""

LONGEST = 1 << 16
"""Largest number of characters of an error. The launcher may not read them before the child has ended."""

_BUFFER = 1 << 19  # bytes, for all that a child ever says; the default is 8 KiB on macOS


class LaunchedChild:
    """This process as a child of our launcher, virtual worker ``local`` of ``per_node`` on its node.

    Attributes:
        variables: Variables from the launcher. They include a secret, so they are not in the environment, which
            programs inherit that this process starts.
        orphaned: True once the launcher has ended.
        outlasts: True once the launcher's own program is over.
        given_up: True once a run in this process has ended with an exception.
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
        """Make this process end with the launcher from now on."""
        threading.Thread(target=self._watch, args=(os.getppid(),), name="hetpipe-parent-watch", daemon=True).start()

    def arrived(self) -> None:
        """Report to the launcher that this process has reached the launch, and wait for the launcher's variables."""
        self.given_up = False
        self._say(arrived=True)
        self._has_variables.wait()  # if the launcher ends meanwhile, `_watch` ends this process

    def failed(self, error: BaseException, text: str = "") -> bool:
        """Send the launcher the error that ends this process, and the text to print. Return False if that was
        impossible."""
        lost = error.how if isinstance(error, VirtualWorkerLost) else ""
        return self._say(error=named(error), text=text[-LONGEST:], lost=lost[-LONGEST:])

    def leaves(self) -> None:
        """Report to the launcher that this process needs nothing more. After a failure, freeze the garbage collector:
        collecting the objects of torch and Lightning takes most of a second."""
        if self.given_up:
            gc.freeze()
        self._say(leaving=True)

    def _say(self, **what: Any) -> bool:
        try:
            self._link.sendall(json.dumps(what).encode() + b"\n")
        except OSError:  # the launcher is gone, as `_watch` notices, or this is a fork
            return False
        return True

    def _watch(self, launcher: int) -> None:
        """Receive the launcher's variables. Once the launcher has ended, end this process, first gently."""
        heard = b""
        with contextlib.suppress(OSError):  # a reset, if the launcher ended before it read all
            while part := self._link.recv(4096):
                *lines, heard = (heard + part).split(b"\n")
                for line in lines:
                    if self._has_variables.is_set():
                        self.outlasts = True
                    else:
                        self.variables = json.loads(line)
                        self._has_variables.set()
        self.orphaned = True
        with contextlib.suppress(OSError):  # the reader of stderr may be gone
            text = f"hetpipe: process {os.getpid()} ends, as its launcher (process {launcher}) has ended."
            print(text, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)


def pair() -> tuple[socket.socket, socket.socket]:
    """Make a socket pair: the launcher's end and a child's end."""
    ours, childs = socket.socketpair()
    for end in (ours, childs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    close_in_forks(ours)
    return ours, childs


def named(error: BaseException) -> str:
    """Return a text by which several processes recognise the same error."""
    return f"{type(error).__name__}: {error}"[:LONGEST]


@functools.cache
def this_child() -> LaunchedChild | None:
    """Return this process as a child, if our launcher started it. From the first call on it ends with the launcher.

    The strategy's constructor and our commands call it, but no import does: until then the signal of `guarded` ends the
    process. The variable is removed from the environment, because programs that this process starts inherit that. A
    program that was started before has the variable, but not the link.
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
    atexit.register(child.leaves)  # registered early, so it runs late
    sys.excepthook = functools.partial(_uncaught, child, sys.excepthook)
    return child


def launcher_variables() -> Mapping[str, str]:
    """Return the launcher's variables, or none if our launcher did not start this process or has not sent them yet."""
    child = this_child()
    return {} if child is None else child.variables


def _uncaught(
    child: LaunchedChild, before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Leave an error to the launcher, which prints equal errors of virtual workers once. Print no interrupt."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if not child.failed(error, "".join(traceback.format_exception(kind, error, trace))):
        before(kind, error, trace)
