"""Choice of the plan of one virtual worker: which layers run on which device, and how many minibatches are in flight.

For a given Nm the fastest plan that fits is looked for (``plans``): layers are divided by dynamic programming
(``divider``), divisions are simulated, and single changes tried. Where few devices leave few orders
(eight of any kinds do) and the effort suffices, no plan at this Nm is faster by more than 1%.

Where Nm is to be chosen, it begins with the least at which the time of all stages allows 1 / T_max. If memory is short
there, fewer are looked at, and more while these help; then longer at the best. Of all Nm that were looked at, the
smallest within 1% of the best throughput is chosen, or a quarter more if the slowest stage is to be always busy.

A spread run, which ``in_flight=1`` may ask for, is not searched (``spread_plan``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.stage_memory import SpreadMemory
from lightning_hetpipe.planning.model.units import digits, in_bytes, in_seconds
from lightning_hetpipe.planning.search.plans import ENOUGH, GLIMPSE, MUCH, WORK, PlansAt
from lightning_hetpipe.planning.search.problem import Loads, PlanningProblem
from lightning_hetpipe.planning.search.spread_plan import spread_plan

SHORT = 1
"""Minibatches more in flight that may slow plans down, where memory is short, before the search for more ends."""

MANY = 1 << 20
"""Nm at which nothing but T_max counts."""

SLACK = 1.25
"""Times as many minibatches in flight as would do if each stage always took the same time.

*Measured*: two stages that take equally long give 73% of 1 / T_max with two in flight, 86% with three and 96% with four
(``benchmarks/split_layers.py``, beside other programs).
"""

NEGLIGIBLE = 0.001
"""Smallest relative gain of throughput for which the search goes on."""


@dataclass(frozen=True)
class Tried:
    """Result of one number in flight.

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
    """Changes that would make a plan fit that does not.

    Attributes:
        in_flight: The largest Nm at which some plan fits; None if there is none.
        recompute: An Nm at which some plan fits with ``recompute=True``: the largest up to what was asked for, or the
            best; None if there is none, or where that is set already.
        lacking: Bytes that devices of the plan lack, by stage; with so much more memory there it fits.
    """

    in_flight: int | None
    recompute: int | None
    lacking: dict[int, int]


@dataclass(frozen=True)
class Choice(Estimate):
    """A plan for one virtual worker; where nothing fits, the one whose devices lack the least.

    Attributes:
        idle: Devices that the plan does not use.
        tried: The results of each Nm that was searched.
        reasons: Sentences that explain the choice.
        advise: Finds what would make it fit, which may take longer than to find the plan; None where it fits.
    """

    idle: tuple[DeviceSlot, ...]
    tried: tuple[Tried, ...]
    reasons: tuple[str, ...]
    advise: Callable[[], Help] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        found: Estimate,
        idle: Iterable[DeviceSlot],
        tried: Iterable[Tried],
        reasons: Iterable[str],
        advise: Callable[[], Help] | None = None,
    ) -> Choice:
        """The choice of ``found``."""
        own = {each.name: getattr(found, each.name) for each in fields(Estimate)}
        return cls(**own, idle=tuple(idle), tried=tuple(tried), reasons=tuple(reasons), advise=advise)

    @cached_property
    def help(self) -> Help | None:
        """Changes that would make it fit; None where it does."""
        return None if self.advise is None else self.advise()

    def ways_out(self, cli: bool = False) -> list[str]:
        """List a phrase for each way to make it fit; none where it fits, or where nothing helps.

        Args:
            cli: Whether settings are given on the command line, not in Python.
        """
        if (found := self.help) is None:
            return []
        prefix, true = ("strategy.", "true") if cli else ("", "True")
        lines = []
        if found.in_flight is not None:
            lines.append(f"{prefix}in_flight={found.in_flight}{' or fewer' if found.in_flight > 1 else ''}")
        if found.recompute is not None:
            fewer = " or fewer" if found.recompute > 1 else ""
            lines.append(f"{prefix}recompute={true}, with {prefix}in_flight={found.recompute}{fewer}")
        if found.lacking:
            slots = {stage: self.stages[stage].slot for stage in sorted(found.lacking)}
            each = [f"{in_bytes(found.lacking[n])} on {slot}" for n, slot in slots.items()]
            lines.append(f"more memory: {' and '.join(each)}")
        return lines


