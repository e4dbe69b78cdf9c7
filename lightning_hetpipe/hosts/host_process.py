"""Process of a host: on this machine, started by the process of Lightning's loop, which it never outlives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any

from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.process.parent_death import guarded

# The search path comes from the parent, as with multiprocessing, so that the child finds what the parent finds.
CHILD = """
import json, sys
told = json.load(sys.stdin)
sys.path[:] = told["path"]
from lightning_hetpipe.hosts.host_process import child
child(int(sys.argv[1]), told["security"])
"""
"""Program of a host, whose argument is a descriptor, and whose input says what it has to know."""


class HostProcess:
    """A host in a process of its own, and the wire to it.

    It is in a session of its own, so that Ctrl-C reaches this process alone, which then ends it.
    """

    def __init__(self) -> None:
        own, its = socket.socketpair()
        with its, ExitStack() as undo:
            undo.callback(own.close)
            told = {"path": [os.path.abspath(each) for each in sys.path], "security": None}
            # Beside the end of the wire, which others may keep open whom this process has forked.
            self._process = subprocess.Popen(
                guarded([sys.executable, "-c", CHILD, str(its.fileno()), "hetpipe-host"]),
                stdin=subprocess.PIPE,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(json.dumps(told).encode())
            undo.pop_all()
        self.wire = Wire(own, shares=True)

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def node(self) -> str:
        """Name of another node of a plan: none."""
        return ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def told(self) -> str:
        """Say how it has ended, as the end of a sentence."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def kill(self) -> None:
        """End it by force, also where it is stopped."""
        self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, which it does once its end of the wire says so; after ``seconds`` by force."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def child(descriptor: int, security: dict[str, Any] | None) -> None:
    """Be a host, at the socket ``descriptor``; with ``security`` for a process that has to show who it is."""
    from lightning_hetpipe.hosts.stage_host import Host
    from lightning_hetpipe.server.transport.security import Security

    _end_with(os.getppid())
    raw = socket.socket(fileno=descriptor)
    try:
        connection = raw if security is None else _admitted(raw, security)
        given = None if security is None else Security(**security)
        host = raw.getsockname()[0] if given else ""
        if connection is not None and not Host(Wire(connection, shares=given is None), given, host).run():
            os._exit(1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever a stage's thread computes, nobody waits for it


def _end_with(parent: int) -> None:
    """Have SIGTERM end this process only where it says that the process ``parent`` has ended.

    Who tells all processes of a run to end, as SLURM does, reaches hosts, too, whose weights are still to be saved.
    """

    def told(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, told)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _admitted(raw: socket.socket, given: dict[str, Any]) -> Any:
    """The connection, if whoever is at its other end is let in."""
    from lightning_hetpipe.hosts.secured_socket import INTRODUCING, Refused, admit
    from lightning_hetpipe.hosts.wire import RELEASE
    from lightning_hetpipe.server.transport.security import Security

    peer = raw.getpeername()[0]
    try:
        return admit(raw, Security(**given), RELEASE, INTRODUCING)
    except (Refused, OSError) as refused:
        print(f"hetpipe-host: a connection from {peer} was refused: {refused}", file=sys.stderr, flush=True)
        return None
