"""Planning problem: the model, the devices, and the requirements of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.costs import Costs, Division, Fits, Room, kinds_of
from lightning_hetpipe.planning.model.estimate import INSTANT, Estimate, StageEstimate, times_on
from lightning_hetpipe.planning.model.profile import Profile, UserBytes
from lightning_hetpipe.planning.model.simulate import StageLoad, simulate
from lightning_hetpipe.planning.model.stage_memory import StageBytes
from lightning_hetpipe.planning.search.divider import Divider
from lightning_hetpipe.rules.versions import STASH, Versions, WeightPolicy

WAVES = 6
"""Simulated waves of Nm minibatches each. The pipeline fills in the first two waves and drains in the last."""

MINIBATCHES = 48
"""Smallest number of simulated minibatches."""

Seen: TypeAlias = tuple[StageLoad, int, int]
"""Load of stages other than the last one that start between two boundaries, both inclusive."""


@dataclass(frozen=True)
class PlanningProblem:
    """Layers to divide among the devices of one virtual worker, and all requirements of a plan except Nm.

    Attributes:
        cluster: Cluster whose links connect the devices.
        slots: Devices of the virtual worker, by default all devices of the cluster.
        optimizer: A name in :data:`~lightning_hetpipe.planning.model.stage_memory.OPTIMIZERS`, or the bytes of state
            for each byte of the weights.
        ordered: Whether stages lie on the devices in their given order. Some devices may be left out.
        recompute: Whether forwards are recomputed for their backwards.
        stages: k, at most one for each layer and each device, or None to choose it.
        synchronise: Seconds that a wave's end waits for the parameter servers.
        every: Minibatches of an optimizer step.
        spread: Whether ``in_flight=1`` asks for a spread run, as it does in a fit. Exceptions are fits that compile,
            have several virtual workers, or recompute forwards of several stages. A single device asks for it, too.
        brief: Whether a quickly found plan will do, which may be some percent slower. It halves the time of the search
            for 64 devices.
        progress: Called after each simulation.

    Raises:
        SettingError: for an unknown optimizer.
    """

    profile: Profile
    cluster: Cluster
    slots: Sequence[DeviceSlot] = ()
    _: KW_ONLY
    optimizer: str | float = "adam"
    ordered: bool = False
    recompute: bool = False
    stages: int | None = None
    synchronise: float = 0.0
    weights: WeightPolicy = STASH
    every: int = 1
    spread: bool = False
    brief: bool = False
    progress: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", tuple(self.slots) or self.cluster.slots)

    @property
    def may_spread(self) -> bool:
        """True if one minibatch in flight makes a spread run, not a pipeline."""
        return self.spread and ((self.stages or len(self.slots)) == 1 or not self.recompute)

    def versions(self, in_flight: int) -> Versions:
        """Return the weight versions that minibatches use at Nm = ``in_flight``."""
        return Versions(self.weights, in_flight, self.every)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of stages on each kind of device. With ``ordered``, each device is a kind of its own."""
        return Costs(self.profile, self.cluster, kinds_of(self.cluster, self.slots, self.ordered), self.recompute)

    @cached_property
    def divider(self) -> Divider:
        """Divider of the layers among the devices."""
        return Divider(self.costs, self.stages, self.ordered)

    def room(self, in_flight: int, *, full: bool = False, share: float = 1.0, seen: Iterable[Seen] = ()) -> Room:
        """Return the room for stages in a ``share`` of devices' memory.

        A stage holds at least one minibatch after its forward, and gradients after its backward. The first of several
        stages holds all minibatches that start at once, as their forwards come before any backward. Stages before the
        last hold what was ``seen``. With ``full`` they hold all minibatches in flight, of which the last stage computes
        one.
        """
        versions = self.versions(in_flight)
        copies, waiting = versions.copies, in_flight - 1 if full else 0
        loads = [StageLoad(1, waiting, 1), StageLoad(0, waiting + 1, 0)]
        last = self.memory.totals(loads, copies) + self.profile.user.total(in_flight, self.memory.state)
        if full:
            loads.append(StageLoad(in_flight, 0, 1))
        before = self.memory.totals(loads, copies)
        if not full and not self.profile.calls:
            before[0] = self.memory.totals([*loads, StageLoad(versions.ahead(0), 0, 1)], copies)[0]
        for load, first, end in seen:
            rows = slice(first, end + 1)
            before[rows] = np.maximum(before[rows], self.memory.totals((load,), copies)[rows])

        @cache
        def fits(limit: int | None) -> tuple[Fits, Fits]:
            most = math.inf if limit is None else limit * share
            return before <= most, last <= most

        held = (self.memory.totals((StageLoad(number, 0, 1),), copies) for number in (in_flight, 1))
        return Room(lambda kind: fits(self.costs.kinds[kind].device.memory), *held)

    @cached_property
    def memory(self) -> StageBytes:
        """Bytes of stages."""
        return StageBytes(self.profile.layers, self.optimizer, self.recompute)

    def surely_lacks(self, division: Division, in_flight: int) -> bool:
        """Return True if a stage of ``division`` has no room for what it holds when its first backward is ready.

        Until then only forwards ran on this stage and before, at the pace of the slowest stage. A forward that is ready
        before the first backward runs before it. Without this, the plan for 2 nodes of 4 is 6% slower
        (``benchmarks/planning.py``).
        """
        if self.profile.calls:
            return False
        costs, kinds, versions = self.costs, division.kinds, self.versions(in_flight)
        places = [*pairwise((*division.splits, costs.layers))]
        forwards = [
            float(costs.forward[kind][end] - costs.forward[kind][start])
            + (float(costs.hop(kinds[index - 1], kind)[start]) if index else 0.0)
            for index, (kind, (start, end)) in enumerate(zip(kinds, places, strict=True))
        ]
        slowest = [0.0, *accumulate(forwards, max)]
        behind, at_once = division.takes[-1], versions.ahead(0)
        for index in range(len(kinds) - 2, -1, -1):
            behind += forwards[index]
            most = at_once * slowest[index]
            held = at_once if behind >= most else max(1, math.ceil(behind / slowest[index] * (1 - 1e-9)))
            limit = costs.kinds[kinds[index]].device.memory
            load = StageLoad(held, 0, 1)
            if limit is not None and self.memory.stage(*places[index], load, versions.copies).total > limit:
                return True
            behind += division.takes[index] - forwards[index]
        return False

    def estimate(
        self, slots: Sequence[DeviceSlot], splits: Sequence[int], in_flight: int, spread: bool = False
    ) -> Estimate:
        """Estimate stages on ``slots`` that start at the layers ``splits``, with ``spread`` stages of a spread run.

        Raises:
            SettingError: if the profile has no times of a device.
        """
        profile, versions = self.profile, self.versions(in_flight)
        times, pipeline = times_on(profile, self.cluster, slots, splits, in_flight, self.recompute)
        period = versions.period
        waves = max(WAVES, -(-MINIBATCHES // period))
        run = simulate(
            pipeline.stages,
            in_flight,
            waves * period,
            step=pipeline.step,
            synchronise=self.synchronise,
            visits=pipeline.visits,
            versions=versions,
        )
        begin, end = waves // 3 * period, (waves - 1) * period
        seconds = run.published[end - 1] - run.published[begin - 1]
        # Versions come in bunches. A window between two bunches may count up to 2% too many.
        rate = (end - begin) / max(seconds, INSTANT, (end - begin) * max(each.total for each in times))
        stages = list[StageEstimate]()
        for index, (first, after) in enumerate(pairwise((*splits, len(profile.layers)))):
            user = profile.user if index + 1 == len(slots) else UserBytes()
            if spread:
                taken = {StageLoad(1, 0): self.memory.spread(first, after, user)}
            else:
                more = user.total(in_flight, self.memory.state)
                loads = run.heaviest(index)
                taken = {load: self.memory.stage(first, after, load, versions.copies, more) for load in loads}
            most = max(taken, key=lambda load: taken[load].total)
            place = slots[index], first, after - 1
            stages.append(StageEstimate(*place, times[index], taken[most], run.held[index], most))
        return Estimate(tuple(stages), versions, self.recompute, rate, run, spread)
