"""Ends of a server process."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lightning_hetpipe.server.process.server_process import serve
from lightning_hetpipe.server.process.signals import PARENT_GONE
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import Desk


class Closed(Desk):
    """Says that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_closes_the_handler(number: signal.Signals) -> None:
    desk, before = Closed(), signal.getsignal(number)
    assert serve(desk, "127.0.0.1:0", Security(), lambda address: os.kill(os.getpid(), number)) == number
    assert desk.closed
    assert signal.getsignal(number) is before


def test_a_parent_that_lets_go_ends_it() -> None:
    read, write = os.pipe()
    closing = threading.Thread(target=os.close, args=(write,))
    try:
        assert serve(Desk(), "127.0.0.1:0", Security(), lambda address: closing.start(), read) == PARENT_GONE
    finally:
        closing.join()
        os.close(read)
