"""Transfers by which the link to a server is measured: they arrive, are bounded, and leave sessions alone."""

from __future__ import annotations

import json

import pytest

from lightning_hetpipe.server.process.link_probe import LARGEST, link_to
from lightning_hetpipe.server.transport.interface import LINK, STATUS, CallRefused
from tests.server.test_sessions import served


def test_a_link_is_measured_and_no_session_begins() -> None:
    with served() as channel:
        link = link_to(channel, 1 << 20)
        assert link.bandwidth > 0
        assert link.latency > 0
        assert json.loads(channel.call(STATUS, b""))["sessions"] == 0


def test_more_than_the_buffer_is_refused() -> None:
    with served() as channel:
        channel.call(LINK, b"0", [memoryview(bytearray(LARGEST))])
        with pytest.raises(CallRefused, match="are more than a measurement takes"):
            channel.call(LINK, b"0", [memoryview(bytearray(LARGEST + 1))])
        with pytest.raises(CallRefused, match="are more than a measurement takes"):
            channel.call(LINK, b"9" * 30)
        with pytest.raises(CallRefused, match="malformed: b'-1' is no number of bytes"):
            channel.call(LINK, b"-1")
