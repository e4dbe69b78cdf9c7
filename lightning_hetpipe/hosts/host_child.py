"""Program of a host's process: lets in whoever has connected, before it imports what a stage needs.

So a stranger costs a bare interpreter for a moment, and not the memory and the seconds of torch.
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
"""Program of a host, whose arguments are a name and descriptors, and whose input says what it has to know."""

LONGEST_REASON = 1000
"""Bytes of the reason for which somebody was not let in."""


def child(security: dict[str, Any], descriptor: int, reasons: int) -> None:
    """Be a host, at the socket ``descriptor``.

    Args:
        security: By which callers have to show who they are.
        reasons: A pipe; gets why the caller was not let in, and is closed when that is known.
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
    """Have SIGTERM end this process only where it says that the process ``parent`` has ended.

    Who tells all processes of a run to end, as SLURM does, reaches hosts, too, whose weights are still to be saved.
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
    """The connection, if whoever is at its other end is let in."""
    from lightning_hetpipe.hosts.secured_socket import INTRODUCING, RELEASE, Refused, admit
    from lightning_hetpipe.server.transport.security import Security

    try:
        return admit(raw, Security(**given), RELEASE, INTRODUCING)
    except (Refused, OSError) as refused:
        with suppress(OSError):  # hetpipe-host ends
            os.write(reasons, str(refused).encode(errors="replace")[:LONGEST_REASON])
        return None
    finally:
        os.close(reasons)
