"""Stages on groups of the test accelerator's devices: operands lie together, and every wait is there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_hetpipe.rules.channel_layouts import apportioned
from tests.exact.pipelines import Pinned
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.split.plain_loops import VGGLoops, as_loops
from tests.split.test_fits import colours, image_task, words_task
from tests.support.accelerator import TestAccelerator
from tests.support.models import sentences


@pytest.mark.parametrize("shares", [(3, 1, 2), (0, 1, 1)])
def test_bit_identical_to_plain_loops(accelerator: TestAccelerator, shares: Sequence[float]) -> None:
    task, loader = image_task(), colours(14 if 0 in shares else 16, 4)
    loops = copy.deepcopy(task)
    as_loops(loops.net, VGGLoops, [apportioned(units, shares) for units in (8, 12, 5)])
    strategy = Pinned([0], 3, split={0: shares})
    record = fit(task, loader, strategy=strategy, accelerator=accelerator, devices=3)
    assert_equal(expect(loops, loader, 3), record)


def test_two_groups_of_two(accelerator: TestAccelerator) -> None:
    """A run on four devices has the bits of one on a CPU."""
    places: list[dict[str, Any]] = [{"accelerator": accelerator, "devices": 4}, {}]
    records = [
        fit(words_task(), sentences(16, 4), strategy=Pinned([0, 2], 3, split={0: (1, 1), 1: (1, 3)}), **where)
        for where in places
    ]
    assert_same_run(*records)
