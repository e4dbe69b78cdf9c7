"""Planner of a fit: at its start it decides on stages, their devices and the number in flight.

It follows a saved plan, or makes a plan from measurements of the layers. Equal devices that are not declared get equal
stages by the layers' times, and Nm = k + 1. So Nm, on which results depend (law L1), follows from settings alone, and
measured times decide only the split points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.placement.decision import (
    Decision,
    as_planned,
    chosen_groups,
    parts_of,
    planned_groups,
    shared_groups,
)
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.placement.layout import place, stage_count
from lightning_hetpipe.placement.progress import Bar
from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate, lacking
from lightning_hetpipe.planning.model.profile import Profile, Times
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.grouped_plans import plan_with_groups, plan_with_shares
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.split_points import split_points_in_order, stage_times
from lightning_hetpipe.rules.versions import STASH, Versions, WeightPolicy


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Maker of the decision, for the layers that a watched step has shown.

    Attributes:
        emulation: Receives the times of stages if the placement's devices are emulated.
        bar: Shows the progress of measuring and of the search.
        even: Whether devices count as equal and without a memory limit.
        choose_split_points: Returns the first layer of each stage from the layers' seconds and k, on even devices.
        reported: Whether a single stage is measured too, because a logger reports it.
        every: Minibatches of an optimizer step.
        spread: Whether ``in_flight=1`` asks for a spread run, unless forwards of several stages are recomputed.
        copies: Additional copies of its weights on each device, for the synchronisation of virtual workers.
        split: Shares of the devices of each stage that has several, or "auto" to let the search join devices.
        must_fit: Whether another weight policy is tried if this one does not fit.
    """

    placement: DevicePlacement
    model: str
    precision: str
    stages: int | Literal["auto"]
    in_flight: int | Literal["auto"]
    recompute: bool
    plan: Plan | None
    plan_name: str
    emulation: Emulation
    cache: ProfileCache | None
    bar: Bar
    even: bool
    choose_split_points: Callable[[Sequence[float], int], tuple[int, ...]]
    reported: bool
    every: int
    spread: bool
    copies: float
    split: Mapping[int, Sequence[float]] | Literal["auto"]
    weights: WeightPolicy = STASH
    must_fit: bool = False

    def __call__(self, profiling: ProfilingInput, policies: Sequence[WeightPolicy]) -> Decision:
        """Decide for the first of ``policies`` that fits into the devices' memory.

        Raises:
            SettingError: if the plan is for another model, the settings do not fit, or there are more stages than
                layers.
        """
        for policy in policies:
            try:
                return replace(self, weights=policy, must_fit=policy is not policies[-1])._decide(profiling)
            except _Unfit as error:
                unfit = error
        rank_zero_info(f"The plan that lacks the least:\n\n{unfit.plan}\n")
        raise SettingError(str(unfit))

    def _decide(self, profiling: ProfilingInput) -> Decision:
        if not self.recompute and any(layer.recompute for piece in profiling.pieces for layer in piece.layers):
            # A stage with a checkpointed layer recomputes all its layers.
            return replace(self, recompute=True)._decide(profiling)
        if self.plan is not None:
            return self._follow(self.plan, profiling)
        if self.even:
            return self._divide_equally(profiling)
        profile, factor = self._profile(profiling)
        decision = self._searched(profile, factor, profiling)

        def at(in_flight: int, weights: WeightPolicy) -> Decision:
            found = replace(self, in_flight=in_flight, weights=weights)._searched(profile, factor, profiling)
            return replace(
                found, explanation=[*found.explanation, "another virtual worker asked for so many in flight"]
            )

        return replace(decision, at=at) if self.in_flight == "auto" else decision

    def _searched(self, profile: Profile, factor: float, profiling: ProfilingInput) -> Decision:
        found = self._search(profile, profiling)
        return self._estimated(found, profile, factor, self._reasons(found, profiling))

    def _follow(self, plan: Plan, profiling: ProfilingInput) -> Decision:
        names = _names(profiling)
        if plan.layers == tuple(name for piece in profiling.pieces for name in piece.names_without_graph()):
            plan = plan.merged(names)  # graphs hold modules that work in place together with the one before
        if (differs := plan.differences(names)) is not None:
            raise SettingError(
                f"plan={self.plan_name} was made for another model than {self.model}: {differs}; plan anew, or leave"
                " plan out"
            )
        slots, (worker,) = plan.slots(self.placement.cluster), plan.virtual_workers
        self._check_copies(plan)
        first, groups = [stage.first_layer for stage in worker.stages], planned_groups(plan, self.placement)
        why = f"because plan={self.plan_name} says so"
        if self.placement.emulated:
            profile, factor = self._profile(profiling)
            problem = replace(self._problem(profile, profiling, len(slots)), spread=plan.spread)
            found = _estimate(problem, slots, first, plan.in_flight)
            if lacking(found.stages):  # whatever the plan says: of another batch or optimizer, perhaps
                raise self._unfit(found, ["a plan for what is trained here"], profile)
            found = as_planned(found, worker, groups, factor)
            return self._estimated(found, profile, factor, why).in_groups(groups)
        types, kinds = self.placement.types, dict.fromkeys(slot.device.name for slot in slots)
        seconds = {name: measuring.layer_seconds(profiling, types[name], self.bar) for name in kinds}
        times = [
            sum(seconds[slot.device.name][start:after]) / slot.device.speed
            for slot, start, after in zip(slots, first, [*first[1:], len(names)], strict=True)
        ]
        decision = self._decided(slots, names, first, plan.in_flight, times, why)
        planned = [PlannedMemory(stage.memory_bytes, stage.memory_limit_bytes) for stage in worker.stages]
        return replace(decision, planned=planned).in_groups(groups)

    def _decided(
        self,
        slots: Sequence[DeviceSlot],
        layers: Sequence[str],
        first: Sequence[int],
        in_flight: int,
        times: list[float],
        *why: str,
    ) -> Decision:
        """Decide on stages on ``slots`` that begin at the layers ``first``. ``why`` are lines for the user."""
        placement, weights = self.placement, self.weights
        where = [placement.name(slot) for slot in slots]
        stages = ", ".join(f"{device} from {layers[start]}" for device, start in zip(where, first, strict=True))
        if placement.emulated:
            where = [f"{each} (emulated)" for each in where]
        return Decision(
            tuple(first),
            [placement.device(slot) for slot in slots],
            in_flight,
            times,
            explanation=[f"HetPipe: stages on {stages}; {weights.told(in_flight)}", *why],
            names=where if placement.declared else None,
            emulated=placement.emulated,
            weights=weights,
        )

    def _check_copies(self, plan: Plan) -> None:
        """Refuse to keep more copies of the weights than ``plan`` has room for."""
        copies = replace(plan.versions, every=self.every).copies
        is_limited = any(each.memory_limit_bytes is not None for each in plan.virtual_workers[0].stages)
        if plan.in_flight > 1 and is_limited and copies > plan.versions.copies:
            raise SettingError(
                f"plan={self.plan_name} was made for accumulate_grad_batches={plan.accumulate_grad_batches}, where"
                f" stages keep {plan.versions.copies} copies of their weights, and with"
                f" accumulate_grad_batches={self.every} it is {copies}; plan anew, or set it as planned"
            )

    def _divide_equally(self, profiling: ProfilingInput) -> Decision:
        """Plan for equal devices: equal stages on the devices in their order, k + 1 in flight."""
        names, slots = _names(profiling), self.placement.cluster.slots
        stages = stage_count(self.stages, len(slots), len(names), _why_few(profiling))
        seconds = [0.0] * len(names)
        if stages > 1 or self.reported:
            seconds = measuring.layer_seconds(profiling, None, self.bar)
        first = self.choose_split_points(seconds, stages)
        times = stage_times(seconds, first)
        in_flight, why = self.in_flight, f"in_flight={self.in_flight} was asked for"
        if in_flight == "auto":
            in_flight = self._most_in_flight(stages)
            why = "one more in flight than there are stages keeps all of them busy"
            if stages > 1 and in_flight <= stages:
                why = f"weights='{self.weights.name}' allows no more with accumulate_grad_batches={self.every}"
        slowest = max(range(stages), key=times.__getitem__)
        why = (
            f"because no other split makes the slowest stage faster (stage {slowest}: {1000 * times[slowest]:.3g} ms"
            f" for a minibatch), and {why}"
        )
        if self._shares:
            parts = parts_of(self._shares, stages, self.placement)
            homes = [part[0] for part in parts]
            decision = self._decided(homes, names, first, in_flight, times, why)
            return decision.in_groups(shared_groups(parts, self._shares, self.placement))
        decision = self._decided(place(stages, slots), names, first, in_flight, times, why)
        if stages > 1 and self.placement.limits:
            return self._within_memory(decision, seconds, profiling)
        return decision if stages > 1 else replace(decision, explanation=())

    def _most_in_flight(self, stages: int) -> int:
        """Return the largest useful Nm for ``stages`` that the weight policy allows."""
        return Versions(self.weights, stages + 1 if stages > 1 else 1, self.every).most_in_flight

    def _within_memory(self, decision: Decision, seconds: Sequence[float], profiling: ProfilingInput) -> Decision:
        """Keep equal stages if they fit, else search for others. If none fit, warn, since results depend on Nm."""
        slots = place(len(decision.split_points), self.placement.cluster.slots)
        times = [Times(each / 3, 2 * each / 3) for each in seconds]
        named = {slot.device.name: times for slot in slots}
        samples, calls, user = profiling.samples, profiling.calls, profiling.user
        profile = Profile(self.model, samples, profiling.sizes(), named, {}, calls=calls, user=user)
        problem = self._problem(profile, profiling, len(slots))
        found = _estimate(problem, slots, decision.split_points, decision.in_flight)
        if lacks := lacking(found.stages):
            if len(slots) <= len(problem.slots):
                choice = self._best_plan(problem, decision.in_flight)
                if choice.fits:
                    return self._estimated(choice, profile, 1.0, self._reasons(choice, profiling))
            if self.must_fit:
                raise self._unfit(found, (), profile)
            fewer = range(decision.in_flight - 1, 0, -1)
            fits = (
                f"in_flight={each}"
                for each in fewer
                if not lacking(_estimate(problem, slots, decision.split_points, each).stages)
            )
            said = ", ".join(f"{self.placement.name(slot)} by {in_bytes(more)}" for slot, more in lacks.items())
            rank_zero_warn(
                f"{decision.in_flight} minibatches in flight may take more memory than there is, on {said}; if it"
                f" runs out, set {next(fits, 'recompute=True, or take smaller batches')}"
            )
        return replace(decision, planned=_planned(found))

    def _profile(self, profiling: ProfilingInput) -> tuple[Profile, float]:
        """Profile of all devices. If they are emulated, the factor is how much they are slowed down."""
        placement = self.placement
        profile = measuring.profiled(
            profiling, placement.types, self.model, self.precision, self.cache, self.bar, with_widths=bool(self.split)
        )
        devices = [slot.device for slot in placement.cluster.slots]
        if not placement.emulated:
            return profile, 1.0
        for name in dict.fromkeys(canonical(device.name) for device in devices if device.name not in profile.times):
            if (one := measuring.kept(profiling, name, self.model, self.precision, self.cache)) is not None:
                # Kernels there may keep other bytes, but a profile has one number for all devices.
                profile = profile.joined(replace(one, layers=profile.layers, samples=profile.samples))
        if set(profile.times) != {"cpu"} and all(device.name != "cpu" for device in devices):
            profile = replace(profile, times={name: own for name, own in profile.times.items() if name != "cpu"})
        precision = "16" if "16" in self.precision else "32"
        # An emulation needs only ratios, and a CPU is too slow for seconds that follow from its speed.
        ratios = replace(profile, speeds={}).with_estimates(devices, precision)
        return measuring.slowed(ratios, placement.cluster)

    def _search(self, profile: Profile, profiling: ProfilingInput) -> Estimate:
        cluster = self.placement.cluster
        stages = None
        if self.stages != "auto":
            stages = stage_count(self.stages, len(cluster.slots), len(profile.layers), _why_few(profiling))
            if stages > len(cluster.slots) and not self._shares:
                return self._shared(self._problem(profile, profiling, stages), stages)
        asked = None if self.in_flight == "auto" else self.in_flight
        problem = self._problem(profile, profiling, stages)
        choice = self._best_plan(problem, asked)
        if lacking(choice.stages):
            other = ["other shares in split"] if self._shares else []
            if stages is not None and not self._shares and self._best_plan(replace(problem, stages=None), asked).fits:
                other = ["stages='auto'"]
            raise self._unfit(choice, [*other, *choice.ways_out()], profile)
        return choice

    @property
    def _shares(self) -> Mapping[int, Sequence[float]]:
        return {} if self.split == "auto" else self.split

    def _best_plan(self, problem: PlanningProblem, in_flight: int | None) -> Estimate:
        with self.bar("searching for a plan", None) as tick:
            problem = replace(problem, progress=tick)
            if self._shares and problem.stages is not None:
                parts = parts_of(self._shares, problem.stages, self.placement)
                shares = {parts[stage]: own for stage, own in self._shares.items()}
                return plan_with_shares(problem, in_flight, parts, shares)
            return plan_with_groups(problem, in_flight) if self.split == "auto" else best_plan(problem, in_flight)

    def _problem(self, profile: Profile, profiling: ProfilingInput, stages: int | None = None) -> PlanningProblem:
        optimizer = measuring.known_optimizer(profiling.optimizer)
        return PlanningProblem(
            profile,
            self.placement.cluster,
            optimizer=optimizer_state(optimizer) + self.copies if self.copies else optimizer,
            recompute=self.recompute,
            stages=stages,
            weights=self.weights,
            every=self.every,
            spread=self.spread,
        )

    def _shared(self, problem: PlanningProblem, stages: int) -> Estimate:
        """Estimate more stages than devices, which neighbours share, with the largest Nm that fits."""
        slots = place(stages, problem.slots)
        first = split_points_in_order(problem.profile, problem.cluster, slots, self.recompute)
        most = self._most_in_flight(stages) if self.in_flight == "auto" else self.in_flight
        for in_flight in range(most, 0 if self.in_flight == "auto" else most - 1, -1):
            found = _estimate(problem, slots, first, in_flight)
            if not lacking(found.stages):
                return found
        raise self._unfit(found, ["stages='auto'", "fewer in_flight", "recompute=True, perhaps"], problem.profile)

    def _unfit(self, found: Estimate, ways: Sequence[str], profile: Profile) -> _Unfit:
        lacks = lacking(found.stages)
        said = [f"{self.placement.name(slot)} lacks {in_bytes(more)}" for slot, more in lacks.items()]
        help_ = f"it would fit with {', or with '.join(ways)}" if ways else "give devices with more memory"
        message = f"{self.model} does not fit into the memory of its devices: {', '.join(said)}; {help_}"
        names = [layer.name for layer in profile.layers]
        return _Unfit(message, Plan.of(found, self.model, names, self.placement.cluster, [*profile.estimated]))

    def _reasons(self, found: Estimate, profiling: ProfilingInput) -> str:
        reasons = list(found.reasons)
        if self.stages != "auto":
            reasons.append(f"stages={self.stages} was asked for")
        elif found.idle:
            *most, last = [self.placement.name(slot) for slot in found.idle]
            names = f"{', '.join(most)} and {last} are" if most else f"{last} is"
            reasons.append(f"{names} not used, as no plan was found that is better with {'them' if most else 'it'}")
        if measuring.optimizer_name(profiling.optimizer) is None:
            reasons.append(f"the optimizer's state is taken to be as large as {measuring.UNKNOWN_OPTIMIZER}'s")
        reasons += self.placement.cluster.assumed([stage.slot for stage in found.stages])
        return f"because {'; '.join(reasons)}"

    def _estimated(self, found: Estimate, profile: Profile, factor: float, why: str) -> Decision:
        """Decide for ``found``, and tell the emulation, if any, what its stages take."""
        placement, stages = self.placement, found.stages
        slots, first = [stage.slot for stage in stages], [stage.first for stage in stages]
        reasons = [why]
        if placement.emulated:
            self.emulation.begin(measuring.pads(stages), slots)
            reasons.append(measuring.described(profile, placement.cluster, factor))
        names, times = [layer.name for layer in profile.layers], [stage.times.total for stage in stages]
        decision = self._decided(slots, names, first, found.in_flight, times, *reasons)
        groups = chosen_groups(stages, placement)
        if self._shares:
            groups = shared_groups(parts_of(self._shares, len(stages), placement), self._shares, placement)
        decision = decision.in_groups(groups)
        return decision if placement.emulated else replace(decision, planned=_planned(found))


