"""Short measuring: where stages are cut by measured times, it does not matter here where."""

from __future__ import annotations

from functools import partial

import pytest


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run all that they run when they are measured, in one round of five."""
    from lightning_hetpipe.capture import profiling  # here, as tests.support.forks begins without ours

    monkeypatch.setattr(profiling, "layer_times", partial(profiling.layer_times, rounds=1))
