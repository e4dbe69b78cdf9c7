"""Chooses for one virtual worker which layers run on which device, and how many minibatches are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetpipe.planning.cluster import Cluster, Spot
from lightning_hetpipe.planning.memory import Sizes, StageMemory, optimizer_state, stage_memory
from lightning_hetpipe.planning.partition import partition
from lightning_hetpipe.planning.profile import Profile
from lightning_hetpipe.planning.simulate import Load, Simulation, StageTimes, simulate


@dataclass(frozen=True)
class ChosenStage:
    """A stage of a plan.

    Attributes:
        spot: The device.
        first, last: Its layers, both inclusive, by their index in the profile.
        times: What it takes for one minibatch; ``times.total`` of the slowest stage is T_max.
        memory: What it takes of its device.
        held: The most minibatches whose activations it holds at once.
    """

    spot: Spot
    first: int
    last: int
    times: StageTimes
    memory: StageMemory
    held: int

    @property
    def limit(self) -> int | None:
        """Bytes of its device; None where that is no limit."""
        return self.spot.device.memory

    @property
    def overflow(self) -> int:
        """Bytes that its device lacks; 0 where it fits."""
        return 0 if self.limit is None else max(0, self.memory.total - self.limit)


@dataclass(frozen=True)
class Tried:
    """What a number in flight came to.

    Attributes:
        in_flight: Nm.
        rate: Minibatches per second, simulated; None where no plan fits.
        bottleneck: T_max in seconds; None where no plan fits.
    """

    in_flight: int
    rate: float | None
    bottleneck: float | None


@dataclass(frozen=True)
class Help:
    """What would make a plan fit that does not.

    Attributes:
        in_flight: The largest Nm at which some plan fits; None if there is none.
        recompute: The largest Nm at which some plan fits with ``recompute=True``; None if there is none, or where that
            is set already.
        lacking: Bytes that devices of the plan lack, by stage; with so much more memory there it fits.
    """

    in_flight: int | None
    recompute: int | None
    lacking: dict[int, int]


@dataclass(frozen=True)
class Choice:
    """A plan for one virtual worker.

    Attributes:
        stages: In the order of the layers. Where nothing fits, those of the plan that lacks the least.
        in_flight: Nm.
        recompute: Whether it is meant for ``recompute=True``.
        rate: Minibatches per second, simulated.
        simulation: The run that said so.
        idle: Devices that are better left out.
        tried: The numbers in flight that were looked at.
        reasons: Why it is this one, in sentences.
        help: What would make it fit; None where it does.
    """

    stages: tuple[ChosenStage, ...]
    in_flight: int
    recompute: bool
    rate: float
    simulation: Simulation
    idle: tuple[Spot, ...]
    tried: tuple[Tried, ...]
    reasons: tuple[str, ...]
    help: Help | None = None

    @property
    def fits(self) -> bool:
        return not any(stage.overflow for stage in self.stages)

    @property
    def bottleneck(self) -> float:
        """T_max in seconds."""
        return max(stage.times.total for stage in self.stages)


def best_plan(
    profile: Profile,
    cluster: Cluster,
    spots: Sequence[Spot] | None = None,
    *,
    optimizer: str | float = "adam",
    ordered: bool = False,
    in_flight: int | None = None,
    recompute: bool = False,
    synchronise: float = 0.0,
) -> Choice:
    """The plan with the least T_max that fits, at the smallest Nm within 1% of the best throughput.

    Args:
        profile: The model's.
        cluster: Whose links connect the devices.
        spots: The virtual worker's devices; by default all of the cluster.
        optimizer: A name in :data:`~lightning_hetpipe.planning.memory.OPTIMIZERS`, or the bytes of state that it keeps
            for each byte of the weights.
        ordered: Whether stages are to lie on the devices in their given order; some may be left out all the same.
        in_flight: Nm, where it is not to be chosen.
        recompute: Whether forwards are computed again for their backwards.
        synchronise: Seconds that a wave's end waits for the parameter servers.

    Raises:
        SettingError: where the profile has no times of a device.
    """
    spots = cluster.spots if spots is None else tuple(spots)
    state = optimizer_state(optimizer)
    stages = min(len(spots), len(profile.layers))
    mean = [
        sum(t) / len(spots)
        for t in zip(*([a.forward + a.backward for a in profile.times_on(s.device)] for s in spots), strict=True)
    ]
    cuts = [*partition(mean, stages), len(profile.layers)]
    many = in_flight or stages
    times = []
    for spot, first, after in zip(spots, cuts, cuts[1:], strict=False):
        own = profile.times_on(spot.device)[first:after]
        times.append(StageTimes(sum(t.forward for t in own), sum(t.backward for t in own)))
    run = simulate(times, many, 20 * many, synchronise=synchronise)
    chosen = tuple(
        ChosenStage(
            spot,
            first,
            after - 1,
            each,
            stage_memory(
                Sizes.of(profile.layers, first, after - 1), many, [Load(held, held)], state=state, recompute=recompute
            ),
            held,
        )
        for spot, first, after, each, held in zip(spots, cuts, cuts[1:], times, run.held, strict=False)
    )
    return Choice(chosen, many, recompute, run.rate(many), run, tuple(spots[stages:]), (), ("a first version",), None)
