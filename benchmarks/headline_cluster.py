"""The emulated clusters of the headline benchmark, what is compared on them, and how long everything takes there.

A minibatch of `BATCH` samples takes `SECONDS` on a device of speed 1, a third of it forward; layers have parts of that
in proportion to their multiplications. Everything else follows: a stage takes its layers' time on its device, a rank of
DDP as many samples as it has, over its device's speed. Links carry the weights in so many seconds (`Lab.carries`) as
the network of a lab carries those of ResNet-152, relative to a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate

from torch import Tensor, nn

from benchmarks.headline_task import BATCH, batch, network
from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.placement.measuring import pads
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link, Node
from lightning_hetpipe.planning.model.cluster_simulation import ClusterSimulation, simulate_cluster
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import PlacedWeights, WorkerPipeline
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.waves import wave_lengths

SECONDS = 0.25
"""Time of a minibatch on a device of speed 1: many times what it really computes."""

RESNET_152 = 60.2e6 * 4
"""Bytes of its weights."""

TITAN_V = 0.5
"""Seconds that a TITAN V takes for 32 images of ResNet-152: 64 images per second, as HetPipe's figure 4 has it."""

PACED = 120
"""Waves that tell a pace: more than the largest D lets anybody run ahead."""

BUCKETS = 10
"""Gradients of ResNet-152 fill as many of DDP's buckets of 25 MiB."""

INSIDE = Link(12e9)
"""Between devices of a node."""

DEVICE = "emulated"


@dataclass(frozen=True)
class Lab:
    """A cluster of nodes with two equal devices each.

    Attributes:
        title: For people.
        speeds: Of the devices of each node.
        network: Bytes per second of each node's link, both ways.
        spans: Whether a virtual worker has a device of each node (the paper's ED), or those of one node (NP).
    """

    title: str
    speeds: tuple[float, ...]
    network: float
    spans: bool
    devices: int = 2

    @property
    def carries(self) -> float:
        """Seconds in which a link carries the weights once."""
        return SECONDS * (RESNET_152 / self.network) / TITAN_V

    @property
    def link(self) -> Link:
        """A link of the emulated network."""
        return Link(weights_bytes() / self.carries)

    @property
    def cluster(self) -> Cluster:
        """The nodes."""
        nodes = [
            Node(f"node{index}", self.devices * [Device(DEVICE, speed=speed)], replace(INSIDE))
            for index, speed in enumerate(self.speeds)
        ]
        return Cluster(nodes, self.link)

    @property
    def workers(self) -> list[list[DeviceSlot]]:
        """The devices of each virtual worker."""
        slots = list(self.cluster.slots)
        count = self.devices if self.spans else len(self.speeds)
        return [slots[vw :: self.devices] if self.spans else slots[2 * vw : 2 * vw + 2] for vw in range(count)]

    @property
    def ranks(self) -> list[float]:
        """The speed of each of DDP's ranks."""
        return [speed for speed in self.speeds for _ in range(self.devices)]


UNEQUAL = Lab("unequal nodes", (1.0, 0.8, 0.5, 0.3), 1.25e9, spans=False)
"""Nodes of several generations, as a lab has them, with 10 Gbit/s between."""

PAPER = Lab(
    "nodes of the paper",
    tuple(
        round(gpus()[name].speed() / gpus()["Titan-V"].speed(), 2)
        for name in ("Titan-V", "Titan-RTX", "RTX-2060", "Quadro-P4000")
    ),
    7e9,
    spans=True,
)
"""GPUs in the proportions of HetPipe's testbed, by their data sheets, with its 56 Gbit/s between."""

LABS: Mapping[str, Lab] = {"unequal": UNEQUAL, "paper": PAPER}


@dataclass(frozen=True)
class Method:
    """A way to train on a cluster.

    Attributes:
        title: For people.
        clock_distance: D; None for DDP.
        by_speed: Whether a virtual worker's waves, or a rank's batch, are in proportion to its speed.
        lengths: W_v; by default Nm, or with ``by_speed`` those of ``shares="auto"``.
    """

    title: str
    clock_distance: int | None
    by_speed: bool
    lengths: tuple[int, ...] = ()


SHORT = (4, 3, 2, 1)
"""Waves with which `UNEQUAL`'s virtual workers reach 96% of the sum of their rates; fewer than Nm, and so fresher."""

METHODS: Mapping[str, Method] = {
    "ddp": Method("DDP, equal batches", None, False),
    "ddp_by_speed": Method("DDP, batches by speed", None, True),
    **{f"d{d}": Method(f"HetPipe, D = {d}", d, False) for d in (0, 4, 32)},
    **{f"d{d}_shares": Method(f"HetPipe, D = {d}, shares", d, True) for d in (0, 4, 32)},
    "d0_short": Method("HetPipe, D = 0, shares 4:3:2:1", 0, True, SHORT),
}

COMPARED: Mapping[str, Sequence[str]] = {
    "unequal": [*METHODS],
    "paper": ["ddp", "ddp_by_speed", "d0", "d4", "d32"],
}
"""The methods on each cluster; virtual workers that are equal have equal shares."""


