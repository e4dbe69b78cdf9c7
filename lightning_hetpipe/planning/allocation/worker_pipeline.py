"""Virtual workers of a plan as the simulation of a cluster takes them: stages, what crosses the network, weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot, Link
from lightning_hetpipe.planning.model.estimate import Estimate, stage_times_on, step_on, visits_on
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import Crossing, PlacedWeights, WorkerPipeline
from lightning_hetpipe.rules.parameter_placement import place


def server_nodes(workers: Sequence[Estimate]) -> list[int]:
    """Nodes with a server: those of last stages in the order of virtual workers, as in a run; then others."""
    used = {stage.slot.node for worker in workers for stage in worker.stages}
    return [*dict.fromkeys([*(worker.stages[-1].slot.node for worker in workers), *sorted(used)])]


def worker_pipelines(
    profile: Profile,
    cluster: Cluster,
    workers: Sequence[Estimate],
    lengths: Sequence[int],
    servers: Sequence[int],
    placement: str,
) -> list[WorkerPipeline]:
    """Virtual workers with waves of ``lengths`` minibatches, whose weights lie on ``servers`` by ``placement``.

    Without servers there is nobody to synchronise with.

    Raises:
        SettingError: for another placement than there is.
    """
    weights = _placed(profile, workers, servers, placement) if servers else [[] for _ in workers]
    parts, shared = zip(workers, lengths, weights, strict=True), shared_devices(workers)
    return [_pipeline(profile, cluster, worker, length, own, shared) for worker, length, own in parts]


def shared_devices(workers: Sequence[Estimate]) -> set[DeviceSlot]:
    """Devices with stages of several virtual workers."""
    used = Counter(slot for worker in workers for slot in {stage.slot for stage in worker.stages})
    return {slot for slot, count in used.items() if count > 1}


def _placed(
    profile: Profile, workers: Sequence[Estimate], servers: Sequence[int], placement: str
) -> list[list[PlacedWeights]]:
    """The weights of each virtual worker, by node and server."""
    homes = [_nodes(worker) for worker in workers]
    sizes = [*(layer.parameters for layer in profile.layers), profile.user.trained]
    beside = [servers.index(node) for node in homes[0]]
    placed = place(sizes, len(servers), placement, beside)
    server = {index: number for number, indices in enumerate(placed) for index in indices}
    found = []
    for nodes in homes:
        held: Counter[tuple[int, int]] = Counter()
        for index, nbytes in enumerate(sizes):
            held[nodes[index], server[index]] += nbytes
        found.append([PlacedWeights(*where, nbytes) for where, nbytes in held.items() if nbytes])
    return found


def _nodes(worker: Estimate) -> list[int]:
    """The node of each layer, and of modules beside the layers."""
    found = [stage.slot.node for stage in worker.stages for _ in range(stage.first, stage.last + 1)]
    return [*found, found[-1]]


def _pipeline(
    profile: Profile,
    cluster: Cluster,
    worker: Estimate,
    wave: int,
    weights: Sequence[PlacedWeights],
    shared: Collection[DeviceSlot],
) -> WorkerPipeline:
    slots, splits = [stage.slot for stage in worker.stages], [stage.first for stage in worker.stages]
    # The simulation says how long bytes take over the network; of the latency it knows nothing.
    latency = Cluster(cluster.nodes, Link(math.inf, cluster.between.latency))
    times = stage_times_on(profile, latency, slots, splits, worker.recompute)
    parts, visits = visits_on(profile, slots, splits, times, worker.recompute)
    firsts = [part.first for part in visits.segments] if visits else splits
    forwards, gradients = {}, {}
    leader, first = slots[-1].node, slots[0].node
    given = sum(layer.given for layer in profile.layers[: (*splits, len(profile.layers))[1]])
    if given and leader != first:  # the user's code runs where the last stage is, and has the batch there
        forwards[0] = Crossing(given / profile.called(0), leader, first)
    for index in range(1, len(slots)):
        source, target = slots[index - 1].node, slots[index].node
        if source != target:
            nbytes, segment = profile.layers[splits[index] - 1].output, firsts.index(splits[index])
            forwards[segment] = Crossing(nbytes / profile.called(splits[index]), source, target)
            gradients[segment - 1] = Crossing(nbytes / profile.called(splits[index] - 1), target, source)
    devices = {index: slot for index, slot in enumerate(slots) if slot in shared}
    return WorkerPipeline(parts, wave, step_on(profile, slots, splits), visits, forwards, gradients, weights, devices)
