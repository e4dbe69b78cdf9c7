"""Problems of the planner's tests have bytes of which one can keep track."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_bytes() -> Iterator[None]:
    """Devices may have as little memory as a test says."""
    from lightning_hetpipe.planning.model import cluster  # here, as tests.support.forks begins without ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "LEAST_MEMORY", 1)
        yield
