"""Fixtures for tests of plans on the test accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from lightning_hetpipe.placement.planner import Planner
    from lightning_hetpipe.planning.model.estimate import Estimate


@pytest.fixture
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Profiles of this test alone, measured with one thread, which stages share."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "profiles"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Estimate]:
    """The plans that were decided on, in order."""
    from lightning_hetpipe.placement.planner import Planner  # here, as tests.support.forks begins without ours

    found: list[Estimate] = []
    decide = Planner._estimated

    def noting(planner: Planner, estimate: Estimate, *args: Any) -> Any:
        found.append(estimate)
        return decide(planner, estimate, *args)

    monkeypatch.setattr(Planner, "_estimated", noting)
    return found
