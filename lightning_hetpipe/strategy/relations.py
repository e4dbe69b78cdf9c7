"""Relations between the settings of a run: which settings exclude each other, and which follow from a plan.

Each setting by itself is declared in ``strategy/arguments.py``. This module loads neither torch nor Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_hetpipe.errors import SettingError, nearest, of_file
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.versions import POLICIES
from lightning_hetpipe.rules.waves import whole_steps

if TYPE_CHECKING:
    from lightning_hetpipe.launch.ranks import Rank, WorkerRange
    from lightning_hetpipe.strategy.arguments import Stages

T = TypeVar("T")
StageHosts = Mapping[str, str] | None
"""Address of a host by name of a plan's node, or None without hosts."""


def plan(value: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """Return the plan in ``value`` or in the file of that name. Raise SettingError if it is no plan or impossible."""
    if value is None:
        return None
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


def check_given(given: SimpleNamespace, plan: Plan | None, has_groups: bool) -> None:
    """Refuse settings of the strategy that exclude each other or contradict ``plan``."""
    asked, hosts = given.allocation, given.stage_hosts
    if asked not in ("auto", plan and plan.allocation):
        has = "there is none" if plan is None else f"the plan for {plan.model} has {plan.allocation or 'none'!r}"
        raise SettingError(
            f"allocation={asked!r} is decided when devices are measured and a plan is made, and {has}; make one with"
            f" hetpipe-plan cluster=... strategy.allocation={asked}, and give it as plan=..., or leave allocation out"
        )
    for name in ("compile", "timeline"):
        if hosts is not None and getattr(given, name) is not False:
            raise SettingError(
                f"stage_hosts={hosts!r} has stages at hosts that know no {name} yet; leave {name} out, or stage_hosts"
            )
    if plan is None:
        return
    if given.split is not False:
        raise SettingError(
            f"split={given.split!r}, but the plan says which stages have several devices; leave split out"
        )
    policy, planned = POLICIES.get(given.weights), plan.versions.policy
    if plan.in_flight > 1 and policy not in (None, planned):
        raise SettingError(
            f"weights='{given.weights}', but the plan is for weights='{planned.name}', which takes other memory; plan"
            f" with strategy.weights={given.weights}, or leave weights out"
        )
    for name, is_set in {
        "recompute": given.recompute or plan.recompute,
        "compile": given.compile is not False,
        "split": has_groups,
    }.items():
        if plan.spread and is_set:
            raise SettingError(
                f"{name} is for the stages of a pipeline, and the plan for {plan.model} is of a spread run, which takes"
                f" less memory; leave {name} out, or plan with it"
            )


def check_split(split: Mapping[int, Any], stages: Stages | list[Stages]) -> None:
    """Refuse shares for a stage that does not exist."""
    for count in stages if isinstance(stages, list) else [stages]:
        if isinstance(count, int) and (last := max(split, default=0)) >= count:
            raise SettingError(
                f"split has shares for stage {last}, and there are {count} stages, from 0 on; set stages to more, or"
                " leave it out of split"
            )


def as_planned(name: str, asked: Stages | list[Stages], planned: int) -> int:
    """Return the plan's number, and refuse another number in the setting."""
    if asked not in ("auto", planned):
        raise SettingError(f"{name}={asked!r}, but the plan has {planned}; leave {name} out, or set it to 'auto'")
    return planned


def stages_as_planned(asked: Stages | list[Stages], plan: Plan) -> Stages | list[Stages]:
    """Return k of each virtual worker of a plan, and refuse other numbers in the setting."""
    planned = [len(worker.stages) for worker in plan.virtual_workers]
    if asked == planned:
        return asked
    return [as_planned("stages", asked, k) for k in planned]


def most_workers(virtual_workers: int | WorkerRange) -> int:
    """Return the largest number that the setting allows."""
    return virtual_workers if isinstance(virtual_workers, int) else virtual_workers.most


def check_cluster(virtual_workers: int) -> None:
    """Refuse a cluster without a plan if there are several virtual workers."""
    if virtual_workers > 1:
        raise SettingError(
            f"cluster is planned at the start of a fit for one virtual worker, and there are {virtual_workers}; give a"
            f" plan of {virtual_workers}, too (docs/planning.md), leave cluster out, or train with one virtual worker"
        )


def check_platform(virtual_workers: int, platform: str) -> None:
    """Refuse several processes on Windows, which cannot start them. ``platform`` is ``sys.platform``."""
    if virtual_workers > 1 and platform == "win32":
        raise SettingError(
            f"virtual_workers={virtual_workers} needs processes that inherit sockets, which Windows does not have;"
            " train in WSL 2, or leave virtual_workers out"
        )


def only_wsp(given: Sequence[T]) -> T | None:
    """Return the only WSPCallback of Trainer and strategy, or None. Refuse several."""
    if len(given) > 1:
        raise SettingError(
            f"this run has {len(given)} WSPCallbacks; give one, to HetPipeStrategy(wsp=...) or among the Trainer's"
            " callbacks (on the command line: strategy.wsp, or strategy.wsp=null and one of callbacks)"
        )
    return given[0] if given else None


def check_lengths(wave: int | Literal["auto"], shares: Any) -> None:
    """Refuse ``wave`` together with a list of ``shares``, because each decides how many minibatches a wave has."""
    if wave != "auto" and shares not in (None, "equal", "auto"):
        raise SettingError(
            f"wave={wave!r} and shares={list(shares)!r} both say how many minibatches a wave has; leave wave out"
        )


def stage_counts(stages: Stages | Sequence[Stages], virtual_workers: int) -> Stages | list[Stages]:
    """Check the length of ``stages`` as far as possible, before the run's number of virtual workers is known."""
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        return stages
    if not stages or len(stages) % virtual_workers:
        raise _other_stages(stages, virtual_workers)
    return list(stages)


def stages_of(stages: Stages | list[Stages], rank: Rank) -> Stages:
    """Return k of one virtual worker. A list must have an entry for each virtual worker of the run, or of a node."""
    if not isinstance(stages, list):
        return stages
    if len(stages) == rank.size:
        return stages[rank.index]
    if len(stages) != rank.per_node:
        raise _other_stages(stages, rank.per_node, rank.size)
    return stages[rank.local]


def _other_stages(stages: Sequence[Any], virtual_workers: int, of: int | None = None) -> SettingError:
    among = f" on this node, of {of} in all" if of not in (None, virtual_workers) else ""
    return SettingError(
        f"stages={list(stages)!r} has {len(stages)} entries, but there are virtual_workers={virtual_workers}{among};"
        " give one for each, or one number for all"
    )


def refuse_spread(hosts: StageHosts) -> None:
    """Refuse hosts for a run without a pipeline."""
    if hosts is not None:
        raise SettingError(
            f"stage_hosts={dict(hosts)!r} is for stages, and one minibatch in flight has none, as the step runs on the"
            " model as it is; plan with more in flight, or leave stage_hosts out"
        )


def workers_as_planned(
    virtual_workers: int | WorkerRange, plan: Plan, emulated: bool, hosts: StageHosts, nodes: int
) -> list[int]:
    """Return the number of virtual workers on each node of a plan, in its order, or 0 for a node that only has hosts.

    Args:
        virtual_workers: The setting. 1 is its default, and leaves the number to the plan. The largest number of a range
            must be the plan's.
        emulated: Whether all devices of the plan are emulated on this machine, which is the only node in this case.
        nodes: Number of machines on which this program is started.

    Raises:
        SettingError: if ``virtual_workers`` is another number, or this run cannot follow the plan.
    """
    on_nodes = plan.workers_on_nodes
    for node in [each for each in hosts or () if each not in on_nodes]:
        raise SettingError(
            f"stage_hosts={dict(hosts or {})!r} names {node!r}, which is no node of the plan for {plan.model}, whose"
            f" nodes are {' and '.join(map(repr, on_nodes))}{nearest(node, [*on_nodes])}"
        )
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
    return [*on_nodes.values()] if hosts is None and any(map(plan.served, on_nodes)) else found


def wsp_as_planned(given: WSPSettings, plan: Plan) -> WSPSettings:
    """Return settings of synchronisation in which the plan's values replace values that were left out."""
    lengths = {"wave", "shares"}
    left_out = given.left_out if lengths <= given.left_out else given.left_out - lengths
    return replace(given, **{name: value for name, value in _synchronisation(plan).items() if name in left_out})


def other_than_planned(wsp: WSPSettings, plan: Plan) -> str:
    """Return a sentence on settings of synchronisation that differ from the plan, or an empty string."""
    pairs = [(name, getattr(wsp, name), value) for name, value in _synchronisation(plan).items()]
    others = [f"{name}={_shown(own)}, where the plan has {_shown(its)}" for name, own, its in pairs if own != its]
    return f"as set, this run has {', and '.join(others)}; the plan's figures are for its own" if others else ""


def _synchronisation(plan: Plan) -> dict[str, Any]:
    """Return the settings of a :class:`WSPCallback` in a plan. ``wave`` is "auto" unless it exceeds its default."""
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
