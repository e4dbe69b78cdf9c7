"""Stages of a plan on other nodes than the last stage: their hosts, addresses and accelerators."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage

StageHosts = Mapping[str, str] | None
"""Address of a host for each of a plan's nodes; None for none."""


def serving_nodes(plan: Plan | None, emulated: bool, hosts: StageHosts) -> ServingNodes | None:
    """The nodes of ``plan``, if the program runs on nodes that serve stages of virtual workers which others lead."""
    if plan is None or emulated or hosts is not None:
        return None
    served = {node: plan.served(node) for node in plan.workers_on_nodes}
    stages = {
        node: ", ".join(f"stage {stage} of virtual worker {worker}" for worker, stage in its)
        for node, its in served.items()
        if its
    }
    return ServingNodes((*served,), stages, plan.fingerprint) if stages else None


def stages_elsewhere(plan: Plan | None, hosts: StageHosts, emulated: bool) -> dict[int, str]:
    """Addresses of the hosts of stages that are not on the node of the last stage, of a plan of one virtual worker.

    Where their devices are ``emulated``, stages of nodes without a host are in this process.

    Raises:
        SettingError: for hosts that are of no use.
    """
    if hosts is None:
        return {}
    if plan is None:
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} names hosts for the nodes of a plan, and there is none; give plan, too"
        )
    found = {number: stage for number, stage in _elsewhere(plan).items() if not emulated or stage.node in hosts}
    return {number: hosts[stage.node] for number, stage in found.items()}


def nodes_elsewhere(plan: Plan | None) -> dict[int, str]:
    """Node of each stage that is on another one than the last stage, of a plan of one virtual worker."""
    return {} if plan is None else {number: stage.node for number, stage in _elsewhere(plan).items()}


def accelerators_elsewhere(plan: Plan | None, emulated: bool) -> dict[int, list[tuple[int, str]]]:
    """Number and name of the accelerator of each stage that is on one of another node than the last stage's, and then
    of each member of its group, of a plan of one virtual worker; where devices are ``emulated``, hosts have CPUs."""
    if plan is None or emulated:
        return {}
    return {
        number: [(each.device_number, each.device_name) for each in (stage, *stage.group)]
        for number, stage in _elsewhere(plan).items()
        if stage.device_name != "cpu"
    }


def _elsewhere(plan: Plan) -> dict[int, PlannedStage]:
    """Stages on another node than the last stage, by number, of a plan of one virtual worker."""
    (worker,) = plan.virtual_workers
    return {number: stage for number, stage in enumerate(worker.stages) if stage.node != worker.leader}
