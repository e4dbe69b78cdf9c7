"""Problems of the planner's tests have bytes of which one can keep track."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_hetpipe.planning.model import cluster


@pytest.fixture(scope="module", autouse=True)
def few_bytes() -> Iterator[None]:
    """Devices may have as little memory as a test says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "LEAST_MEMORY", 1)
        yield
