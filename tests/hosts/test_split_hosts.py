"""Divided stages at hosts have the bits of divided stages in threads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact.pipelines import Pinned
from tests.exact.running import assert_same_run, fit
from tests.hosts.elsewhere import NEAR, Hosts, away
from tests.hosts.host_threads import HostThread
from tests.split.test_fits import TASKS, colours, image_task


def check_same(task: Any, load: Any, address: str, **settings: Any) -> None:
    """A fit with the first stage at ``address`` is one without hosts."""
    here, there = (Pinned([0, 2], 3, split={0: (2, 1), 1: (1, 1, 2)}, **settings) for _ in range(2))
    records = [fit(task(), load(16, 4), strategy=each) for each in (here, away(there, address))]
    assert_same_run(*records)


@pytest.mark.parametrize("name", TASKS)
def test_as_in_threads(name: str, host_threads: list[HostThread]) -> None:
    """A version's parts are made anew where it has others."""
    check_same(*TASKS[name], NEAR)
    assert len(host_threads) == 1


def test_in_a_process(hosts: Hosts) -> None:
    check_same(image_task, colours, hosts.address, recompute=True)
