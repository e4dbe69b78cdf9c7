"""The setting ``stage_hosts``: where stages run, in threads, processes or at hosts on other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.pipeline.recorder import Window
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage
from lightning_hetpipe.strategy.wsp_callback import check_address

HOSTS = ("threads", "processes")

StageHosts = Literal["threads", "processes"] | Mapping[str, str]
"""Place of stages; a mapping has the address of a host for each of a plan's nodes."""


def stage_hosts(value: Any, *, compiles: bool, timeline: Window | None) -> StageHosts:
    """Check the setting that says where stages run.

    Raises:
        SettingError: for another value, and for settings that stages in processes do not know yet.
    """
    if isinstance(value, Mapping):
        for node, address in value.items():
            check_address(f"stage_hosts[{node!r}]", address)
        if not value:
            raise SettingError("stage_hosts={} names no host; give 'threads', 'processes', or a host for each node")
    elif value not in HOSTS:
        raise SettingError(
            f"stage_hosts={value!r} must be 'threads', 'processes', or a mapping of a plan's nodes to addresses of"
            f" their hosts{nearest(str(value), HOSTS)}"
        )
    for name, is_set in (("compile", compiles), ("timeline", timeline is not None)):
        if value != "threads" and is_set:
            raise SettingError(
                f"stage_hosts={value!r} has stages in processes that know no {name} yet; leave {name} out, or"
                " stage_hosts"
            )
    return {str(node): address for node, address in value.items()} if isinstance(value, Mapping) else value


def check_stage_hosts(hosts: StageHosts, *, one_stage: bool, one_in_flight: bool) -> None:
    """Refuses hosts for a run without a pipeline, of which ``one_stage`` or ``one_in_flight`` is the cause; warns where
    that leaves processes out."""
    if isinstance(hosts, Mapping):
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} is for stages, and one minibatch in flight has none, as the step runs on the"
            " model as it is; plan with more in flight, or leave stage_hosts out"
        )
    why = "one minibatch is in flight, and so there are no stages"
    why = "there is one stage, which stays with the user's code" if one_stage else why
    few = " and ".join(["stages"] * one_stage + ["in_flight"] * one_in_flight)
    rank_zero_warn(f"stage_hosts={hosts!r} changes nothing: {why}; set {few} to more, or leave stage_hosts out")


def check_host_nodes(hosts: StageHosts, plan: Plan) -> None:
    """Refuses ``hosts`` for nodes that ``plan`` does not have."""
    named = hosts if isinstance(hosts, Mapping) else {}
    known = [*plan.workers_on_nodes]
    for node in [each for each in named if each not in known]:
        raise SettingError(
            f"stage_hosts={dict(named)!r} names {node!r}, which is no node of the plan for {plan.model}, whose nodes"
            f" are {' and '.join(map(repr, known))}{nearest(node, known)}"
        )


def serving_nodes(plan: Plan | None, emulated: bool, hosts: StageHosts) -> ServingNodes | None:
    """The nodes of ``plan``, if the program runs on nodes that serve stages of virtual workers which others lead."""
    if plan is None or emulated or isinstance(hosts, Mapping):
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
    if not isinstance(hosts, Mapping):
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
