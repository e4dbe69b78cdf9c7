"""Process of a host: started by the process of Lightning's loop, which it never outlives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.process.parent_death import guarded

# The search path comes from the parent, as with multiprocessing, so that the child finds what the parent finds.
CHILD = """
import sys, json
told = json.loads(sys.argv[1])
sys.path[:] = told["path"]
from lightning_hetpipe.hosts.host_process import child
child(told["descriptor"])
"""


class HostProcess:
    """A host in a process of its own, and the wire to it.

    It is in a session of its own, so that Ctrl-C reaches this process alone, which then ends it.
    """

    def __init__(self) -> None:
        own, its = socket.socketpair()
        with its:
            told = {"path": [os.path.abspath(each) for each in sys.path], "descriptor": its.fileno()}
            # Beside the end of the wire, which others may keep open whom this process has forked.
            self._process = subprocess.Popen(
                guarded([sys.executable, "-c", CHILD, json.dumps(told), "hetpipe-host"]),
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self.wire = Wire(own)

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


def child(descriptor: int) -> None:
    """Be a host, at the socket ``descriptor``."""
    from lightning_hetpipe.hosts.stage_host import Host

    wire = Wire(socket.socket(fileno=descriptor))
    try:
        Host(wire).run()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever a stage's thread computes, nobody waits for it
