"""Stages of a plan on nodes other than the last stage's: their hosts, addresses and accelerators."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.run.run_settings import StageElsewhere

StageHosts = Mapping[str, str] | None
"""Address of a host by name of a plan's node, or None without hosts."""


def serving_nodes(plan: Plan | None, emulated: bool, hosts: StageHosts) -> ServingNodes | None:
    """Return the nodes of ``plan``, if the program is to start hosts for stages led from other nodes, else None."""
    if plan is None or emulated or hosts is not None:
        return None
    served = {node: plan.served(node) for node in plan.workers_on_nodes}
    stages = {
        node: ", ".join(f"stage {stage} of virtual worker {worker}" for worker, stage in its)
        for node, its in served.items()
        if its
    }
    return ServingNodes((*served,), stages, plan.fingerprint) if stages else None


def stages_elsewhere(plan: Plan | None, hosts: StageHosts, emulated: bool) -> dict[int, StageElsewhere]:
    """Return, by number, the stages of one virtual worker that are not on the node of its last stage.

    If devices are ``emulated``, stages of nodes without a host stay in this process, and hosts use their CPUs. Raise
    SettingError if there are hosts, but no plan.
    """
    if hosts is None:
        return {}
    if plan is None:
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} names hosts for the nodes of a plan, and there is none; give plan, too"
        )
    found, (worker,) = dict[int, StageElsewhere](), plan.virtual_workers
    for number, stage in enumerate(worker.stages):
        if stage.node != worker.leader and (not emulated or stage.node in hosts):
            devices = [] if emulated or stage.device_name == "cpu" else [stage, *stage.group]
            accelerators = [(each.device_number, each.device_name) for each in devices]
            found[number] = StageElsewhere(hosts[stage.node], stage.node, accelerators)
    return found
