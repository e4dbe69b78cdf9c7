"""Divided stages at hosts have the bits of divided stages in threads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact.pipelines import Pinned
from tests.exact.running import assert_same_run, fit
from tests.hosts.host_threads import HostThread
from tests.split.test_fits import TASKS, colours, image_task, words_task
from tests.support.accelerator import TestAccelerator
from tests.support.models import sentences

SPLIT = {0: (2, 1), 1: (1, 1, 2)}


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_as_in_threads(name: str, owned: bool, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are shared with hosts, or theirs; a version's parts are made anew where it has others."""
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: owned)
    make, load = TASKS[name]
    records = [
        fit(make(), load(), strategy=Pinned([0, 2], 3, split=SPLIT, **where))
        for where in ({}, {"stage_hosts": "processes"})
    ]
    assert len(host_threads) == 1
    assert_same_run(*records)


def test_in_a_process() -> None:
    settings: Any = {"split": SPLIT, "recompute": True}
    records = [
        fit(image_task(), colours(14, 4), strategy=Pinned([0, 2], 3, **settings, **where))
        for where in ({}, {"stage_hosts": "processes"})
    ]
    assert_same_run(*records)


def test_on_accelerators(accelerator: TestAccelerator, host_threads: list[HostThread]) -> None:
    """The members of a host's group are on devices of their own."""
    records = [
        fit(
            words_task(),
            sentences(14, 4),
            strategy=Pinned([0, 2], 3, split={0: (1, 1), 1: (1, 3)}, **where),
            accelerator=accelerator,
            devices=4,
        )
        for where in ({}, {"stage_hosts": "processes"})
    ]
    assert len(host_threads) == 1
    assert_same_run(*records)
