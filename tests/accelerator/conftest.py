"""A fixture for tests of plans on the test accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Profiles of this test alone, measured with one thread, which stages share."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "profiles"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
