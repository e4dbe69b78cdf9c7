"""Plan of ``plan.json``: which layers run on which device, how many minibatches are in flight, and the estimate."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from os import PathLike
from typing import Annotated, Any, cast

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import Allocation, most_stale
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Bytes, Seconds
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.json_file import read, write
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedStage, PlannedWorker, Problem
from lightning_hetpipe.planning.plan.table import table
from lightning_hetpipe.rules.versions import POLICIES, STASH, Versions
from lightning_hetpipe.rules.waves import PLACEMENTS
from lightning_hetpipe.settings import MOST, Bounds, CheckedRecord, Choices, Length, Size

VERSION = 1

MOST_IN_FLIGHT = 1000
"""Largest number of minibatches in flight, and of stages: each takes a thread."""

MOST_RANKS = 8
"""Largest number of machines whose NODE_RANK is listed."""


@dataclass(frozen=True)
class Plan(CheckedRecord):
    """Stages on devices for all virtual workers. Fields with a default may be missing in a file.

    Attributes:
        in_flight: Nm of every virtual worker.
        wave: W of virtual workers without a wave of their own.
        clock_distance: D.
        bottleneck_s: T_max, the seconds of the slowest stage of all virtual workers.
        minibatches_per_second: Simulated rate of all virtual workers together.
        layers: Names of the layers, in order.
        recompute: Whether forwards are recomputed for their backwards. A run and the figures follow it.
        spread: Whether this is a spread run. A run and the figures follow it.
        weights: Name of the weight policy for the run and the figures.
        accumulate_grad_batches: Minibatches of an optimizer step for which the figures are.
        allocation: Rule by which virtual workers got their devices: "np", "ed", "hd", "placed", "auto", or empty for
            given devices.
        placement: Setting for which server holds which parameter.
        network_bytes: Bytes that cross the network between nodes for each minibatch.
    """

    model: str
    in_flight: Annotated[int, Bounds(1, MOST_IN_FLIGHT)]
    wave: Size
    clock_distance: Annotated[int, Bounds(0, MOST)]
    bottleneck_s: Seconds
    minibatches_per_second: Annotated[float, Bounds(0)]
    virtual_workers: Annotated[tuple[PlannedWorker, ...], Length(1), "a list of at least one virtual worker"]
    layers: tuple[Annotated[str, "text"], ...]
    recompute: bool = False
    spread: bool = False
    weights: Annotated[str, Choices([*POLICIES])] = STASH.name
    accumulate_grad_batches: Size = 1
    allocation: str = ""
    placement: Annotated[str, Choices(PLACEMENTS)] = "size"
    network_bytes: Bytes = 0

    @classmethod
    def of(
        cls,
        found: Estimate | Allocation,
        model: str,
        layers: Sequence[str],
        cluster: Cluster,
        estimated: Collection[str] = (),
        *,
        clock_distance: int = 0,
        nominal: Collection[DeviceSlot] = (),
    ) -> Plan:
        """Make the plan of one virtual worker, or of all virtual workers of an allocation.

        Args:
            found: Choice of :func:`~lightning_hetpipe.planning.search.choice.best_plan`, estimate for given stages, or
                allocation.
            cluster: The cluster for which it was found.
            estimated: Names of the devices whose times come from a data sheet.
            clock_distance: D of one virtual worker. An allocation has its own.
            nominal: The devices whose memory comes from a data sheet.
        """
        if isinstance(found, Allocation):
            workers = zip(found.choices, found.rates, found.lengths, strict=True)
            return replace(
                cls.of(found.choices[0], model, layers, cluster),
                wave=found.lengths[0],
                clock_distance=found.clock_distance,
                bottleneck_s=max(choice.bottleneck for choice in found.choices),
                minibatches_per_second=found.rate,
                virtual_workers=tuple(PlannedWorker.of(*each, cluster, estimated, nominal) for each in workers),
                allocation=found.name,
                placement=found.placement,
                network_bytes=round(found.network_bytes),
            )
        return cls(
            model=model,
            in_flight=found.in_flight,
            wave=found.in_flight,
            clock_distance=clock_distance,
            bottleneck_s=found.bottleneck,
            minibatches_per_second=found.rate,
            virtual_workers=(PlannedWorker.of(found, found.rate, None, cluster, estimated, nominal),),
            layers=tuple(layers),
            recompute=found.recompute,
            spread=found.spread,
            weights=found.versions.policy.name,
            accumulate_grad_batches=found.versions.every,
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read ``plan.json``.

        Raises:
            SettingError: one sentence with the file, the key and the fault.
        """
        return cast(Plan, read(path, cls, VERSION))

    def save(self, path: str | PathLike[str]) -> None:
        """Write ``plan.json``, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        write(path, {"schema_version": VERSION, **asdict(self)})

    def __str__(self) -> str:
        return table(self)

    def of_worker(self, index: int) -> Plan:
        """Return the plan of virtual worker ``index`` alone. Of a shared device's free memory it gets an equal part."""
        worker = self.virtual_workers[index]
        stages = tuple(self._own_part(stage) for stage in worker.stages)
        return replace(self, virtual_workers=(replace(worker, stages=stages),))

    def _own_part(self, stage: PlannedStage) -> PlannedStage:
        """Limit a stage to its own bytes and an equal part of the bytes that all stages on its device leave free."""
        there = [[each for each in worker.stages if each.at == stage.at] for worker in self.virtual_workers]
        if (sharing := sum(map(bool, there))) == 1 or stage.memory_limit_bytes is None:
            return stage
        left = stage.memory_limit_bytes - sum(each.memory_bytes for own in there for each in own)
        return replace(stage, memory_limit_bytes=stage.memory_bytes + max(0, left) // sharing)

    @property
    def fingerprint(self) -> str:
        """Checksum of the whole plan. Plans have equal checksums if and only if they are equal, where 1 equals 1.0."""
        return sha256(json.dumps(_plain(asdict(self)), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def workers_on_nodes(self) -> dict[str, int]:
        """Number of virtual workers on each machine, by the machine of their last stage.

        Machines are in the order of their NODE_RANK: first machines of last stages by virtual worker, then others.
        """
        led = Counter(worker.leader for worker in self.virtual_workers)
        return {**led, **{node: led[node] for worker in self.virtual_workers for node in worker.nodes}}

    @property
    def node_ranks(self) -> str:
        """The NODE_RANK of each machine, as text."""
        words = [f"NODE_RANK={number} on {node}" for number, node in enumerate(self.workers_on_nodes)]
        return ", ".join(words[:MOST_RANKS]) + (" and so on" if len(words) > MOST_RANKS else "")

    def served(self, node: str) -> list[tuple[int, int]]:
        """List the stages on ``node`` whose virtual worker has its last stage elsewhere, as (virtual worker, stage)."""
        workers = enumerate(self.virtual_workers)
        return [
            (number, index)
            for number, worker in workers
            for index, stage in enumerate(worker.stages)
            if stage.node == node != worker.leader
        ]

    @property
    def versions(self) -> Versions:
        """Weight versions that minibatches use."""
        return Versions(POLICIES[self.weights], self.in_flight, self.accumulate_grad_batches)

    @property
    def waves(self) -> tuple[int, ...]:
        """W_v of each virtual worker."""
        return tuple(self.wave if worker.wave is None else worker.wave for worker in self.virtual_workers)

    @property
    def global_staleness(self) -> int:
        """s_global: the most minibatches of one virtual worker that another's weights lack. With N = 1, s_local."""
        return most_stale(self.waves, self.in_flight, self.clock_distance)

    def problems(self, cluster: Cluster | None = None) -> Iterator[Problem]:
        """Yield the faults that keep the plan from running on any devices, and on the devices of ``cluster``."""
        taken: dict[tuple[str, int], tuple[int, bool]] = {}
        at: dict[tuple[str, int], dict[str, PlannedStage | PlannedMember]] = {}
        for index, worker in enumerate(self.virtual_workers):
            next_layer = 0
            for number, stage in enumerate(worker.stages):
                place, is_last = f"virtual_workers[{index}].stages[{number}]", number + 1 == len(worker.stages)
                yield from stage.problems(place, next_layer, len(self.layers))
                next_layer = stage.last_layer + 1
                for key, each in stage.members(place).items():
                    at.setdefault(each.at, {})[key] = each
                    other, shares = taken.setdefault(each.at, (index, is_last))
                    if other != index and not (shares and is_last):
                        said = f"is '{each.place}', which is virtual worker {other}'s, too, and only last stages"
                        yield Problem(f"{key}.device", f"{said} share a device")
                    if cluster is not None:
                        yield from each.problems_on(cluster, key)
            if next_layer != len(self.layers):
                said = f"is {next_layer - 1}, and the model's last layer is {len(self.layers) - 1}"
                yield Problem(f"{place}.last_layer", said)
        slots = {} if cluster is None else cluster.slots_by_place
        for device, on_device in at.items():
            yield from _memory_problems(on_device, slots[device].device.memory if device in slots else None)

    def check(self, cluster: Cluster | None = None) -> None:
        """Refuse a plan that cannot be run.

        Raises:
            SettingError: with the first fault of ``problems(cluster)``.
        """
        found = list(self.problems(cluster))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise SettingError(f"the plan cannot be run: {found[0].place} {found[0].said}{more}; plan anew")

    def merged(self, layers: Sequence[str]) -> Plan:
        """Adapt the plan to ``layers``, each named like the first of the plan's layers for which it stands.

        A stage that begins within such a layer begins behind it. A plan with a stage without layers stays unchanged.
        """
        begins = [sum(name in layers for name in self.layers[:number]) for number in range(len(self.layers) + 1)]
        workers = []
        for worker in self.virtual_workers:
            spans = [(begins[stage.first_layer], begins[stage.last_layer + 1] - 1) for stage in worker.stages]
            if any(last < first for first, last in spans):
                return self
            stages = [
                replace(stage, first_layer=first, last_layer=last)
                for stage, (first, last) in zip(worker.stages, spans, strict=True)
            ]
            workers.append(replace(worker, stages=tuple(stages)))
        return replace(self, layers=tuple(layers), virtual_workers=tuple(workers))

    def differences(self, layers: Sequence[str]) -> str | None:
        """Describe the first difference to a model with ``layers``. None if the plan is for that model."""
        pairs = enumerate(zip(self.layers, layers, strict=False))
        other = next(
            (f"layer {n} is '{mine}' there and '{theirs}' here" for n, (mine, theirs) in pairs if mine != theirs), ""
        )
        if len(self.layers) == len(layers):
            return f"{other} (of {len(layers)} layers)" if other else None
        shorter, longer = sorted((self.layers, tuple(layers)), key=len)
        where = "here" if longer == tuple(layers) else "there"
        other = other or f"'{longer[len(shorter)]}' and what follows is {where} only"
        return f"it has {len(self.layers)} layers and the model {len(layers)}; {other}"

    def slots(self, cluster: Cluster) -> list[DeviceSlot]:
        """Return the device of ``cluster`` for each stage of the first virtual worker.

        Raises:
            SettingError: if the cluster lacks a device, or if :meth:`check` refuses the plan.
        """
        self.check(cluster)
        return [cluster.slots_by_place[stage.at] for stage in self.virtual_workers[0].stages]


def _memory_problems(on_device: Mapping[str, PlannedStage | PlannedMember], memory: int | None) -> Iterator[Problem]:
    """Yield faults of stages, by their keys, that take too much of one device's ``memory``, alone or together."""
    every = [*on_device.values()]
    limits = [limit for limit in (*(each.memory_limit_bytes for each in every), memory) if limit is not None]
    limit, taken = min(limits, default=math.inf), sum(each.memory_bytes for each in every)
    too_large = {key: each.memory_bytes for key, each in on_device.items() if each.memory_bytes > limit}
    for key, size in too_large.items():
        said = f"is {in_bytes(size)}, {in_bytes(size - limit)} more than {every[0].place} has"
        yield Problem(f"{key}.memory_bytes", said)
    if not too_large and taken > limit:
        together = f"{in_bytes(taken)} with what else lies on {every[0].place}"
        said = f"makes {together}, {in_bytes(taken - limit)} more than it has"
        yield Problem(f"{[*on_device][-1]}.memory_bytes", said)


def _plain(value: Any) -> Any:
    """Convert ``value`` to JSON's types, with whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, bool | float) and float(value).is_integer() else value
