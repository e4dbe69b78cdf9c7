"""The setting ``plan``: what of the other settings a plan says, and which of them it leaves no room for."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import groupby
from typing import Any

from lightning_hetpipe.errors import SettingError, nearest, of_file
from lightning_hetpipe.launch.ranks import WorkerRange
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.planning.allocation.groupings import ALLOCATIONS
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.shares import whole_steps
from lightning_hetpipe.rules.versions import WeightPolicy
from lightning_hetpipe.strategy.checks import whole
from lightning_hetpipe.strategy.host_setting import StageHosts, check_host_nodes, serving_nodes
from lightning_hetpipe.strategy.settings import Stages, count, most_workers


def plan(value: Any) -> Plan | None:
    """``value``, or what the file of that name holds.

    Raises:
        SettingError: for what is neither, and for a plan that no device can run.
    """
    if value is None:
        return None
    if not isinstance(value, Plan | str | os.PathLike):
        raise SettingError(f"plan={value!r} must be a lightning_hetpipe.Plan, or the path of one")
    try:
        made = value if isinstance(value, Plan) else Plan.load(value)
    except SettingError as error:
        raise of_file("plan", error, "give a plan.json that hetpipe-plan has saved") from error
    try:
        made.check()
    except SettingError as error:
        raise error if isinstance(value, Plan) else SettingError(f"plan={os.fspath(value)}: {error}") from error
    if made.spread and len(made.virtual_workers) > 1:
        raise SettingError(
            f"the plan for {made.model} is of a spread run, which has one virtual worker, and it has"
            f" {len(made.virtual_workers)}; plan anew"
        )
    return made


def check_allocation(value: Any, plan: Plan | None) -> None:
    """Refuses an allocation that is none, or, other than "auto", that no plan has made."""
    if value == "auto" or (plan is not None and value == plan.allocation):
        return
    if value not in ALLOCATIONS:
        known = ", ".join(map(repr, ALLOCATIONS))
        raise SettingError(f"allocation={value!r} must be one of {known}{nearest(str(value), ALLOCATIONS)}")
    has = "there is none" if plan is None else f"the plan for {plan.model} has {plan.allocation or 'none'!r}"
    raise SettingError(
        f"allocation={value!r} is decided when devices are measured and a plan is made, and {has}; make one with"
        f" hetpipe-plan cluster=... strategy.allocation={value}, and give it as plan=..., or leave allocation out"
    )


def as_planned(name: str, asked: Stages | list[Stages], planned: int) -> int:
    """Take the number of a plan, unless another was asked for, or it is more than there may be."""
    count(name, planned)
    if asked not in ("auto", planned):
        raise SettingError(f"{name}={asked!r}, but the plan has {planned}; leave {name} out, or set it to 'auto'")
    return planned


def stages_as_planned(asked: Stages | list[Stages], plan: Plan) -> Stages | list[Stages]:
    """Take k of each virtual worker of a plan, unless others were asked for."""
    planned = [count("stages", len(worker.stages)) for worker in plan.virtual_workers]
    if asked == planned:
        return asked
    return [as_planned("stages", asked, k) for k in planned if isinstance(k, int)]


def workers_as_planned(
    virtual_workers: int | WorkerRange, plan: Plan, emulated: bool, hosts: StageHosts, nodes: int
) -> list[int]:
    """Number of virtual workers on each node of a plan, in its order; 0 for one that only serves stages of others'.

    Args:
        virtual_workers: The setting; 1 is its default, and leaves the number to the plan. The most of a range are those
            of the plan.
        plan: To be run.
        emulated: Whether all of its devices are emulated on this machine, which so is their only node.
        hosts: Where stages run.
        nodes: On which the program runs.

    Raises:
        SettingError: for another number in ``virtual_workers``, and for what is planned but cannot be run.
    """
    on_nodes = plan.workers_on_nodes
    check_host_nodes(hosts, plan)
    leading = [count for count in on_nodes.values() if count]
    found = [len(plan.virtual_workers)] if emulated else leading
    asked = most_workers(virtual_workers)
    if asked != 1 and (set(found) != {asked} if isinstance(virtual_workers, int) else sum(found) != asked):
        raise SettingError(
            f"virtual_workers={virtual_workers}, but the plan for {plan.model} has {', '.join(map(str, found))}"
            f"{' on its nodes' if len(found) > 1 else ''}; leave virtual_workers out, as the plan says it"
        )
    if emulated:
        return found
    for index, worker in enumerate(plan.virtual_workers):
        lacking = [node for node in worker.nodes if node not in (worker.leader, *(hosts or ()))]
        if lacking and (nodes == 1 or hosts):
            raise SettingError(
                f"the plan for {plan.model} has a virtual worker with stages on several nodes ({index}, on"
                f" {', '.join(worker.nodes)}); start this program on each of the plan's nodes, with"
                f" Trainer(num_nodes={len(on_nodes)}) and {plan.node_ranks}, or start hetpipe-host on"
                f" {' and '.join(lacking)}, and say where, as in stage_hosts={{'{lacking[0]}': '10.0.0.2:7071'}}, or"
                " plan each virtual worker for the devices of one node, or give the cluster, too, and start all on one"
                " machine, to emulate them on its CPU"
            )
        if lacking and plan.spread:
            raise SettingError(
                f"the plan for {plan.model} is of a spread run, which has no stages for hosts, and has devices on"
                f" {' and '.join(worker.nodes)}; plan for the devices of one node, or for more in flight"
            )
    order = [worker.leader for worker in plan.virtual_workers]
    if len([*groupby(order)]) != len(leading):
        raise SettingError(
            f"the plan for {plan.model} has its virtual workers on {', '.join(order)}, in this order; list those of one"
            " node one after another"
        )
    return found if serving_nodes(plan, emulated, hosts) is None else [*on_nodes.values()]


def check_planned_policy(asked: WeightPolicy | None, plan: Plan) -> None:
    """Refuses another weight policy than that of ``plan``, where several minibatches are in flight."""
    if plan.in_flight > 1 and asked not in (None, planned := plan.versions.policy):
        raise SettingError(
            f"weights='{asked.name}', but the plan is for weights='{planned.name}', which takes other memory; plan with"
            f" strategy.weights={asked.name}, or leave weights out"
        )


def check_spread(plan: Plan, **settings: bool) -> None:
    """Refuses ``settings`` that are the work of a pipeline's stages with a ``plan`` of a spread run."""
    for name, is_set in settings.items():
        if plan.spread and is_set:
            raise SettingError(
                f"{name} is for the stages of a pipeline, and the plan for {plan.model} is of a spread run, which takes"
                f" less memory; leave {name} out, or plan with it"
            )