@cache
def profile() -> Profile:
    """The net's layers, with their times on a device of speed 1."""
    layers: list[LayerBytes] = []
    work: list[float] = []
    value, _ = batch(range(BATCH), 0)
    for name, layer in network(0).named_children():
        counted: list[float] = []
        handles = [
            each.register_forward_hook(partial(_count, counted))
            for each in layer.modules()
            if isinstance(each, nn.Conv2d | nn.Linear)
        ]
        value = layer(value)
        for handle in handles:
            handle.remove()
        nbytes = sum(parameter.nbytes for parameter in layer.parameters())
        layers.append(LayerBytes(name, nbytes, 4 * value.nbytes, value.nbytes))
        work.append(sum(counted))
    times = [Times(SECONDS / 3 * each / sum(work), SECONDS * 2 / 3 * each / sum(work)) for each in work]
    return Profile("digits", BATCH, layers, {DEVICE: times}, {DEVICE: 1 << 40})


def _count(counted: list[float], module: nn.Module, _: object, output: Tensor) -> None:
    """Add the multiplications of a convolution, or of a linear layer."""
    assert isinstance(module, nn.Conv2d | nn.Linear)
    counted.append(float(module.weight[0].numel() * output.numel()))


def weights_bytes() -> int:
    """Bytes of the net's weights."""
    return sum(layer.parameters for layer in profile().layers)


@cache
def plans(lab: Lab) -> tuple[Estimate, ...]:
    """The stages of each virtual worker: one for each of its devices, and one minibatch more in flight."""
    count = len(lab.workers[0])
    return tuple(
        best_plan(PlanningProblem(profile(), lab.cluster, slots, optimizer="sgd", stages=count), count + 1)
        for slots in lab.workers
    )


def in_flight(lab: Lab) -> int:
    """Nm."""
    return plans(lab)[0].in_flight


def stage_pads(lab: Lab, worker: int) -> list[Pad]:
    """Seconds of the stages of a virtual worker."""
    return pads(plans(lab)[worker].stages)


def waves(lab: Lab, method: Method) -> tuple[int, ...]:
    """W_v."""
    least = in_flight(lab)
    if method.lengths:
        return method.lengths
    if not method.by_speed:
        return (least,) * len(lab.workers)
    return wave_lengths([1 / each.bottleneck for each in plans(lab)], least)


def pipelines(lab: Lab, method: Method) -> list[WorkerPipeline]:
    """The virtual workers, for a simulation: each on a node of its own, with an equal part of each server's weights."""
    count = len(lab.workers)
    held = weights_bytes() // count
    return [
        WorkerPipeline(
            [stage.times for stage in plan.stages],
            wave,
            weights=[PlacedWeights(vw, server, held) for server in range(count)],
        )
        for vw, (plan, wave) in enumerate(zip(plans(lab), waves(lab, method), strict=True))
    ]


def hosts(lab: Lab) -> Cluster:
    """The machines that virtual workers run on, a link each: one for each virtual worker."""
    return Cluster([Node(f"host{vw}", [Device(DEVICE)], INSIDE) for vw in range(len(lab.workers))], lab.link)


def batches(lab: Lab, method: Method) -> tuple[int, ...]:
    """Samples of each rank of DDP in a step; as many in all, however they are divided."""
    total, ranks = BATCH * len(lab.ranks), lab.ranks
    if not method.by_speed:
        return (BATCH,) * len(ranks)
    found = [1] * len(ranks)
    for _ in range(total - len(ranks)):  # one more where it is done soonest
        soonest = min(range(len(ranks)), key=lambda rank: (found[rank] + 1) / ranks[rank])
        found[soonest] += 1
    return tuple(found)


def backward_ends() -> list[float]:
    """For each layer, the part of a backward after which it is done; the last layer is first."""
    backward = [layer.backward for layer in profile().times[DEVICE]]
    done = [*accumulate(reversed(backward))][::-1]
    return [each / done[0] for each in done]


def ddp_seconds(lab: Lab, method: Method) -> float:
    """Seconds of a step of DDP: all-reduces begin as the slowest rank's gradients are there, one after the other.

    A ring of n ranks sends 2 (n - 1) / n times the gradients over each link; ranks of a node are neighbours in it.
    """
    ranks, sizes = lab.ranks, batches(lab, method)
    seconds = [size / BATCH / speed * SECONDS for size, speed in zip(sizes, ranks, strict=True)]
    ring = 2 * (len(ranks) - 1) / len(ranks) * lab.carries
    done = max(seconds) / 3
    for bucket in range(1, BUCKETS + 1):
        ready = max(seconds) * (1 / 3 + 2 / 3 * bucket / BUCKETS)
        done = max(done, ready) + ring / BUCKETS
    return done


@cache
def pace(lab: Lab, method: Method) -> float:
    """Minibatches per second of all virtual workers, or ranks, simulated."""
    if method.clock_distance is None:
        return len(lab.ranks) / ddp_seconds(lab, method)
    return simulated(lab, method, PACED).rate(PACED // 4, 1)


def simulated(lab: Lab, method: Method, count: int) -> ClusterSimulation:
    """So many waves of each virtual worker, over the links of their machines."""
    servers = range(len(lab.workers))
    distance = method.clock_distance or 0
    workers = pipelines(lab, method)
    return simulate_cluster(
        workers, in_flight(lab), count, cluster=hosts(lab), servers=servers, clock_distance=distance
    )
