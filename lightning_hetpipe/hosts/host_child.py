"""Program of a host's process: it lets the caller in before it imports what a stage needs.

So an unknown caller costs a bare interpreter for a moment, but not the memory and the seconds of torch.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Any

# The search path comes from the parent, as with multiprocessing, so that the child finds what the parent finds.
CHILD = """
import json, sys
told = json.load(sys.stdin)
sys.path[:] = told["path"]
from lightning_hetpipe.hosts.host_child import child
child(told["security"], *map(int, sys.argv[2:]))
"""
"""Program of a host. Its arguments are a name and descriptors. Its input has the search path and the security."""

LONGEST_REASON = 1000
"""Largest bytes of the reason for a refusal."""


def child(security: dict[str, Any], descriptor: int, reasons: int) -> None:
    """Run a host at the socket ``descriptor``, to callers that ``security`` admits.

    ``reasons`` is a pipe for the reason of a refusal. It is closed when the decision is known.
    """
    _end_with(os.getppid())
    raw = socket.socket(fileno=descriptor)
    try:
        connection = _admitted(raw, security, reasons)
        if connection is not None and not _served(raw, connection, security):
            os._exit(1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever a stage's thread computes, nobody waits for it


def _end_with(parent: int) -> None:
    """Make SIGTERM end this process only if the process ``parent`` has ended.

    Launchers that signal all processes of a run, such as SLURM, also reach hosts, whose weights must still be saved.
    """

    def told(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, told)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _served(raw: socket.socket, connection: Any, given: dict[str, Any]) -> bool:
    from lightning_hetpipe.hosts.stage_host import Host
    from lightning_hetpipe.hosts.wire import Wire
    from lightning_hetpipe.server.transport.security import Security

    return Host(Wire(connection), Security(**given), raw.getsockname()[0]).run()


def _admitted(raw: socket.socket, given: dict[str, Any], reasons: int) -> Any:
    """Return the connection, if the caller is let in, or None."""
    from lightning_hetpipe.hosts.secured_socket import INTRODUCING, Refused, admit
    from lightning_hetpipe.server.transport.security import Security

    try:
        return admit(raw, Security(**given), INTRODUCING)[0]
    except (Refused, OSError) as refused:
        with suppress(OSError):  # hetpipe-host ends
            os.write(reasons, str(refused).encode(errors="replace")[:LONGEST_REASON])
        return None
    finally:
        os.close(reasons)
