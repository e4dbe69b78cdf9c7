"""Simulation of a cluster: virtual workers, the parameter servers between them, and the links that they share.

Each virtual worker is a :class:`~lightning_hetpipe.planning.model.simulate.PipelineRun`. Rules for several of them:

- A wave ends when Lightning's thread has stepped the last of its W_v minibatches. The virtual worker pushes its update
  to the servers, waits until no virtual worker is more than D waves behind it, and pulls (law L3). Minibatches in
  flight go on meanwhile. Minibatches that need the version at the wave's end start when the pull is done.
- Each direction of a node's network link is a shared link, and so is each direction of the memory of a node with a
  server. All transfers that cross a link at one moment get equal parts of its bandwidth. A transfer ends, after the
  network's latency, when each link that it crosses has moved all its bytes. So a node's memory limits how fast its
  server adds.
- Activations and gradients between stages on different nodes cross these links. The receiving stage is busy meanwhile.
- A device with stages of several virtual workers computes their tasks one after another, in the order in which they
  become ready.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.simulate import Crossing, PipelineRun, PlacedWeights, SharedDevice, WorkerPipeline
from lightning_hetpipe.rules.versions import STASH, Versions
from lightning_hetpipe.rules.waves import may_pull


@dataclass(frozen=True)
class SimulatedWorker:
    """Result of one virtual worker, in seconds. ``published`` has the time of each version 1, 2, ...

    Attributes:
        waited: Time for which Lightning's thread waited for slower virtual workers.
        synchronised: Time at the end of each wave for which the virtual worker pushed, waited and pulled.
        staleness: Largest number of minibatches of one other virtual worker u that the weights of a minibatch p lacked.
            Virtual worker u counts as having computed ceil((p - 1) W_u / W_v) minibatches, as if all kept their pace.
    """

    wave: int
    published: tuple[float, ...]
    waited: float
    synchronised: tuple[float, ...]
    staleness: int


@dataclass(frozen=True)
class ClusterSimulation:
    """Result of a simulated run, in which each virtual worker has the same number of ``waves``.

    ``traffic`` has the bytes that each direction of each shared link carried, by its name, such as "lab out".
    """

    workers: tuple[SimulatedWorker, ...]
    waves: int
    traffic: Mapping[str, float]

    @property
    def staleness(self) -> int:
        """The largest staleness of all virtual workers."""
        return max(worker.staleness for worker in self.workers)

    def rate(self, first: int = 0, last: int = 0) -> float:
        """Return the minibatches per second of all virtual workers, without the ``first`` and the ``last`` waves.

        Since all virtual workers have the same number of waves, the last virtual worker to end a wave counts.
        """
        until = self.waves - last
        began, ended = (
            max(worker.published[wave * worker.wave - 1] if wave else 0.0 for worker in self.workers)
            for wave in (first, until)
        )
        return (until - first) * sum(worker.wave for worker in self.workers) / max(ended - began, 1e-300)


def simulate_cluster(
    workers: Sequence[WorkerPipeline],
    in_flight: int,
    waves: int,
    *,
    cluster: Cluster | None = None,
    servers: Sequence[int] = (),
    clock_distance: int = 0,
    jitter: float = 0.0,
    seed: int = 0,
    versions: Versions | None = None,
) -> ClusterSimulation:
    """Simulate ``waves`` waves of each of ``workers``, from empty pipelines. If there are several, they synchronise.

    Args:
        cluster: Cluster whose links are shared. By default transfers between virtual workers take no time.
        servers: The node of each parameter server.
        jitter: Variation of the tasks' times, see :class:`~lightning_hetpipe.planning.model.simulate.PipelineRun`. The
            factors are drawn from ``seed``, the virtual worker, the minibatch and the task.
        versions: Weight versions that minibatches use, by default the versions of weight stashing.
    """
    run = _ClusterRun(
        workers, versions or Versions(STASH, in_flight), waves, _Network(cluster, servers), clock_distance
    )
    return run.simulation(jitter, seed)


T = TypeVar("T")


class SharedLink(Generic[T]):
    """One direction of a link with a finite ``bandwidth`` in bytes/s. ``T`` is a transfer's type.

    At any moment all transfers on a link get equal parts of the bandwidth, like connections of one network. A clock
    counts the bytes that every transfer has been given since the link was last idle. A transfer ends when this clock
    has advanced by its bytes. So a start or an end changes the pace of all transfers, and only the next end must be
    known.
    """

    __slots__ = ("_bandwidth", "_ends", "_given", "_order", "_since", "carried", "changes", "name")

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self.carried = 0.0
        """Bytes of all transfers so far."""
        self.changes = 0
        """Number of starts and ends. The result of :meth:`due` holds until the next one."""
        self._bandwidth = bandwidth
        self._given = 0.0
        self._since = 0.0
        self._order = itertools.count()
        self._ends: list[tuple[float, int, T]] = []

    def add(self, now: float, nbytes: float, transfer: T) -> None:
        """Start ``transfer`` of ``nbytes`` at the time ``now``."""
        if self._ends:
            self._given += (now - self._since) * self._bandwidth / len(self._ends)
        else:
            self._given = 0.0
        self._since = now
        self.carried += nbytes
        heapq.heappush(self._ends, (self._given + nbytes, next(self._order), transfer))
        self.changes += 1

    def due(self) -> float | None:
        """Return the time at which the next transfer ends if none starts before, or None without transfers."""
        if not self._ends:
            return None
        return self._since + (self._ends[0][0] - self._given) * len(self._ends) / self._bandwidth

    def take(self, now: float) -> list[T]:
        """End the transfers that are over at the time that :meth:`due` returned, at least one, and return them."""
        self._given, self._since = self._ends[0][0], now
        over = []
        while self._ends and self._ends[0][0] <= self._given:
            over.append(heapq.heappop(self._ends)[2])
        self.changes += 1
        return over


Moves: TypeAlias = "Sequence[tuple[SharedLink[_Transfer], float]]"
"""Pairs for one transfer: a link, and the bytes that the transfer moves over this link."""

Done: TypeAlias = Callable[[float], None]


class _Network:
    """Shared links of a cluster: into and out of each node, and of the memory of each node with a server."""

    def __init__(self, cluster: Cluster | None, servers: Sequence[int]) -> None:
        self.links: dict[tuple[int, str], SharedLink[_Transfer]] = {}
        """Links with a finite bandwidth, by node and direction."""
        self._servers = servers
        self._latency = 0.0
        if cluster is None:
            return
        self._latency = cluster.between.latency
        for number, node in enumerate(cluster.nodes):
            if len(cluster.nodes) > 1:
                self._add(number, "out", node.name, cluster.between.bandwidth)
                self._add(number, "in", node.name, cluster.between.bandwidth)
            if number in servers:
                self._add(number, "server in", node.name, node.own_link.bandwidth)
                self._add(number, "server out", node.name, node.own_link.bandwidth)

    def crossing(self, crossing: Crossing) -> Moves:
        return self._sums([(crossing.source, "out", crossing.nbytes), (crossing.target, "in", crossing.nbytes)])

    def push(self, weights: Sequence[PlacedWeights]) -> Moves:
        return self._sums(self._held(weights, "out", "in", "server in"))

    def pull(self, weights: Sequence[PlacedWeights]) -> Moves:
        return self._sums(self._held(weights, "in", "out", "server out"))

    def latency(self, weights: Sequence[PlacedWeights]) -> float:
        """Return the seconds until the first byte of ``weights`` arrives."""
        return self._latency if any(self._servers[each.server] != each.node for each in weights) else 0.0

    def _add(self, node: int, direction: str, name: str, bandwidth: float) -> None:
        if bandwidth < math.inf:
            self.links[node, direction] = SharedLink(f"{name} {direction}", bandwidth)

    def _held(
        self, weights: Sequence[PlacedWeights], mine: str, its: str, memory: str
    ) -> Iterator[tuple[int, str, float]]:
        for each in weights:
            server = self._servers[each.server]
            yield server, memory, each.nbytes
            if server != each.node:
                yield each.node, mine, each.nbytes
                yield server, its, each.nbytes

    def _sums(self, moves: Iterable[tuple[int, str, float]]) -> Moves:
        found: dict[SharedLink[_Transfer], float] = {}
        for node, direction, nbytes in moves:
            if nbytes and (link := self.links.get((node, direction))) is not None:
                found[link] = found.get(link, 0.0) + nbytes
        return [*found.items()]


@dataclass(eq=False, slots=True)
class _Transfer:
    """Transfer over several links at once. ``done`` is called when the last of ``left`` links has moved its bytes."""

    left: int
    done: Done


class _Worker:
    """State of a virtual worker between its pipeline and the servers."""

    def __init__(self, index: int, given: WorkerPipeline, network: _Network) -> None:
        self.index = index
        self.wave = given.wave
        self.push, self.pull = network.push(given.weights), network.pull(given.weights)
        self.latency = network.latency(given.weights)
        self.since = self.waited = 0.0
        self.synchronised: list[float] = []
        self.staleness = 0
        self.synchronises = False
        self.wakes = math.inf
        """Time at which the pipeline goes on. Infinite while no time is set."""
        self.run: PipelineRun


class _ClusterRun:
    def __init__(
        self, given: Sequence[WorkerPipeline], versions: Versions, waves: int, network: _Network, clock_distance: int
    ) -> None:
        self._given = given
        self._versions = versions
        self._waves = waves
        self._network = network
        self._distance = clock_distance
        self._workers = [_Worker(index, each, network) for index, each in enumerate(given)]
        self._number = itertools.count().__next__
        self._events: list[tuple[float, int, Done]] = []
        self._dues: list[tuple[float, int, SharedLink[_Transfer], int]] = []
        """Ends of transfers: time, number of the event, link, and the link's count of changes at the computation."""
        self._changed: dict[SharedLink[_Transfer], None] = {}
        self._clocks = np.zeros(len(given), dtype=np.int64)
        self._lengths = np.array([each.wave for each in given], dtype=np.int64)
        self._slowest = 0
        self._behind = len(given)
        """Number of virtual workers whose clock is the smallest."""
        self._waiting: dict[int, _Worker] = {}

    def simulation(self, jitter: float, seed: int) -> ClusterSimulation:
        several = len(self._given) > 1
        devices: dict[Hashable, SharedDevice] = defaultdict(SharedDevice)
        for worker, given in zip(self._workers, self._given, strict=True):
            worker.run = PipelineRun(
                given,
                self._versions,
                self._waves * given.wave,
                jitter,
                (seed, worker.index),
                synchronise=None if several else 0.0,
                wait=partial(self._wait, worker),
                devices={stage: devices[device] for stage, device in given.devices.items()},
            )
            self._note_staleness(worker)
            self._go_on(worker, 0.0)
        events, dues = self._events, self._dues
        while True:
            for link in self._changed:  # transfers have started or ended there
                if (when := link.due()) is not None:
                    heapq.heappush(dues, (when, self._number(), link, link.changes))
            self._changed.clear()
            if not events and not dues:
                break
            if dues and (not events or dues[0][0] <= events[0][0]):
                now, _, link, changes = heapq.heappop(dues)
                if changes == link.changes:
                    self._over(link, now)
            else:
                now, _, act = heapq.heappop(events)
                act(now)
        workers = [
            SimulatedWorker(each.wave, tuple(each.run.published), each.waited, tuple(each.synchronised), each.staleness)
            for each in self._workers
        ]
        traffic = {link.name: link.carried for link in self._network.links.values()}
        return ClusterSimulation(tuple(workers), self._waves, traffic)

    def _at(self, when: float, act: Done) -> None:
        heapq.heappush(self._events, (when, self._number(), act))

    def _go_on(self, worker: _Worker, now: float) -> None:
        """Advance the pipeline as far as no other virtual worker can influence it."""
        run = worker.run
        if now == worker.wakes:
            worker.wakes = math.inf
        run.advance(now if run.shares else math.inf)
        if run.wave_end is not None and not worker.synchronises:
            worker.synchronises = True
            pushed = partial(self._later, worker.latency, partial(self._pushed, worker))
            self._at(run.wave_end, partial(self._send, worker.push, done=pushed))
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        """Schedule the next event of a pipeline that others can slow down."""
        following = worker.run.next if worker.run.shares else None
        if following is not None and following < worker.wakes:
            worker.wakes = following
            self._at(following, partial(self._go_on, worker))

    def _pushed(self, worker: _Worker, now: float) -> None:
        """End the wave, since the update is on all servers. Virtual workers that waited for this wave may now pull."""
        worker.since = now
        clock = int(self._clocks[worker.index])
        self._clocks[worker.index] = clock + 1
        self._waiting[worker.index] = worker
        self._behind -= clock == self._slowest
        if self._behind:
            self._try_to_pull(worker, now)
            return
        self._slowest = int(self._clocks.min())
        self._behind = int((self._clocks == self._slowest).sum())
        for index in sorted(self._waiting):
            self._try_to_pull(self._waiting[index], now)

    def _try_to_pull(self, worker: _Worker, now: float) -> None:
        if not may_pull(int(self._clocks[worker.index]), self._slowest, self._distance):
            return
        del self._waiting[worker.index]
        worker.waited += now - worker.since
        self._note_staleness(worker)
        self._send(worker.pull, now, partial(self._later, worker.latency, partial(self._pulled, worker)))

    def _pulled(self, worker: _Worker, now: float) -> None:
        assert worker.run.wave_end is not None
        worker.synchronised.append(now - worker.run.wave_end)
        worker.synchronises = False
        worker.run.synchronised(now)
        self._go_on(worker, now)

    def _note_staleness(self, worker: _Worker) -> None:
        """Record what the weights that are pulled now lack for the last minibatch that uses them."""
        if len(self._workers) == 1:
            return
        version = (int(self._clocks[worker.index]) + 1) * worker.wave - 1  # the last one before the next pull
        last, end = version, self._waves * worker.wave
        while last < end and self._versions.version(last + 1) <= version:
            last += 1
        computed = -(-(last - 1) * self._lengths // worker.wave)
        lacking = computed - self._clocks * self._lengths
        lacking[worker.index] = 0
        worker.staleness = max(worker.staleness, int(lacking.max()))

    def _wait(self, worker: _Worker, now: float, given: Crossing | SharedDevice, done: Done) -> None:
        """Move what a stage receives from another node, or wait for its device."""

        def reached(when: float) -> None:
            done(when)
            self._wake(worker)

        if isinstance(given, Crossing):
            self._send(self._network.crossing(given), now, reached)
        else:
            given.take(now, reached)

    def _later(self, delay: float, act: Done, now: float) -> None:
        self._at(now + delay, act)

    def _send(self, moves: Moves, now: float, done: Done) -> None:
        if not moves:
            done(now)
            return
        transfer = _Transfer(len(moves), done)
        for link, nbytes in moves:
            link.add(now, nbytes, transfer)
            self._changed[link] = None

    def _over(self, link: SharedLink[_Transfer], now: float) -> None:
        over = link.take(now)
        self._changed[link] = None
        for transfer in over:
            transfer.left -= 1
            if not transfer.left:
                transfer.done(now)
