"""Stages whose layers a group of devices divides by their channels: each device's channels, times and memory.

A *run* is a sequence of layers whose devices hand their channels on to each other, so its layers have the same counts.

Times: Each device with channels gets the whole input of the run's first layer from the group's first device. It sends
back its part of the last layer's output. Gradients go the other way. For each minibatch, each device also gets its part
of the new weights, and gives back their gradients. Each pass through a run costs interpreter time, which devices do not
share. Counts are chosen so that the slowest device for a run, transfers included, takes least time. They are found by a
binary search over all possible times, since more channels never take less time.

Memory: The first device has all that an undivided stage has. If it computes a part of a run, it also assembles the
run's whole output beside its part, and the gradients. Its part of weights that are divided by rows is a copy in each
version. For each minibatch that the stage holds, another device has the whole inputs of its runs. It has its part of
everything else that these runs keep, and of each version of the weights. While it computes, it has the gradients of a
run's input, of its part of the weights, and of what the run's largest layer keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot, Link
from lightning_hetpipe.planning.model.profile import Profile, Times, layers_of_runs
from lightning_hetpipe.planning.model.stage_memory import more
from lightning_hetpipe.rules.channel_layouts import apportioned

if TYPE_CHECKING:
    from lightning_hetpipe.planning.model.estimate import StageEstimate

MOST_UNITS = 256
"""Finest division of a layer that is searched. A layer of more units is divided in the proportions that are found."""

MEMBER_CALL = 250e-6
"""Seconds of Python that one device's part of a run costs in one pass, besides its computation.

