"""Settings of the strategy, from its arguments and from environment variables: each refusal is one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetpipe.errors import SettingError, nearest, of_file
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.launch.ranks import Rank, WorkerRange
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.pipeline.recorder import KEPT, Window
from lightning_hetpipe.planning.allocation.groupings import ALLOCATIONS
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.shares import whole_steps
from lightning_hetpipe.rules.versions import POLICIES, WeightPolicy
from lightning_hetpipe.server.protocol.identifiers import MOST_VIRTUAL_WORKERS
from lightning_hetpipe.strategy.checks import whole
from lightning_hetpipe.strategy.wsp_callback import WSPCallback, check_address

MOST = 1000
"""The largest number of stages, and of minibatches in flight: each is a thread."""

LONGEST = 2000
"""Minibatches of a timeline: their trace has some 20 MB, the most that a viewer opens at ease."""


HOSTS = ("threads", "processes")

StageHosts = Literal["threads", "processes"] | Mapping[str, str]
"""Place of stages; a mapping has the address of a host for each of a plan's nodes."""

Stages = int | Literal["auto"]


def check_start_method(value: Any) -> None:
    """Refuses a way to start processes that a later release builds."""
    if value != "popen":
        raise SettingError(
            f"start_method={value!r} is not available yet: processes are started as this program was; leave"
            " start_method out, or set it to 'popen'"
        )


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


def weight_policy(value: Any) -> WeightPolicy | None:
    """The policy of that name; None for "auto"."""
    names = ["auto", *POLICIES]
    if not isinstance(value, str) or value not in names:
        raise SettingError(
            f"weights={value!r} must be one of {', '.join(map(repr, names))}{nearest(str(value), names)}"
        )
    return POLICIES.get(value)


def updates(value: Any) -> int | Literal["auto"] | None:
    """The number of updates with lower learning rates."""
    return value if value in (None, "auto") else whole("lr_correction", value, other=", 'auto', or None")


def count(name: str, value: int | str) -> int | Literal["auto"]:
    """``value``, if it is "auto" or a whole number of at least 1."""
    if value == "auto":
        return "auto"
    found = whole(name, value, other=", or 'auto'")
    if found > MOST:
        raise SettingError(f"{name}={value!r} is more than {MOST}, each of which would take a thread; set fewer")
    return found


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


