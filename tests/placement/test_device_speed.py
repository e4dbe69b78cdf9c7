"""Speed of a device that no data sheet tells: a figure for the CPU, without a random number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_hetpipe.placement import measuring
from lightning_hetpipe.placement.measuring import measured_speed
from lightning_hetpipe.planning.model.catalogue import INTENSITY, speed_by


def test_the_speed_follows_from_a_product_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of each are the fastest run's, on a clock of the test's."""
    monkeypatch.setattr(measuring, "SIZE", 100)
    monkeypatch.setattr(measuring, "BYTES", 1000)
    product, copy = ([9.0, 2.0, 0.5, 2.0, 2.0, 2.0], [0.0, 4.0, 2.0, 2.0, 2.0, 2.0])  # the first ones warm up
    times = iter([moment for seconds in [*product, *copy] for moment in (0.0, seconds)])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("lightning_hetpipe.placement.measuring.time", clock)
    assert measured_speed(torch.device("cpu")) == speed_by(2e6 / 0.5, 2000 / 2.0)
    assert speed_by(4e6, 1e3) == 1 / (1 / 4e6 + 1 / (INTENSITY * 1e3))


def test_random_states_stay() -> None:
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):  # as a watched step may be
        assert measured_speed(torch.device("cpu")) > 1e6
    assert torch.equal(torch.get_rng_state(), before)