Meanwhile threads of other devices cannot run Python (``benchmarks/split_layers.py``, small layers).
"""


@dataclass(frozen=True)
class GroupTimes:
    """Times of each layer on a group of devices, on which undivided layers run on the first device.

    ``counts`` has, for each divided layer, the number of units of its run that each device computes.
    """

    times: Sequence[Times]
    counts: Mapping[int, tuple[int, ...]]


def group_times(
    profile: Profile,
    cluster: Cluster,
    slots: Sequence[DeviceSlot],
    most: Sequence[float] | None = None,
    shares: Sequence[float] | None = None,
) -> GroupTimes:
    """Divide the layers of ``profile`` among the devices ``slots``, the first of which holds the unsplit weights.

    Args:
        cluster: Cluster whose links connect the devices.
        most: Fraction of a layer's units for which each device has room. By default all units fit.
        shares: Share of each device. By default the fastest counts are searched.

    Raises:
        SettingError: if the profile has no times of a device.
    """
    own = [profile.times_on(slot.device) for slot in slots]
    times, counts = list(own[0]), dict[int, tuple[int, ...]]()
    for layers in layers_of_runs(profile.widths, profile.widths) if len(slots) > 1 else ():
        if not any(profile.widths[layer].units for layer in layers) or _units(profile, layers) == 1:
            continue  # it cannot be divided
        run = _DividedRun(profile, cluster, slots, own, layers)
        found = _fastest(run, most) if shares is None else apportioned(run.units, shares)
        if found is not None:
            for layer, each in zip(layers, run.times(found), strict=True):
                times[layer] = each
            counts |= dict.fromkeys(layers, found)
    return GroupTimes(times, counts)


def balanced(seconds: Sequence[Sequence[float]], units: int) -> tuple[int, ...] | None:
    """Find counts that add up to ``units`` with the least time of the slowest member. None if they cannot.

    ``seconds`` has for each member the ascending times of 0, 1, ... units. Of several solutions, return the one that
    gives the first member most, then the second member, and so on.
    """

    def within(limit: float) -> list[int]:
        return [sum(each <= limit for each in own) - 1 for own in seconds]

    limits = sorted({each for own in seconds for each in own})
    low, high = 0, len(limits) - 1
    if sum(within(limits[high])) < units:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(within(limits[middle])) >= units else (middle + 1, high)
    counts, left = list[int](), units
    for most in within(limits[low]):
        counts.append(min(most, left))
        left -= counts[-1]
    return tuple(counts)


def _fastest(run: _DividedRun, most: Sequence[float] | None) -> tuple[int, ...] | None:
    """Find the fastest counts for which devices have room, or None if the first device alone is as fast."""
    units = run.units
    caps = [units] * len(run.seconds) if most is None else [int(units * part) for part in most]
    found = balanced([own[: cap + 1] for own, cap in zip(run.seconds, caps, strict=True)], units)
    return found if found is not None and found[0] != units and run.longest(found) < run.whole else None


def _units(profile: Profile, layers: Sequence[int]) -> int:
    """Return the largest number of units into which all of ``layers`` can be divided, up to :data:`MOST_UNITS`."""
    return min((MOST_UNITS, *(units for layer in layers for units in profile.widths[layer].units.values())))


class _DividedRun:
    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        slots: Sequence[DeviceSlot],
        own: Sequence[Sequence[Times]],
        layers: Sequence[int],
    ) -> None:
        first, last = layers[0], layers[-1]
        self.units = _units(profile, layers)
        self._layers = layers
        self._own = own
        calls = profile.called(first)
        came = profile.layers[first].given or (profile.layers[first - 1].output if first else 0)
        goes, sums = profile.layers[last].output, profile.widths[last].sums
        weights = [profile.layers[layer].parameters for layer in layers]
        gradients = [profile.layers[layer].parameters - profile.layers[layer].frozen for layer in layers]
        both = (sum(weights) + calls * sum(gradients)) / 2  # the former on a forward's way, the latter on a backward's

        def transfer(link: Link, nbytes: float) -> float:
            return calls * link.seconds(round(nbytes / calls))

        links = [cluster.link_between(slots[0], slot) for slot in slots]
        names = [profile.name_of(slot.device) for slot in slots]
        self._moved = [
            [
                (
                    transfer(link, came) + link.seconds(round(both * count / self.units)),
                    transfer(link, goes if sums else goes * count / self.units),
                )
                if count
                else (0.0, 0.0)
                for count in range(self.units + 1)
            ]
            for link in links
        ]
        self._computed = [
            [
                profile.widths[layer].seconds(name, times[layer].forward + times[layer].backward, self.units)
                for layer in self._layers
            ]
            for name, times in zip(names, own, strict=True)
        ]
        self._called = calls * len(slots) * MEMBER_CALL
        self.seconds: list[list[float]] = []
        for moved, computed in zip(self._moved, self._computed, strict=True):
            takes = [
                2 * (sum(moved[count]) + self._called * (count > 0)) + sum(each[count] for each in computed)
                for count in range(self.units + 1)
            ]
            self.seconds.append([*accumulate(takes, max)])
        self.whole = sum(own[0][layer].forward + own[0][layer].backward for layer in layers)

    def longest(self, counts: Sequence[int]) -> float:
        return max(own[count] for own, count in zip(self.seconds, counts, strict=True))

    def times(self, counts: Sequence[int]) -> list[Times]:
        """Return the times of each layer on the slowest device, with transfers in the first and last layer.

        Updates run on the first device, which has the weights.
        """
        longest = max(range(len(counts)), key=lambda member: self.seconds[member][counts[member]])
        count = counts[longest]
        before, behind = self._moved[longest][count]
        found = []
        for number, layer in enumerate(self._layers):
            whole = self._own[longest][layer]
            total = whole.forward + whole.backward
            part = self._computed[longest][number][count] / total if total else 0.0
            extra = (before + self._called) * (number == 0) + behind * (layer == self._layers[-1])
            found.append(Times(whole.forward * part + extra, whole.backward * part + extra, self._own[0][layer].update))
        return found


@dataclass(frozen=True)
class DividedStage:
    """Group of devices that divides layers of a stage. Its first device holds all undivided layers.

    Attributes:
        counts: For each divided module by name, the number of units that each device computes.
        shares: Fraction of the divided work for each device, from 0 to 1.
        taken: Bytes that each device takes.
        room: Fraction of the divided layers' units for which each device has room, from 0 to 1.
    """

    slots: tuple[DeviceSlot, ...]
    counts: Mapping[str, tuple[int, ...]]
    shares: tuple[float, ...]
    taken: tuple[int, ...]
    room: tuple[float, ...]

    @property
    def overflow(self) -> int:
        """Bytes that devices lack, in sum."""
        pairs = [(slot.device.memory, taken) for slot, taken in zip(self.slots, self.taken, strict=True)]
        return sum(max(0, taken - limit) for limit, taken in pairs if limit is not None)

    @classmethod
    def of(
        cls,
        stage: StageEstimate,
        slots: tuple[DeviceSlot, ...],
        profile: Profile,
        counts: Mapping[int, tuple[int, ...]],
        recompute: bool = False,
    ) -> DividedStage:
        """Estimate a stage on the group ``slots``, from the estimate ``stage`` for the first device alone.

        ``counts`` has, for each layer, the number of units that each device computes. With ``recompute``, the forward
        of one minibatch at a time is recomputed.
        """
        times = profile.times[stage.slot.device.name]
        work = [0.0] * len(slots)
        for layer, those in counts.items():
            for member, count in enumerate(those):
                work[member] += (times[layer].forward + times[layer].backward) * count / sum(those)
        total = sum(work) or 1.0
        parts = [max(those[member] / sum(those) for those in counts.values()) for member in range(len(slots))]
        held = min(1, stage.held) if recompute else stage.held
        copies = stage.memory.versions / stage.memory.weights if stage.memory.weights else 0.0
        runs = [_RunBytes.of(profile, layers) for layers in layers_of_runs(profile.widths, counts)]
        longest = max(run.longest for run in runs)
        # Another device than the first has inputs and sums whole, and the largest gradient. Of the rest it has a part.
        came = [run.inputs + run.added for run in runs]
        whole = [stage.memory.total, *[held * sum(came) + max(came)] * (len(slots) - 1)]
        first = held * sum(run.output for run in runs) + copies * sum(run.rows for run in runs) + longest
        weights = [run.weights for run in runs]
        other = held * sum(run.inner for run in runs) + copies * sum(weights) + max(weights) + longest
        apart = [first, *[other] * (len(slots) - 1)]
        own = zip(whole, apart, parts, strict=True)
        taken = [round(have + each * part) if part or not n else 0 for n, (have, each, part) in enumerate(own)]
        limits = [slot.device.memory for slot in slots]
        room = [
            1.0 if limit is None else min(1.0, max(0.0, limit - have) / max(1.0, each))
            for limit, have, each in zip(limits, whole, apart, strict=True)
        ]
        return cls(
            slots,
            {
                name: apportioned(units, those)
                for layer, those in sorted(counts.items(), key=lambda each: times[each[0]].forward)  # tied: the longer
                for name, units in profile.widths[layer].units.items()
            },
            tuple(each / total for each in work),
            tuple(taken),
            tuple(room),
        )


@dataclass(frozen=True)
class _RunBytes:
    """Bytes of a run of layers.

    Attributes:
        inputs: Inputs of the run, whole on each device.
        inner: Everything else that one minibatch's forward keeps.
        output: Output of the run.
        added: Output of the run if each device computes a whole summand of it, else 0.
        rows: Weights that are divided by rows.
        longest: What the layer that keeps most keeps.
    """

    inputs: int
    inner: int
    output: int
    added: int
    weights: int
    rows: int
    longest: int

    @classmethod
    def of(cls, profile: Profile, layers: Sequence[int]) -> _RunBytes:
        own = [profile.layers[layer] for layer in layers]
        inputs = kept = 0
        for number, layer in zip(layers, own, strict=True):
            if number - 1 in layers:
                kept += more(profile.layers[number - 1], layer)
            else:
                inputs += layer.given or (profile.layers[number - 1].output if number else 0)
                kept += layer.kept
        sums = [profile.widths[layer].sums for layer in layers]
        return cls(
            inputs,
            inner=max(0, kept - inputs),
            output=own[-1].output,
            added=own[-1].output * sums[-1],
            weights=sum(layer.parameters for layer in own),
            rows=sum(layer.parameters * each for layer, each in zip(own, sums, strict=True)),
            longest=max(layer.kept for layer in own),
        )
