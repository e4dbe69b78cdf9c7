"""Fixtures for stages at hosts. They load what they need themselves, as tests.support.forks begins without ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.elsewhere import Hosts
    from tests.hosts.host_threads import HostThread


@pytest.fixture
def host_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostThread]]:
    """Hosts that are threads of this process, at any address, and the list of all such threads.

    Torch's faster operators for CPUs are off throughout. ``torch.export`` switches them off in the whole process while
    it makes a graph, and threads here may compute meanwhile. Hosts in processes of their own are not concerned.
    """
    import torch

    from tests.hosts.host_threads import HostThread

    made: list[HostThread] = []
    monkeypatch.setattr(HostThread, "made", made)
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.HostConnection", lambda *_: HostThread())
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        yield made
    for host in made:
        host.thread.join(60)  # a fit that fails while it is set up waits for none
    assert not any(host.thread.is_alive() for host in made)


@pytest.fixture(scope="session")
def hetpipe_host() -> Iterator[Hosts]:
    from tests.hosts.elsewhere import serving

    with serving({}) as found:
        yield found


@pytest.fixture
def hosts(hetpipe_host: Hosts) -> Iterator[Hosts]:
    """A hetpipe-host, none of whose hosts a test leaves behind."""
    from tests.server.transports import eventually

    yield hetpipe_host
    eventually(lambda: not hetpipe_host.children(), "a host has not ended")
