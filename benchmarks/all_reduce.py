"""Model of all-reduce data parallel, to compare plans with: the whole model on every GPU, one step for all.

Every GPU computes a minibatch of its own, and the slowest of them is waited for. As in Horovod, gradients are summed
while the backward goes on: as soon as a layer's backward is over, or what was summed before is through, all gradients
that wait are summed as one message. A ring of N GPUs sends 2 (N - 1) messages of a part of N of it, one after another,
and is as fast as its slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetpipe.planning.model.cluster import NO_LINK, Cluster, Link
from lightning_hetpipe.planning.model.profile import Profile, Times
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem


@dataclass(frozen=True)
class AllReduce:
    """Data parallel training on all GPUs of a cluster.

    Attributes:
        rate: Minibatches per second of all GPUs together, whatever their memory.
        lacking: Bytes that GPUs lack for the model, by their name; empty where it fits.
    """

    rate: float
    lacking: dict[str, int]


def all_reduce(profile: Profile, cluster: Cluster, optimizer: str) -> AllReduce:
    """Model a step on all devices of ``cluster``."""
    slots = cluster.slots
    times = [profile.times_on(slot.device) for slot in slots]
    slowest = max(times, key=lambda own: sum(each.forward + each.backward for each in own))
    sizes = [layer.parameters for layer in profile.layers]
    seconds = step_seconds(slowest, sizes, slowest_link(cluster), len(slots))
    return AllReduce(len(slots) / seconds, _lacking(profile, cluster, optimizer))


def step_seconds(times: Sequence[Times], sizes: Sequence[int], link: Link, devices: int) -> float:
    """Seconds of a step of layers that take ``times`` and have ``sizes`` bytes of gradients, on a ring of ``devices``.

    The optimizer's step follows when all gradients are summed.
    """
    now = sum(each.forward for each in times)
    ready = []
    for each, nbytes in reversed([*zip(times, sizes, strict=True)]):
        now += each.backward
        ready.append((now, nbytes))
    through = 0.0
    while ready:
        start = max(through, ready[0][0])
        there = sum(when <= start for when, _ in ready)
        through = start + ring_seconds(sum(nbytes for _, nbytes in ready[:there]), link, devices)
        del ready[:there]
    return through + sum(each.update for each in times)


def ring_seconds(nbytes: float, link: Link, devices: int) -> float:
    """Seconds in which a ring of ``devices`` has summed ``nbytes`` that each of them has."""
    return 2 * (devices - 1) * (link.latency + nbytes / devices / link.bandwidth)


def slowest_link(cluster: Cluster) -> Link:
    """Slowest link of a ring over all devices that enters and leaves each node once."""
    links = [node.own_link for node in cluster.nodes if len(node.devices) > 1]
    if len(cluster.nodes) > 1:
        links.append(cluster.between)
    return min(links, key=lambda link: link.bandwidth, default=NO_LINK)


def _lacking(profile: Profile, cluster: Cluster, optimizer: str) -> dict[str, int]:
    found = {}
    for slot in {slot.device: slot for slot in cluster.slots}.values():
        plan = best_plan(PlanningProblem(profile, cluster, [slot], optimizer=optimizer, spread=True), 1)
        if not plan.fits:
            found[slot.device.name] = sum(stage.overflow for stage in plan.stages)
    return found
