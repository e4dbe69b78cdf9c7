"""What to expect of stages: how long they take, how much memory, and how many minibatches a second that makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetpipe.planning.cluster import Cluster, Spot
from lightning_hetpipe.planning.memory import Sizes, StageMemory, first_minibatch, stage_memory
from lightning_hetpipe.planning.profile import Profile
from lightning_hetpipe.planning.simulate import Load, Simulation, StageTimes, simulate

WAVES = 6
"""Simulated, each of Nm minibatches. In the first two the pipeline fills, and in the last it drains."""

INSTANT = 1e-12
"""Seconds that are none: layers may be said to take no time."""

MINIBATCHES = 48
"""Simulated at the least."""


@dataclass(frozen=True)
class ChosenStage:
    """A stage of a plan.

    Attributes:
        spot: The device.
        first, last: Its layers, both inclusive, by their index in the profile.
        times: What it takes for one minibatch; ``times.total`` of the slowest stage is T_max.
        memory: What it takes of its device.
        held: The most minibatches whose activations it holds at once.
        load: What it holds when it takes most.
        first_minibatch: Bytes that the first minibatch of a fit takes on its device, where it runs whole; 0 but for the
            last stage.
    """

    spot: Spot
    first: int
    last: int
    times: StageTimes
    memory: StageMemory
    held: int
    load: Load
    first_minibatch: int = 0

    @property
    def limit(self) -> int | None:
        """Bytes of its device; None where that is no limit."""
        return self.spot.device.memory

    @property
    def overflow(self) -> int:
        """Bytes that its device lacks; 0 where it fits."""
        return 0 if self.limit is None else max(0, self.memory.total - self.limit, self.first_minibatch - self.limit)


@dataclass(frozen=True)
class Outlook:
    """What to expect of one virtual worker.

    Attributes:
        stages: In the order of the layers.
        in_flight: Nm.
        recompute: Whether forwards are computed again for their backwards.
        rate: Minibatches per second, simulated.
        simulation: The run that said so.
    """

    stages: tuple[ChosenStage, ...]
    in_flight: int
    recompute: bool
    rate: float
    simulation: Simulation

    @property
    def fits(self) -> bool:
        return not any(stage.overflow for stage in self.stages)

    @property
    def bottleneck(self) -> float:
        """T_max in seconds."""
        return max(stage.times.total for stage in self.stages)


def outlook(
    profile: Profile,
    cluster: Cluster,
    spots: Sequence[Spot],
    cuts: Sequence[int],
    in_flight: int,
    *,
    state: float = 0.0,
    recompute: bool = False,
    synchronise: float = 0.0,
    watched: bool = True,
) -> Outlook:
    """What to expect of stages on ``spots`` that start at the layers ``cuts``.

    Lightning's step takes as long as the updates of the stage whose take longest, as devices work side by side. Where
    forwards are computed again, a backward takes that much longer, but for the last stage's.

    Args:
        profile: The model's.
        cluster: Whose links connect the devices.
        spots: The device of each stage.
        cuts: The first layer of each stage.
        in_flight: Nm.
        state: The optimizer's bytes for each byte of the weights.
        recompute: Whether forwards are computed again for their backwards.
        synchronise: Seconds that a wave's end waits for the parameter servers.
        watched: Whether the first minibatch of a fit is to run on the last stage's device, whole.

    Raises:
        SettingError: where the profile has no times of a device.
    """
    times = stage_times_on(profile, cluster, spots, cuts, recompute)
    ends = [*cuts[1:], len(profile.layers)]
    step = max(
        sum(each.update for each in profile.times_on(spot.device)[first:after])
        for spot, first, after in zip(spots, cuts, ends, strict=True)
    )
    waves = max(WAVES, -(-MINIBATCHES // in_flight))
    run = simulate(times, in_flight, waves * in_flight, step=step, synchronise=synchronise)
    stages = []
    for index, (spot, first, after) in enumerate(zip(spots, cuts, ends, strict=True)):
        sizes = Sizes.of(profile.layers, first, after - 1)
        taken = {
            load: stage_memory(sizes, in_flight, [load], state=state, recompute=recompute)
            for load in sorted({load for _, load in run.loads(index)})
        }
        most = max(taken, key=lambda load: taken[load].total)
        whole = first_minibatch(profile.layers, state) if watched and after == len(profile.layers) else 0
        stages.append(ChosenStage(spot, first, after - 1, times[index], taken[most], run.held[index], most, whole))
    begin, end = waves // 3 * in_flight, (waves - 1) * in_flight
    seconds = run.published[end - 1] - run.published[begin - 1]
    # Versions come in bunches, so that a window may begin behind one and end behind another: up to 2% too many.
    rate = (end - begin) / max(seconds, INSTANT, (end - begin) * max(each.total for each in times))
    return Outlook(tuple(stages), in_flight, recompute, rate, run)


def stage_times_on(
    profile: Profile, cluster: Cluster, spots: Sequence[Spot], cuts: Sequence[int], recompute: bool = False
) -> list[StageTimes]:
    """What stages on ``spots`` that start at the layers ``cuts`` take; see :func:`outlook`."""
    found = []
    for index, (spot, first, after) in enumerate(zip(spots, cuts, [*cuts[1:], len(profile.layers)], strict=True)):
        own = profile.times_on(spot.device)[first:after]
        forward, backward = sum(each.forward for each in own), sum(each.backward for each in own)
        last = index + 1 == len(spots)
        found.append(
            StageTimes(
                forward,
                backward + (forward if recompute and not last else 0.0),
                receive=_crossing(profile, cluster, spots[index - 1], spot, first) if index else 0.0,
                receive_gradient=0.0 if last else _crossing(profile, cluster, spot, spots[index + 1], after),
            )
        )
    return found


def _crossing(profile: Profile, cluster: Cluster, one: Spot, other: Spot, boundary: int) -> float:
    return cluster.link_between(one, other).seconds(profile.layers[boundary - 1].output)
