"""Memory and work of a stage whose layers a group of devices divides.

A *run* is a sequence of layers whose devices hand their channels on to each other.

The first device has all that an undivided stage has. If it computes a part of a run, it also assembles the run's whole
output beside its part, and the gradients. Its part of weights that are divided by rows is a copy in each version.

For each minibatch that the stage holds, another device has the whole inputs of its runs, and its part of everything
else that these runs keep. It also has its part of each version of the weights. While it computes, it has the gradients
of a run's input, of its part of the weights, and of what the run's largest layer keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.profile import Profile, layers_of_runs
from lightning_hetpipe.planning.model.stage_memory import more
from lightning_hetpipe.rules.channel_layouts import apportioned

if TYPE_CHECKING:
    from lightning_hetpipe.planning.model.estimate import StageEstimate


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
        runs = _runs(profile, counts)
        first = held * sum(run.output for run in runs) + copies * sum(run.rows for run in runs)
        first += max(run.longest for run in runs)
        whole = [stage.memory.total, *[_whole(runs, held)] * (len(slots) - 1)]
        apart = [first, *[_apart(runs, held, copies)] * (len(slots) - 1)]
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


def _runs(profile: Profile, layers: Iterable[int]) -> list[_RunBytes]:
    return [_RunBytes.of(profile, own) for own in layers_of_runs(profile.widths, layers)]


def _whole(runs: Sequence[_RunBytes], held: int) -> int:
    """Bytes of a device beside the first one that do not depend on its part: inputs, sums, and the largest
    gradient."""
    return held * sum(run.inputs + run.added for run in runs) + max(run.inputs + run.added for run in runs)


def _apart(runs: Sequence[_RunBytes], held: int, copies: float) -> float:
    """Bytes of which a device beside the first one has its part."""
    kept = held * sum(run.inner for run in runs) + copies * sum(run.weights for run in runs)
    return kept + max(run.weights for run in runs) + max(run.longest for run in runs)
