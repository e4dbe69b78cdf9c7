"""Stages whose hosts compute on accelerators: the same bits as in threads on these, and one clear error for a fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import Hosts, plan, refused, serving, task
from tests.support.accelerator import TestAccelerator, missing
from tests.support.marks import slow_except
from tests.support.models import vectors
from tests.support.strategies import stashing

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


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """hetpipe-host on a machine with accelerators, beside this one, which has none."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with serving({}, "tests.hosts.accelerated_host", str(1 << 30)) as found:
        assert found.process.stdout is not None
        told = found.process.stdout.readline()
        assert told.startswith("hetpipe-host: besides its CPU, this machine has testacc:0 (test accelerator, 1.0 GiB), ")
        yield found


def planned(*nodes: str) -> Any:
    return plan(*nodes, device="test accelerator")


def test_devices_of_another_machine_have_the_oracles_bits(hosts: Hosts) -> None:
    strategy = stashing(plan=planned("attic", "cellar", "desk"), stage_hosts=dict.fromkeys(("attic", "cellar"), hosts.address))
    assert_equal(expect(task(), vectors(40, 4), 3), fit(task(), vectors(40, 4), strategy=strategy))


def test_a_device_that_a_host_lacks(hosts: Hosts) -> None:
    other = plan("attic", "desk", "desk", device="RTX-3090")
    text = refused(stashing(plan=other, stage_hosts={"attic": hosts.address}))
    assert f"host {hosts.address} has no RTX-3090:0: it has testacc:0 (test accelerator, 1.0 GiB), testacc:1" in text