def wsp_as_planned(given: WSPSettings, plan: Plan) -> WSPSettings:
    """Take the synchronisation of a plan, as far as nobody has set it."""
    whole("the plan's clock_distance", plan.clock_distance, least=0)
    lengths = {"wave", "shares"}
    left_out = given.left_out if lengths <= given.left_out else given.left_out - lengths
    return replace(given, **{name: value for name, value in _synchronisation(plan).items() if name in left_out})


def other_than_planned(wsp: WSPSettings, plan: Plan) -> str:
    """Say what of the synchronisation was set otherwise than the plan has it; nothing where all is as planned."""
    pairs = [(name, getattr(wsp, name), value) for name, value in _synchronisation(plan).items()]
    others = [f"{name}={_shown(own)}, where the plan has {_shown(its)}" for name, own, its in pairs if own != its]
    return f"as set, this run has {', and '.join(others)}; the plan's figures are for its own" if others else ""


def _synchronisation(plan: Plan) -> dict[str, Any]:
    """Settings of a :class:`WSPCallback` that a plan says; its wave only where that is longer than by default."""
    waves, equal = plan.waves, len(set(plan.waves)) == 1
    longer = equal and waves[0] > whole_steps([plan.in_flight], plan.accumulate_grad_batches)[0]
    return {
        "clock_distance": plan.clock_distance,
        "wave": waves[0] if longer else "auto",
        "shares": "equal" if equal else waves,
        "placement": plan.placement,
    }


def _shown(value: Any) -> str:
    return repr([*value] if isinstance(value, tuple) else value)
