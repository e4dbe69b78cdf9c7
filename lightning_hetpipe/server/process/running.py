"""Main loop of a server process, until SIGTERM, SIGINT, or the end of the process that started it."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from lightning_hetpipe.server.process.signals import Signals, exit_now
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import Handler
from lightning_hetpipe.server.transport.security import Security

PARENT_GONE = 0
"""Result of `serve` if no signal but the parent's end ended it."""

_HELD = 5.0  # seconds that calls may take to leave the handler once it is closed

_LOG = logging.getLogger(__name__)


def serve(
    handler: Handler, address: str, security: Security, ready: Callable[[str], None], parent: int | None = None
) -> int:
    """Serve until a signal or the parent's end, in the main thread. Return the signal's number, or `PARENT_GONE`.

    Args:
        handler: If it has a method ``close``, this is called at the end to wake calls that wait in ``serve``.
        ready: Called once the server serves, with its address, which has the actual port.
        parent: Descriptor of a file that the parent holds open. The server ends at the file's end. None: no parent.

    Raises:
        SettingError: if the address or the certificates cannot be used.
    """
    with Signals() as signals:
        server = GrpcServer(handler, address, security)
        try:
            with server:
                ready(server.address)
                return _wait(signals, parent)
        finally:
            getattr(handler, "close", lambda: None)()


def _wait(signals: Signals, parent: int | None) -> int:
    """Return the first signal's number, or `PARENT_GONE`."""
    watched = [signals.fileno()] if parent is None else [signals.fileno(), parent]
    readable, _, _ = select.select(watched, [], [])  # the parent writes nothing more
    return signals.read() if signals.fileno() in readable else PARENT_GONE


def end(code: int) -> NoReturn:
    """End the process, even if a handler still waits, without finalising the interpreter. With torch, that would delay
    the end of a launch by most of a second."""
    deadline = time.monotonic() + _HELD
    ours = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not ours and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _LOG.warning("hetpipe server: %s did not end in %g s; ending without it", thread.name, _HELD)
                break
    exit_now(code)