def virtual_workers(given: Any) -> int | WorkerRange:
    """The number of virtual workers on each node, or a range of numbers on all nodes."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return whole("virtual_workers", given, most=MOST_VIRTUAL_WORKERS, other=", or two of them, as (1, 3)")
    pair = list(given)
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int) for each in pair):
        raise SettingError(
            f"virtual_workers={pair!r} must be a whole number, or the fewest and the most of them, as (1, 3)"
        )
    least, most = pair
    if not 1 <= least <= most <= MOST_VIRTUAL_WORKERS:
        raise SettingError(
            f"virtual_workers={pair!r} must be the fewest, at least 1, with which a run begins, and then the most, not"
            f" fewer and at most {MOST_VIRTUAL_WORKERS}"
        )
    return WorkerRange(least, most)


def most_workers(virtual_workers: int | WorkerRange) -> int:
    """The largest number that the setting allows."""
    return virtual_workers.most if isinstance(virtual_workers, WorkerRange) else virtual_workers


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
        known = hosts if isinstance(hosts, Mapping) else {}
        lacking = [node for node in worker.nodes if node not in (worker.leader, *known)]
        if lacking and (nodes == 1 or known):
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
    """The nodes of ``plan``, where some are to serve stages of virtual workers that others lead; else as above."""
    if plan is None or emulated or isinstance(hosts, Mapping):
        return None
    served = {node: plan.served(node) for node in plan.workers_on_nodes}
    stages = {
        node: ", ".join(f"stage {stage} of virtual worker {worker}" for worker, stage in its)
        for node, its in served.items()
        if its
    }
    return ServingNodes((*served,), stages, plan.fingerprint) if stages else None


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
    elif value not in ("threads", "processes"):
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
    (worker,) = plan.virtual_workers
    elsewhere = {number: stage for number, stage in enumerate(worker.stages) if stage.node != worker.leader}
    found = {number: stage for number, stage in elsewhere.items() if not emulated or stage.node in hosts}
    return {number: hosts[stage.node] for number, stage in found.items()}


def nodes_elsewhere(plan: Plan | None) -> dict[int, str]:
    """Node of each stage that is on another one than the last stage, of a plan of one virtual worker."""
    if plan is None:
        return {}
    (worker,) = plan.virtual_workers
    return {number: stage.node for number, stage in enumerate(worker.stages) if stage.node != worker.leader}


def accelerators_elsewhere(plan: Plan | None, emulated: bool) -> dict[int, list[tuple[int, str]]]:
    """Number and name of the accelerator of each stage that is on one of another node than the last stage's, and then
    of each member of its group, of a plan of one virtual worker; where devices are ``emulated``, hosts have CPUs."""
    if plan is None or emulated:
        return {}
    (worker,) = plan.virtual_workers
    return {
        number: [(each.device_number or 0, each.device_name) for each in (stage, *stage.group)]
        for number, stage in enumerate(worker.stages)
        if stage.node != worker.leader and stage.device_name != "cpu" and stage.device_number is not None
    }


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


def check_cluster(virtual_workers: int) -> None:
    """Refuses a cluster without a plan where there are several virtual workers."""
    if virtual_workers > 1:
        raise SettingError(
            f"cluster is planned at the start of a fit for one virtual worker, and there are {virtual_workers}; give a"
            f" plan of {virtual_workers}, too (docs/planning.md), leave cluster out, or train with one virtual worker"
        )


def timeline(value: Any) -> Window | None:
    """Minibatches of which a timeline is to be kept; None for no timeline."""
    if value is False:
        return None
    if value is True:
        return Window()
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(type(number) is int for number in pair) or not 1 <= pair[0] <= pair[1]:
        raise SettingError(
            f"timeline={value!r} must be True, for the last {KEPT} minibatches, False, or the first and the last"
            " minibatch to keep, such as (100, 120); they are counted from 1"
        )
    first, last = pair
    if last - first >= LONGEST:
        raise SettingError(
            f"timeline={value!r} is {last - first + 1} minibatches, of which at most {LONGEST} are kept in memory;"
            " ask for fewer"
        )
    return Window(first, last, LONGEST)


def check_platform(virtual_workers: int, platform: str) -> None:
    """Refuse several processes where they cannot be started; ``platform`` is ``sys.platform``."""
    if virtual_workers > 1 and platform == "win32":
        raise SettingError(
            f"virtual_workers={virtual_workers} needs processes that inherit sockets, which Windows does not have;"
            " train in WSL 2, or leave virtual_workers out"
        )


def only_wsp(given: Sequence[WSPCallback]) -> WSPCallback:
    """The one that holds, of those that the Trainer and the strategy were given."""
    if len(given) > 1:
        raise SettingError(
            f"this run has {len(given)} WSPCallbacks; give one, to HetPipeStrategy(wsp=...) or among the Trainer's"
            " callbacks (on the command line: strategy.wsp, or strategy.wsp=null and one of callbacks)"
        )
    return given[0] if given else WSPCallback()


def stage_counts(stages: Any, virtual_workers: int) -> Stages | list[Stages]:
    """``stages``, checked as far as it can be before it is known who starts how many virtual workers."""
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        return count("stages", stages)
    if not stages or len(stages) % virtual_workers:
        raise _other_stages(stages, virtual_workers)
    return [count("stages", each) for each in stages]


def stages_of(stages: Stages | list[Stages], rank: Rank) -> Stages:
    """k of one virtual worker; a list has one for each of a node's, or for each of all.

    Raises:
        SettingError: if it has another number of them.
    """
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


def module_names(module: str | Sequence[str] | None) -> list[str] | None:
    """The ``module`` setting as a list of names."""
    if module is None or isinstance(module, str):
        return None if module is None else [module]
    names = list(module) if isinstance(module, Sequence) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SettingError(f"module={module!r} must be the name of a module, or a list of names")
    return names


def run_seed() -> int:
    """Seed of the run's random numbers: PL_GLOBAL_SEED, else torch's own."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else torch.initial_seed()


def torch_threads() -> int:
    """Threads of each torch operation in training: OMP_NUM_THREADS, else 1; never derived from k, for exactness."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(threads)) if threads.isdigit() else 1
