"""Stages at hosts take as long as the devices that they emulate."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetpipe import Cluster, Node
from lightning_hetpipe.emulation import Pad
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.elsewhere import NEAR, elsewhere
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import plan, task
from tests.support.models import vectors
from tests.support.padding import padded
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


def test_hosts_pad_passes_and_tell_of_them(host_threads: list[HostThread]) -> None:
    _, loader, layers = CASES["views"]
    strategy = elsewhere(layers, 2, 2)
    with padded(strategy, [Pad(0.01, 0.01)] * 2) as emulation:
        found = fit(made("views"), loader, strategy=strategy)
    assert_equal(expect(made("views"), loader, 2), found)
    there, here = emulation.stages
    assert there.passes == here.passes > 0
    assert host_threads


def test_devices_of_a_cluster_are_emulated_at_hosts(host_threads: list[HostThread]) -> None:
    cluster = Cluster([Node("attic", ["RTX-3090"]), Node("desk", ["T4", "T4", "T4"])], "1 Gbit/s")
    made = plan("attic", "desk", "desk", device="RTX-3090")
    (worker,) = made.virtual_workers
    first, *others = worker.stages
    stages = first, *(replace(each, device=each.device.replace("cpu", "T4")) for each in others)
    made = replace(made, virtual_workers=(replace(worker, stages=stages),))
    strategy = stashing(plan=made, cluster=cluster, stage_hosts={"attic": NEAR})
    quiet_trainer(strategy).fit(task(), vectors(12, 4))
    assert strategy.last_run.emulated
    assert len(host_threads) == 1
    assert strategy._devices.emulation.stages[0].passes