def best_plan(problem: PlanningProblem, in_flight: int | None = None, *, fewer: bool = False) -> Choice:
    """The plan with the most simulated throughput that is found to fit.

    Nm is the smallest within 1% of the best, or a quarter more (:data:`SLACK`) where the slowest stage is always busy.

    It may leave devices unused. Up to eight devices take milliseconds to tenths of a second for a given Nm.

    Args:
        problem: What is asked of it.
        in_flight: Nm, where it is not to be chosen.
        fewer: Whether the plan may be for the largest Nm below ``in_flight`` at which one fits, if none does there.

    Raises:
        SettingError: where the profile has no times of a device, for more stages than there are devices or layers, or
            where ``every`` is too few for the weight policy at ``in_flight``.
    """
    devices, layers, stages = len(problem.slots), len(problem.profile.layers), problem.stages
    if stages is not None and not 1 <= stages <= min(devices, layers):
        raise SettingError(
            f"stages={stages} cannot be planned for {devices} devices and {layers} layers: each stage needs one of"
            f" both; set at most {min(devices, layers)}"
        )
    if in_flight is not None:
        problem.versions(in_flight).check()
    search, memory = _Search(problem), problem.spread_memory
    if memory is not None and (in_flight == 1 or (in_flight is None and devices == 1)):
        return search.spread(memory)
    if in_flight is None:
        return search.choose()
    return search.at((fewer and search.most(in_flight)) or in_flight)


