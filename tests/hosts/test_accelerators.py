"""Stages whose hosts compute on accelerators: the same bits as in threads on these, and one clear error for a fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.host_threads import HostThread
from tests.support.accelerator import TestAccelerator
from tests.support.marks import slow_except

NAMES = ["resnet", "gpt", "dropout", "translator", "pieces"]
GRID = [(name, in_flight) for name in NAMES for in_flight in (2, 4)]


@pytest.mark.parametrize(("name", "in_flight"), slow_except(GRID, ("resnet", 4), ("gpt", 4), ("dropout", 4)))
def test_stages_on_devices_of_this_machine(
    accelerator: TestAccelerator, host_threads: list[HostThread], name: str, in_flight: int
) -> None:
    """Among them buffers, dropout, tied weights and several pieces."""
    _, loader, layers = CASES[name]
    strategy = even(layers, 4, in_flight, stage_hosts="processes")
    record = fit(made(name), loader, strategy=strategy, accelerator=accelerator, devices=4)
    assert_equal(expect(made(name), loader, in_flight), record)
    assert host_threads
