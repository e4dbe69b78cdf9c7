"""Decision at the start of a fit: stages, cuts, devices and the number in flight.

There are three cases, in this order:

- a saved plan is followed;
- devices that are all the same, and not declared, get equal stages by the layers' times and Nm = k + 1: Nm, on which
  results depend (law L1), is so a matter of settings alone, and measured times decide the cuts only;
- else a plan is made from a profile of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement import emulated_speeds
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.placement.layout import place, stage_count
from lightning_hetpipe.placement.measuring import kept, layer_seconds, optimizer_name, profiled
from lightning_hetpipe.placement.progress import Bar, hidden
from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate, StageEstimate, estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.profile_cache import ProfileCache
from lightning_hetpipe.planning.search.advice import ways_out
from lightning_hetpipe.planning.search.choice import Choice, best_plan
from lightning_hetpipe.planning.search.split_points import partition, split_points_in_order, stage_times

UNKNOWN_OPTIMIZER = "adam"
"""Optimizer whose state is assumed for one that the memory model does not know."""


@dataclass(frozen=True)
class Decision:
    """Which layers run where, and how many minibatches are in flight.

    Attributes:
        cuts: The first layer of each stage.
        devices: Of each stage.
        in_flight: Nm.
        times: Seconds of each stage for one minibatch, forward and backward; 0 where nothing was measured.
        said: What the user is told of it, a line each.
        names: Of each stage's device, where others were declared than torch's.
        emulated: Whether stages take as long as the devices ``names``, which are not here.
    """

    cuts: tuple[int, ...]
    devices: Sequence[torch.device]
    in_flight: int
    times: list[float]
    said: Sequence[str] = ()
    names: Sequence[str] | None = None
    emulated: bool = False


Decide = Callable[[ProfilingInput], Decision]
"""Function that makes the decision once the first minibatch has shown the layers."""


def told_in_flight(in_flight: int) -> str:
    """Nm and its staleness, for people."""
    if in_flight == 1:
        return "1 minibatch in flight"
    stale = in_flight - 1
    return f"{in_flight} minibatches in flight, so gradients up to {stale} minibatch{'es' * (stale > 1)} stale"


@dataclass(frozen=True)
class Planner:
    """Maker of the decision, for the layers that a watched step has shown.

    Attributes:
        placement: Devices that stages may lie on.
        model: The model's name, for people.
        precision: The Trainer's.
        stages, in_flight, recompute: What the strategy was asked for.
        plan: To be followed.
        plan_name: For people.
        emulation: Of the placement's devices, where they are emulated; it is told what stages take.
        cache: Of profiles.
        bar: Shows the measuring.
        even: Whether the devices are taken to be all the same, and without a memory limit.
        choose_cuts: The first layer of each stage, by the layers' seconds and k, on even devices.
        reported: Whether one stage is measured, too, as there is a logger to be told.
    """

    placement: DevicePlacement
    model: str
    precision: str
    stages: int | Literal["auto"] = "auto"
    in_flight: int | Literal["auto"] = "auto"
    recompute: bool = False
    plan: Plan | None = None
    plan_name: str = ""
    emulation: Emulation | None = None
    cache: ProfileCache | None = None
    bar: Bar = hidden
    even: bool = False
    choose_cuts: Callable[[Sequence[float], int], tuple[int, ...]] = partition
    reported: bool = False

    def __call__(self, study: ProfilingInput) -> Decision:
        """Decide.

        Raises:
            SettingError: where the plan is one for another model, where what was asked for does not fit, or for more
                stages than there are layers.
        """
        if self.plan is not None:
            return self._follow(self.plan, study)
        if self.even:
            return self._equal_stages(study)
        profile, factor = self._profile(study)
        found = self._found(profile, study)
        return self._decision(found, profile, factor, self._why(found, profile, study))

    # A plan that was given.

    def _follow(self, plan: Plan, study: ProfilingInput) -> Decision:
        names = [layer.name for layer, _, _ in study.layers]
        if (differs := plan.differences(names)) is not None:
            raise SettingError(
                f"plan={self.plan_name} was made for another model than {self.model}: {differs}; plan anew, or leave"
                " plan out"
            )
        slots = plan.slots(0, self.placement.cluster)
        cuts = [stage.first_layer for stage in plan.virtual_workers[0].stages]
        if self.placement.emulated:
            profile, factor = self._profile(study)
            state = optimizer_state(_optimizer(study))
            found = estimate(
                profile, self.placement.cluster, slots, cuts, plan.in_flight, state=state, recompute=self.recompute
            )
            if _lacking(found.stages):  # whatever the plan says: of another batch or optimizer, perhaps
                raise self._unfit(found, ["a plan for what is trained here"], profile)
            return self._decision(found, profile, factor, [f"because plan={self.plan_name} says so"])
        types, kinds = self.placement.types, dict.fromkeys(slot.device.name for slot in slots)
        seconds = {name: layer_seconds(study, types[name], self.bar) for name in kinds}
        ends = [*cuts[1:], len(names)]
        each = [
            sum(seconds[slot.device.name][first:after]) / slot.device.speed
            for slot, first, after in zip(slots, cuts, ends, strict=True)
        ]
        where = [self.placement.name(slot) for slot in slots]
        said = [_what(where, names, cuts, plan.in_flight), f"because plan={self.plan_name} says so"]
        known = where if self.placement.declared else None
        return Decision(tuple(cuts), [self.placement.device(slot) for slot in slots], plan.in_flight, each, said, known)

    # Devices that are all the same.

    def _equal_stages(self, study: ProfilingInput) -> Decision:
        names, devices = [layer.name for layer, _, _ in study.layers], self.placement.devices
        stages = stage_count(self.stages, len(devices), len(names))
        times = [0.0] * len(names)
        if stages > 1 or self.reported:
            times = layer_seconds(study, devices[-1], self.bar)
        cuts = self.choose_cuts(times, stages)
        each = stage_times(times, cuts)
        in_flight, why = self.in_flight, f"in_flight={self.in_flight} was asked for"
        if in_flight == "auto":
            in_flight = stages + 1 if stages > 1 else 1
            why = "one more in flight than there are stages keeps all of them busy"
        said = []
        if stages > 1:
            slowest = max(range(stages), key=each.__getitem__)
            said = [
                f"HetPipe: {stages} stages, which start at {', '.join(names[cut] for cut in cuts)}, and"
                f" {told_in_flight(in_flight)}",
                f"because no cut makes the slowest stage faster ({slowest}: {1000 * each[slowest]:.3g} ms for a"
                f" minibatch), and {why}",
            ]
        return Decision(cuts, place(stages, devices), in_flight, each, said)

    # A plan of its own.

    def _profile(self, study: ProfilingInput) -> tuple[Profile, float]:
        """Profile of all devices; where they are emulated, with the factor by which they are slowed down."""
        placement = self.placement
        profile = profiled(study, placement.types, self.model, self.precision, self.cache, self.bar)
        devices = [slot.device for slot in placement.cluster.slots]
        if not placement.emulated:
            return profile, 1.0
        for name in dict.fromkeys(canonical(device.name) for device in devices if device.name not in profile.times):
            if (one := kept(study, name, self.model, self.precision, self.cache)) is not None:
                # Its kernels may keep other bytes there; a profile has one number for all.
                profile = profile.joined(replace(one, layers=profile.layers, samples=profile.samples))
        if set(profile.times) != {"cpu"} and all(device.name != "cpu" for device in devices):
            profile = replace(profile, times={name: own for name, own in profile.times.items() if name != "cpu"})
        precision = "16" if "16" in self.precision else "32"
        return emulated_speeds.slowed(profile.with_estimates(devices, precision), placement.cluster)

    def _found(self, profile: Profile, study: ProfilingInput) -> Estimate:
        cluster = self.placement.cluster
        stages = None
        if self.stages != "auto":
            stages = stage_count(self.stages, len(cluster.slots), len(profile.layers))
            if stages > len(cluster.slots):
                return self._shared(profile, study, stages)
        asked = None if self.in_flight == "auto" else self.in_flight
        plan = partial(
            best_plan,
            profile,
            cluster,
            optimizer=_optimizer(study),
            in_flight=asked,
            recompute=self.recompute,
            watched=self.placement.emulated,
        )
        choice = plan(stages=stages)
        if not choice.fits:
            other = ["stages='auto'"] if stages is not None and plan().fits else []
            raise self._unfit(choice, [*other, *ways_out(choice)], profile)
        return choice

    def _shared(self, profile: Profile, study: ProfilingInput, stages: int) -> Estimate:
        """More stages than devices, of which neighbours share one; with as many in flight as have room."""
        cluster, state = self.placement.cluster, optimizer_state(_optimizer(study))
        slots = place(stages, cluster.slots)
        cuts = split_points_in_order(profile, cluster, slots, self.recompute)
        most = stages + 1 if self.in_flight == "auto" else self.in_flight
        for in_flight in range(most, 0 if self.in_flight == "auto" else most - 1, -1):
            found = estimate(
                profile,
                cluster,
                slots,
                cuts,
                in_flight,
                state=state,
                recompute=self.recompute,
                watched=self.placement.emulated,
            )
            if not _lacking(found.stages):
                return found
        raise self._unfit(found, ["stages='auto'", "fewer in_flight", "recompute=True, perhaps"], profile)

    def _unfit(self, found: Estimate, ways: Sequence[str], profile: Profile) -> SettingError:
        lacks, last = _lacking(found.stages), found.stages[-1]
        lacking = [f"{self.placement.name(slot)} lacks {in_bytes(more)}" for slot, more in lacks.items()]
        if last.overflow and last.first_minibatch >= last.memory.total:
            lacking[[*lacks].index(last.slot)] += " for the first minibatch of a fit, which runs whole there"
        rank_zero_info(f"The plan that lacks the least:\n\n{self._table(found, profile)}\n")
        help_ = f"it would fit with {', or with '.join(ways)}" if ways else "give devices with more memory"
        return SettingError(f"{self.model} does not fit into the memory of its devices: {', '.join(lacking)}; {help_}")

    def _table(self, found: Estimate, profile: Profile) -> Plan:
        names = [layer.name for layer in profile.layers]
        return Plan.of(found, self.model, names, self.placement.cluster, [*profile.estimated])

    def _why(self, found: Estimate, profile: Profile, study: ProfilingInput) -> list[str]:
        reasons = list(found.reasons) if isinstance(found, Choice) else []
        if self.stages != "auto":
            reasons.append(f"stages={self.stages} was asked for")
        elif isinstance(found, Choice) and found.idle:
            *most, last = [self.placement.name(slot) for slot in found.idle]
            names = f"{', '.join(most)} and {last} are" if most else f"{last} is"
            reasons.append(f"{names} not used, as no plan was found that is better with {'them' if most else 'it'}")
        if study.optimizer is None or optimizer_name(study.optimizer) is None:
            reasons.append(f"the optimizer's state is taken to be as large as {UNKNOWN_OPTIMIZER}'s")
        reasons += self.placement.cluster.assumed([stage.slot for stage in found.stages])
        return [f"because {'; '.join(reasons)}"]

    def _decision(self, found: Estimate, profile: Profile, factor: float, why: Sequence[str]) -> Decision:
        placement, names = self.placement, [layer.name for layer in profile.layers]
        cuts = tuple(stage.first for stage in found.stages)
        where = [placement.name(stage.slot) for stage in found.stages]
        said = [_what(where, names, cuts, found.in_flight), *why]
        if placement.emulated:
            assert self.emulation is not None
            self.emulation.begin(emulated_speeds.pads(found.stages), [stage.slot for stage in found.stages])
            said.append(emulated_speeds.described(profile, placement.cluster, factor))
            where = [f"{each} (emulated)" for each in where]
        return Decision(
            cuts,
            [placement.device(stage.slot) for stage in found.stages],
            found.in_flight,
            [stage.times.total for stage in found.stages],
            said,
            where if placement.declared else None,
            placement.emulated,
        )


def _optimizer(study: ProfilingInput) -> str:
    return (optimizer_name(study.optimizer) if study.optimizer is not None else None) or UNKNOWN_OPTIMIZER


def _lacking(stages: Sequence[StageEstimate]) -> dict[DeviceSlot, int]:
    """Bytes that devices lack, of which several stages may share one."""
    taken: dict[DeviceSlot, int] = {}
    for stage in stages:
        taken[stage.slot] = max(taken.get(stage.slot, 0) + stage.memory.total, stage.first_minibatch)
    limits = ((slot, slot.device.memory) for slot in taken)
    return {slot: taken[slot] - limit for slot, limit in limits if limit is not None and taken[slot] > limit}


def _what(devices: Sequence[str], layers: Sequence[str], cuts: Sequence[int], in_flight: int) -> str:
    stages = ", ".join(f"{device} from {layers[cut]}" for device, cut in zip(devices, cuts, strict=True))
    return f"HetPipe: stages on {stages}; {told_in_flight(in_flight)}"