class _Search:
    """The search for the plan of ``problem``."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._plans: dict[int, PlansAt] = {}
        self._found: dict[int, Estimate | None] = {}

    def choose(self) -> Choice:
        """Choose Nm too."""
        first = self._enough_in_flight
        best = self._upwards(first)
        if best * self._fastest < ENOUGH:
            best = self._downwards(first, best)  # memory may have room for faster plans with fewer in flight
        fastest = max((found for found in self._found.values() if found), key=lambda found: found.rate, default=None)
        if fastest is None:
            return self._unfit(1, asked=False)
        if not self._problem.brief:
            best = max(best, self._again(fastest.in_flight).rate)
        plans = [found for _, found in sorted(self._found.items()) if found is not None]
        chosen = next(plan for plan in plans if plan.rate >= ENOUGH * best)
        while chosen.in_flight > 1 and chosen.in_flight - 1 not in self._found:
            found = self.plan(chosen.in_flight - 1, ENOUGH * best)
            if found is None or found.rate < ENOUGH * best:
                break
            chosen = found
        least, chosen = chosen, self._with_slack(chosen)
        if len(chosen.stages) == 1 < chosen.in_flight and not self._problem.synchronise:
            # More in flight would make weights staler for nothing.
            chosen = self._found[1] = self._problem.estimate([chosen.stages[0].slot], [0], 1)
        plans = [found for _, found in sorted(self._found.items()) if found is not None]
        unfit = min((nm for nm, found in self._found.items() if found is None), default=None)
        reasons = _why(chosen, least.in_flight, plans, unfit)
        if unfit is not None and not self._problem.recompute and not self._problem.brief:
            # As many as keep all stages busy; to choose among fewer would take as long as to choose this plan.
            other = self._with_recompute()
            most = other.most(max(unfit, first), chosen.in_flight) or chosen.in_flight
            again = None if most == chosen.in_flight else other.plan(most)
            if again is not None and again.rate > (2 - ENOUGH) * chosen.rate:
                faster = again.rate / chosen.rate
                reasons.append(f"recompute=True would be {faster:.2f} times as fast, as Nm = {most} fits then")
        return self._choice(chosen, reasons)

    def at(self, in_flight: int) -> Choice:
        """Plan for a given Nm."""
        found = self._found[in_flight] = self._at(in_flight).best()
        if found is None:
            return self._unfit(in_flight, asked=True)
        return self._choice(found, [slowest_stage(found)])

    def spread(self, memory: SpreadMemory) -> Choice:
        """Plan a spread run, whose devices hold what ``memory`` says."""
        found = self._found[1] = spread_plan(replace(self._problem, recompute=False), memory)
        if found.fits:
            return self._choice(found, [_one_after_another(found)])

        def advise() -> Help:
            return Help(None, None if self._problem.recompute else self._with_recompute().most(1), _lacking(found))

        return self._choice(found, ["even with one minibatch in flight the model does not fit"], advise)

    def plan(self, in_flight: int, floor: float = 0.0) -> Estimate | None:
        """The fastest plan that was found to fit; None where none was. See :meth:`PlansAt.best` for ``floor``."""
        if in_flight not in self._found:
            self._found[in_flight] = self._at(in_flight).best(floor, 0 if self._problem.brief else GLIMPSE)
        return self._found[in_flight]

    def _again(self, in_flight: int) -> Estimate:
        """Search longer for the plan at an Nm that is known to have one."""
        found = self._found[in_flight] = self._at(in_flight).best(work=MUCH)
        assert found is not None
        return found

    def most(self, in_flight: int, fits: int = 0) -> int | None:
        """Largest Nm up to ``in_flight`` at which a plan fits; None if none does. More take more memory.

        ``fits`` is known to fit, if it is not 0.
        """
        if not fits and (in_flight < 1 or not self._at(1).fits):
            return None
        if fits < in_flight and self._at(in_flight).fits:
            return in_flight
        fits, unfit, step = max(1, fits), in_flight, 1
        while unfit - fits > 1:
            middle = min(fits + step, (fits + unfit) // 2)
            if self._at(middle).fits:
                fits, step = middle, 2 * step
            else:
                unfit = middle
        return fits

    def _upwards(self, first: int) -> float:
        """Plan for ``first`` in flight, and for more while that helps; the best rate."""
        best, better, in_flight = 0.0, first, first
        while self._problem.versions(in_flight).is_possible:
            if (found := self.plan(in_flight, best)) is None:
                break
            if found.rate > best * (1 + NEGLIGIBLE):
                better = in_flight
            best = max(best, found.rate)
            # Nothing is faster than 1 / T_max; what has not helped for as many as there are stages will not, nor what
            # has made plans slower as there is no memory for it.
            further = SHORT if self._at(in_flight).short else len(found.stages)
            if best * self._fastest >= ENOUGH or in_flight > better + further:
                break
            in_flight += max(1, in_flight // 8)  # what is near is about as fast
        return best

    def _downwards(self, first: int, best: float) -> float:
        """Plan for fewer than ``first`` in flight, as far as they may be faster than ``best``; the best rate."""
        in_flight = first
        while in_flight > 0 and in_flight > best * ENOUGH * self._quickest:
            best = max(best, self._rate(in_flight, best))
            in_flight -= max(1, in_flight // 4)
        fastest = max(self._found, key=lambda each: self._rate(each, best), default=1)
        for near in (fastest - 1, fastest + 1):
            if near not in self._found and 1 <= near < first:
                best = max(best, self._rate(near, best))
        return best

    def _with_slack(self, least: Estimate) -> Estimate:
        """The plan with :data:`SLACK` more in flight, where ``least`` keeps its slowest stage busy and that plan fits
        and is as fast; else ``least``."""
        if least.rate * least.bottleneck < ENOUGH or len(least.stages) == 1:
            return least
        takes = sum(stage.times.total for stage in least.stages) + self._problem.synchronise
        enough = self._problem.versions(math.ceil(SLACK * takes / least.bottleneck - 1e-9)).most_in_flight
        found = self.plan(enough, ENOUGH * least.rate) if enough > least.in_flight else None
        return found if found is not None and found.rate >= ENOUGH * least.rate else least

    def _rate(self, in_flight: int, floor: float) -> float:
        found = self.plan(in_flight, floor)
        return 0.0 if found is None else found.rate

    @cached_property
    def _fastest(self) -> float:
        """T_max of the fastest division if memory were no limit."""
        return min(each.bottleneck for each in self._unlimited(MANY))

    @cached_property
    def _quickest(self) -> float:
        """Seconds that a minibatch takes at the least, if memory were no limit."""
        return sum(self._unlimited(1)[0].takes)

    @cached_property
    def _enough_in_flight(self) -> int:
        """Nm below which no plan is within 1% of the fastest, whatever the memory."""
        room = self._problem.room(1, Loads(), math.inf)
        cap = self._fastest / ENOUGH * (1 + 1e-9)
        # Where only some boundaries are looked at, those near the fastest one's may be the only ones within the cap.
        divisions = [*self._problem.divider.fastest(cap, room), *self._unlimited(MANY)]
        least = min(sum(each.takes) for each in divisions if each.bottleneck <= cap)
        enough = max(1, math.ceil((least + self._problem.synchronise) / cap - 1e-9)) if cap else 1
        return self._problem.versions(enough).most_in_flight

    def _unlimited(self, in_flight: int) -> list[Division]:
        return self._problem.divider.least(in_flight, self._problem.room(1, Loads(), math.inf))

    def _at(self, in_flight: int) -> PlansAt:
        if in_flight not in self._plans:
            self._plans[in_flight] = PlansAt(self._problem, in_flight)
        return self._plans[in_flight]

    def _unfit(self, in_flight: int, asked: bool) -> Choice:
        """The plan whose devices lack the least, and what would help."""
        found = self._at(in_flight).least_lacking(0 if self._problem.brief else WORK)
        self._found = {in_flight: None}

        def advise() -> Help:
            again = None
            if not self._problem.recompute:
                other = self._with_recompute()
                if asked:
                    again = other.most(in_flight)
                elif (choice := other.choose()).fits:
                    again = choice.in_flight
            fewer, memory = self.most(in_flight - 1), self._problem.spread_memory
            if fewer is None and memory is not None and spread_plan(self._problem, memory).fits:
                fewer = 1
            return Help(fewer, again, _lacking(found))

        reasons = [f"no plan was found that fits at Nm = {in_flight}; this one lacks the least memory"]
        return self._choice(found, reasons, advise)

    def _with_recompute(self) -> _Search:
        return _Search(replace(self._problem, recompute=True, spread=False))

    def _choice(self, found: Estimate, reasons: Sequence[str], advise: Callable[[], Help] | None = None) -> Choice:
        used = {stage.slot for stage in found.stages}
        idle = (slot for slot in self._problem.slots if slot not in used)
        tried = (_tried(in_flight, plan) for in_flight, plan in sorted(self._found.items()))
        return Choice.of(found, idle, tried, reasons, advise)


def _tried(in_flight: int, found: Estimate | None) -> Tried:
    fits = found is not None and found.fits
    return Tried(in_flight, found.rate, found.bottleneck) if found and fits else Tried(in_flight, None, None)


def _lacking(found: Estimate) -> dict[int, int]:
    return {index: stage.overflow for index, stage in enumerate(found.stages) if stage.overflow}


def _one_after_another(found: Estimate) -> str:
    took = in_seconds(sum(stage.times.total for stage in found.stages))
    if len(found.stages) == 1:
        return f"all layers on {found.stages[0].slot.device.name} take {took} for each minibatch"
    return f"devices compute one after another, {took} for each minibatch, as one is in flight"


def slowest_stage(found: Estimate) -> str:
    """Say which stage is the slowest, and what that makes of the throughput."""
    number = max(range(len(found.stages)), key=lambda index: found.stages[index].times.total)
    stage = found.stages[number]
    if len(found.stages) == 1:
        return f"all layers on {stage.slot.device.name} take {in_seconds(found.bottleneck)} for each minibatch"
    share = 100 * found.rate * found.bottleneck
    return (
        f"stage {number} on {stage.slot.device.name} is the slowest, with {in_seconds(found.bottleneck)} for each"
        f" minibatch; Nm = {found.in_flight} reaches {share:.0f}% of what that allows"
    )


def _why(chosen: Estimate, least: int, plans: Sequence[Estimate], unfit: int | None) -> list[str]:
    best = max(plans, key=lambda plan: plan.rate)
    reasons = [slowest_stage(chosen)]
    if least < chosen.in_flight:
        reasons.append(f"Nm = {least} would do if stages always took the same time")
    elif best.in_flight != chosen.in_flight:
        reasons.append(
            f"Nm = {chosen.in_flight} is the smallest within 1% of the best, {digits(best.rate)} minibatches per second"
            f" at Nm = {best.in_flight}"
        )
    elif len(chosen.stages) == 1:
        reasons.append("with a single stage, a second minibatch in flight has nothing to overlap with")
    elif chosen.in_flight > 1:
        reasons.append(f"with fewer than Nm = {chosen.in_flight} no plan was found that is within 1% of it")
    if unfit is not None:
        reasons.append(f"no plan was found that fits at Nm = {unfit}")
    return reasons
