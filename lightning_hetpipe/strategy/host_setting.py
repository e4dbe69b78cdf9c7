"""The setting ``stage_hosts``: hosts of stages on other nodes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.pipeline.recorder import Window
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage
from lightning_hetpipe.strategy.wsp_callback import check_address

StageHosts = Mapping[str, str] | None
"""Address of a host for each of a plan's nodes; None for none."""


def stage_hosts(value: Any, *, compiles: bool, timeline: Window | None) -> StageHosts:
    """Check the setting.

    Raises:
        SettingError: for another value, and for settings that hosts do not know yet.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise SettingError(
            f"stage_hosts={value!r} must map nodes of a plan to addresses of their hosts, as in"
            " {'attic': '10.0.0.2:7071'}; leave stage_hosts out for stages in threads of this process"
        )
    for node, address in value.items():
        check_address(f"stage_hosts[{node!r}]", address)
    if not value:
        raise SettingError("stage_hosts={} names no host; give a host for each node, or leave stage_hosts out")
    for name, is_set in (("compile", compiles), ("timeline", timeline is not None)):
        if is_set:
            raise SettingError(
                f"stage_hosts={value!r} has stages at hosts that know no {name} yet; leave {name} out, or stage_hosts"
            )
    return {str(node): address for node, address in value.items()}


def refuse_spread(hosts: StageHosts) -> None:
    """Refuse hosts for a run without a pipeline."""
    if hosts is not None:
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} is for stages, and one minibatch in flight has none, as the step runs on the"
            " model as it is; plan with more in flight, or leave stage_hosts out"
        )


def check_host_nodes(hosts: StageHosts, plan: Plan) -> None:
    """Refuses ``hosts`` for nodes that ``plan`` does not have."""
    known = [*plan.workers_on_nodes]
    for node in [each for each in hosts or () if each not in known]:
        raise SettingError(
            f"stage_hosts={dict(hosts or {})!r} names {node!r}, which is no node of the plan for {plan.model}, whose"
            f" nodes are {' and '.join(map(repr, known))}{nearest(node, known)}"
        )


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
        number: [(each.device_number or 0, each.device_name) for each in (stage, *stage.group)]
        for number, stage in _elsewhere(plan).items()
        if stage.device_name != "cpu" and stage.device_number is not None
    }


def _elsewhere(plan: Plan) -> dict[int, PlannedStage]:
    """Stages on another node than the last stage, by number, of a plan of one virtual worker."""
    (worker,) = plan.virtual_workers
    return {number: stage for number, stage in enumerate(worker.stages) if stage.node != worker.leader}
