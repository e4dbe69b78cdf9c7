"""Stages at hosts take as long as the devices that they emulate."""

from __future__ import annotations

import pytest

from lightning_hetpipe import Cluster, Node
from lightning_hetpipe.emulation import Pad, padded
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.host_threads import HostThread
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("owned", [False, True])
def test_hosts_pad_passes_and_tell_of_them(
    owned: bool, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: owned)
    _, loader, layers = CASES["views"]
    strategy = even(layers, 2, 2, stage_hosts="processes")
    with padded(strategy, [Pad(0.01, 0.01)] * 2) as emulation:
        found = fit(made("views"), loader, strategy=strategy)
    assert_equal(expect(made("views"), loader, 2), found)
    there, here = emulation.stages
    assert there.passes == here.passes > 0
    assert there.computed > 0


def test_devices_of_a_cluster_are_emulated_in_processes(host_threads: list[HostThread]) -> None:
    cluster = Cluster([Node("box", ["RTX-3090", "T4"])])
    strategy = stashing(cluster=cluster, stages=2, in_flight=2, stage_hosts="processes")
    quiet_trainer(strategy).fit(made("views"), CASES["views"][1])
    assert strategy.last_run.emulated
    assert len(host_threads) == 1
    assert strategy._emulation.stages[0].passes
