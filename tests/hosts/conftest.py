"""Fixtures for stages in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.host_threads import HostThread


@pytest.fixture
def host_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostThread]]:
    """Hosts that are threads of this process, and the list of those that were made."""
    made: list[HostThread] = []
    monkeypatch.setattr(HostThread, "made", made)
    monkeypatch.setattr("lightning_hetpipe.hosts.remote_stage.HostProcess", HostThread)
    yield made
    for host in made:
        host.thread.join(60)  # a fit that fails while it is set up waits for none
    assert not any(host.thread.is_alive() for host in made)
