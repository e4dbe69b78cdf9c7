"""Fits with stages on four devices equal the oracle, bit for bit."""

from __future__ import annotations

import pytest

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.support.accelerator import TestAccelerator


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", ["resnet", "gpt", "dropout", "translator", "pieces"])
def test_four_devices(accelerator: TestAccelerator, name: str, in_flight: int) -> None:
    _, loader, layers = CASES[name]
    strategy = even(layers, 4, in_flight)
    record = fit(made(name), loader, strategy=strategy, accelerator=accelerator, devices=4)
    assert_equal(expect(made(name), loader, in_flight), record)