class _Unfit(SettingError):
    """Error that devices lack memory. ``plan`` is the plan that lacks the least."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


def _names(profiling: ProfilingInput) -> list[str]:
    return [layer.name for layer, _, _ in profiling.layers]


def _why_few(profiling: ProfilingInput) -> str:
    """Explain why a piece has few layers: a buffer joins its parts, or it was taken apart. Empty in other cases."""
    for piece in profiling.pieces:
        if piece.captured is not None and piece.captured.joined is not None:
            buffer, parts = piece.captured.joined
            return (
                f"the buffer '{piece.name}.{buffer}' is read in one of its parts and changed in a later one, which"
                f" joins {len(parts)} of them into a layer; change it in the part that reads it, or in"
                " on_train_batch_end, or set weights='sync' and pipeline only the parts"
                f" (module={[f'{piece.name}.{part}' for part in parts]!r})"
            )
    return profiling.why_apart


def _estimate(problem: PlanningProblem, slots: Sequence[DeviceSlot], first: Sequence[int], in_flight: int) -> Estimate:
    """Estimate stages on ``slots``, as a spread run if ``in_flight`` asks for it."""
    return problem.estimate(slots, first, in_flight, spread=problem.may_spread and in_flight == 1)


def _planned(found: Estimate) -> list[PlannedMemory]:
    """Return the memory of each stage, with the bytes that its activations and waiting gradients may take, if limited.

    They are the bytes of the plan plus an equal part of what all stages on the device leave free.
    """
    planned = []
    for stage in found.stages:
        there, room = [each.memory.total for each in found.stages if each.slot == stage.slot], None
        if stage.limit is not None:
            room = stage.memory.moving + (stage.limit - sum(there)) // len(there)
        planned.append(PlannedMemory(stage.memory.total, stage.limit, room))
    return planned
