"""Planning problem: the model, the devices, and what is asked of a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.costs import Costs, MemoryBound, kinds_of
from lightning_hetpipe.planning.model.estimate import Estimate, estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.model.spread_memory import SpreadMemory
from lightning_hetpipe.rules.versions import STASH, Versions, WeightPolicy


@dataclass(frozen=True)
class PlanningProblem:
    """Layers that are to be divided among the devices of one virtual worker.

    Attributes:
        profile: The model's.
        cluster: Whose links connect the devices.
        slots: The virtual worker's devices.
        ordered: Whether stages are to lie on them in their order; some may be left out all the same.
        state: The optimizer's bytes for each byte of the weights.
        recompute: Whether forwards are computed again for their backwards.
        stages: k, at most one for each layer and each device; None for as many as are of use.
        synchronise: Seconds that a wave's end waits for the parameter servers.
        weights: The weight policy.
        every: Minibatches of an optimizer step.
        spread: What devices hold with one minibatch in flight, where that is a spread run; None where it is a pipeline.
    """

    profile: Profile
    cluster: Cluster
    slots: Sequence[DeviceSlot]
    ordered: bool = False
    state: float = 0.0
    recompute: bool = False
    stages: int | None = None
    synchronise: float = 0.0
    weights: WeightPolicy = STASH
    every: int = 1
    spread: SpreadMemory | None = None

    def versions(self, in_flight: int) -> Versions:
        """The versions that minibatches use at Nm = ``in_flight``."""
        return Versions(self.weights, in_flight, self.every)

    def costs(self, apart: bool) -> Costs:
        """Times of the layers on each kind of device; ``apart`` makes each device a kind of its own."""
        return Costs(self.profile, self.cluster, kinds_of(self.cluster, self.slots, apart), self.recompute)

    def memory_bound(
        self, costs: Costs, in_flight: int, loads: Sequence[Collection[StageLoad]], limited: bool = True
    ) -> MemoryBound:
        """Memory bound at Nm = ``in_flight``, for stages that hold ``loads``; see :class:`MemoryBound`."""
        layers, user = self.profile.layers, self.profile.user.total(in_flight, self.state)
        buffers = self.versions(in_flight).copies
        return MemoryBound(layers, costs.kinds, in_flight, self.state, self.recompute, loads, user, buffers, limited)

    def estimate(
        self,
        slots: Sequence[DeviceSlot],
        splits: Sequence[int],
        in_flight: int,
        spread: SpreadMemory | None = None,
    ) -> Estimate:
        """Simulate stages on ``slots`` that start at the layers ``splits``; ``spread`` is a spread run's memory."""
        return estimate(
            self.profile,
            self.cluster,
            slots,
            splits,
            in_flight,
            state=self.state,
            recompute=self.recompute,
            synchronise=self.synchronise,
            versions=self.versions(in_flight),
            spread=spread,
        )
