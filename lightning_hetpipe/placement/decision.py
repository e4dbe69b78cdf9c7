"""Decision on a fit's stages, their devices and the number in flight, as it is made at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.rules.versions import STASH, WeightPolicy


@dataclass(frozen=True)
class Decision:
    """Division of layers into stages, their devices, and how many minibatches are in flight.

    Attributes:
        split_points: The first layer of each stage.
        devices: Of each stage.
        in_flight: Nm.
        times: Seconds of each stage for one minibatch, forward and backward; 0 where nothing was measured.
        explanation: For the user, a line each.
        names: Of each stage's device, where others were declared than torch's.
        emulated: Whether stages take as long as the devices ``names``, which are not here.
        planned: Memory of each stage; none where nothing was planned, or devices are emulated.
        weights: The weight policy.
        groups: The devices of each stage that has several.
        at: Decides anew for an Nm and a weight policy, as that Nm was searched for; None where any other Nm leaves
            stages as they are.
    """

    split_points: tuple[int, ...]
    devices: Sequence[torch.device]
    in_flight: int
    times: list[float]
    explanation: Sequence[str] = ()
    names: Sequence[str] | None = None
    emulated: bool = False
    planned: Sequence[PlannedMemory] = ()
    weights: WeightPolicy = STASH
    groups: Mapping[int, DeviceGroup] = field(default_factory=dict)
    at: Callable[[int, WeightPolicy], Decision] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        placement: DevicePlacement,
        weights: WeightPolicy,
        slots: Sequence[DeviceSlot],
        first: Sequence[int],
        in_flight: int,
        times: list[float],
        layers: Sequence[str],
        *why: str,
    ) -> Decision:
        """Decide on stages that lie on ``slots`` of a placement.

        Args:
            placement: Devices that stages may lie on.
            weights: The weight policy.
            slots: Of each stage.
            first: The first layer of each stage.
            in_flight: Nm.
            times: As above.
            layers: Names of all layers.
            why: For the user, a line each.
        """
        where = [placement.name(slot) for slot in slots]
        stages = ", ".join(f"{device} from {layers[start]}" for device, start in zip(where, first, strict=True))
        if placement.emulated:
            where = [f"{each} (emulated)" for each in where]
        return cls(
            tuple(first),
            [placement.device(slot) for slot in slots],
            in_flight,
            times,
            [f"HetPipe: stages on {stages}; {weights.told(in_flight)}", *why],
            where if placement.declared else None,
            placement.emulated,
            weights=weights,
        )

    def in_groups(self, groups: Mapping[int, DeviceGroup]) -> Decision:
        """This decision with ``groups`` of devices for some of its stages."""
        lines = [f"stage {stage} is divided among {group}" for stage, group in groups.items()]
        return replace(self, groups=groups, explanation=[*self.explanation, *lines])


Decide = Callable[[ProfilingInput, Sequence[WeightPolicy]], Decision]
"""Function that makes the decision once the first minibatch has shown the layers, for the first of these weight
policies that devices have room for."""
