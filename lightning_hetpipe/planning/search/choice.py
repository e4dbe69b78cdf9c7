"""Choice of the plan of one virtual worker: which layers run on which device, and how many minibatches are in flight.

For a given Nm, the search looks for the fastest plan that fits (``plans``). It divides layers by dynamic programming
(``divider``), simulates divisions, and tries single changes. With few orders of devices (up to eight devices of any
kinds) and enough effort, no plan at this Nm is faster by more than 1%.

To choose Nm, the search begins with the smallest Nm at which the time of all stages allows 1 / T_max. If memory is
short there, it looks at smaller Nm. It looks at larger Nm while they help, and then longer at the best Nm. It chooses
the smallest Nm within 1% of the best throughput, or a quarter more to keep the slowest stage always busy.

A spread run, for which ``in_flight=1`` may ask, is not searched (``split_points``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.estimate import Estimate, Help
from lightning_hetpipe.planning.model.units import digits, in_seconds
from lightning_hetpipe.planning.search.plans import ENOUGH, GLIMPSE, MUCH, PlansAt
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.split_points import spread_plan

MANY = 1 << 20
"""Nm at which only T_max counts."""

SLACK = 1.25
"""Factor on the Nm that would be enough if each stage always took the same time.

*Measured*: two equally long stages reach 73% of 1 / T_max with two minibatches in flight, 86% with three and 96% with
four (``benchmarks/split_layers.py``, beside other programs).
"""

NEGLIGIBLE = 0.001
"""Smallest relative gain of throughput for which the search goes on."""


def best_plan(problem: PlanningProblem, in_flight: int | None = None, *, fewer: bool = False) -> Estimate:
    """Search for the fitting plan with the highest simulated throughput. The plan may leave devices unused.

    Without ``in_flight``, Nm is chosen as the module's docstring says. With ``fewer``, if no plan fits at
    ``in_flight``, the plan is for the largest smaller Nm at which a plan fits. For a given Nm and up to eight devices
    this takes milliseconds to tenths of a second.

    Raises:
        SettingError: if the profile has no times of a device, if there are more stages than devices or layers, or if
            ``every`` is too small for the weight policy at ``in_flight``.
    """
    devices = len(problem.slots)
    check_stages(problem.stages, devices, len(problem.profile.layers))
    if in_flight is not None:
        problem.versions(in_flight).check()
    search = _Search(problem)
    if problem.may_spread and (in_flight == 1 or (in_flight is None and devices == 1)):
        return search.spread()
    if in_flight is None:
        return search.choose()
    return search.at((fewer and search.most(in_flight)) or in_flight)


def check_stages(stages: int | None, devices: int, layers: int | None = None) -> None:
    """Raise SettingError for more ``stages`` than there are devices, or layers if these are known."""
    most = min(filter(None, (devices, layers)))
    if stages is not None and not 1 <= stages <= most:
        each = f"{devices} devices" + (f" and {layers} layers" if layers else "")
        raise SettingError(
            f"stages={stages} cannot be planned for {each}: each stage needs one of {'both' if layers else 'them'}; set"
            f" at most {most}"
        )


class _Search:
    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._searches: dict[int, PlansAt] = {}
        self._found: dict[int, Estimate | None] = {}

    def choose(self) -> Estimate:
        problem, fastest = self._problem, self._fastest
        # Begin with the Nm at which the fastest division keeps all stages busy.
        busy = ENOUGH * (sum(fastest.takes) + problem.synchronise) / fastest.bottleneck if fastest.bottleneck else 1
        first = problem.versions(max(1, math.ceil(busy - 1e-9))).most_in_flight
        self._upwards(first)
        if self._best * self._fastest.bottleneck < ENOUGH:
            self._downwards(first)  # memory may have room for faster plans with fewer in flight
        if not (plans := self._plans):
            return self._unfit(self._at(1).least_lacking(), asked=False)
        quickest = max(plans, key=lambda plan: plan.rate).in_flight
        self._found[quickest] = self._at(quickest).best(work=MUCH)
        good = ENOUGH * self._best
        chosen = next(plan for plan in self._plans if plan.rate >= good)
        while chosen.in_flight > 1 and chosen.in_flight - 1 not in self._found:
            found = self.plan(chosen.in_flight - 1, good)
            if found is None or found.rate < good:
                break
            chosen = found
        least, chosen = chosen, self._with_slack(chosen)
        if len(chosen.stages) == 1 < chosen.in_flight and not problem.synchronise:
            # More minibatches in flight would only make weights staler.
            chosen = self._found[1] = problem.estimate([chosen.stages[0].slot], [0], 1)
        unfit = min((nm for nm, found in self._found.items() if found is None), default=None)
        reasons = _why(chosen, least.in_flight, self._plans, unfit)
        if unfit is not None and not problem.recompute and not problem.brief:
            # Try the Nm that keeps all stages busy. A choice among smaller Nm would take as long as this plan's.
            other = self._with_recompute()
            most = other.most(max(unfit, first), chosen.in_flight) or chosen.in_flight
            again = None if most == chosen.in_flight else other.plan(most)
            if again is not None and again.rate > (2 - ENOUGH) * chosen.rate:
                faster = again.rate / chosen.rate
                reasons.append(f"recompute=True would be {faster:.2f} times as fast, as Nm = {most} fits then")
        return self._choice(chosen, reasons)

    @property
    def _plans(self) -> list[Estimate]:
        return [found for _, found in sorted(self._found.items()) if found is not None]

    @property
    def _best(self) -> float:
        """The highest rate of the plans that fit, in minibatches per second."""
        return max((found.rate for found in self._plans), default=0.0)

    def at(self, in_flight: int) -> Estimate:
        found = self._found[in_flight] = self._at(in_flight).best()
        if found is None:
            return self._unfit(self._at(in_flight).least_lacking(), asked=True)
        return self._choice(found, [slowest_stage(found)])

    def spread(self) -> Estimate:
        found = self._found[1] = spread_plan(replace(self._problem, recompute=False))
        if not found.fits:
            return self._unfit(found, asked=True)
        took = in_seconds(sum(stage.times.total for stage in found.stages))
        reason = f"devices compute one after another, {took} for each minibatch, as one is in flight"
        return self._choice(found, [reason if len(found.stages) > 1 else slowest_stage(found)])

    def plan(self, in_flight: int, floor: float = 0.0) -> Estimate | None:
        """Find the fastest plan that fits, or None. ``floor`` is as in :meth:`PlansAt.best`."""
        if in_flight not in self._found:
            self._found[in_flight] = self._at(in_flight).best(floor, GLIMPSE)
        return self._found[in_flight]

    def most(self, in_flight: int, fits: int = 0) -> int | None:
        """Find the largest Nm up to ``in_flight`` at which a plan fits, or None. Memory grows with Nm.

        If ``fits`` is not 0, a plan is known to fit at this Nm.
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

    def _upwards(self, first: int) -> None:
        """Plan for ``first`` minibatches in flight, and for more while that helps."""
        in_flight = better = first
        while self._problem.versions(in_flight).is_possible:
            before = self._best
            if (found := self.plan(in_flight, before)) is None:
                break
            if found.rate > before * (1 + NEGLIGIBLE):
                better = in_flight
            # No plan is faster than 1 / T_max, and a larger Nm that has not helped twice will not help.
            if self._best * self._fastest.bottleneck >= ENOUGH or in_flight > better + 1:
                break
            in_flight += max(1, in_flight // 8)  # what is near is about as fast

    def _downwards(self, first: int) -> None:
        """Plan for fewer than ``first`` minibatches in flight, if they may be faster because memory is short.

        Without this, OPT-350M on two V100 and two RTX-3090 is 37% slower, with one in flight
        (``benchmarks/planning.py``).
        """
        in_flight, quickest = first, sum(self._unlimited(1)[0].takes)
        while in_flight > 0 and in_flight > self._best * ENOUGH * quickest:
            self.plan(in_flight, self._best)
            in_flight -= max(1, in_flight // 4)
        if self._plans:
            fastest = max(self._plans, key=lambda plan: plan.rate).in_flight
            for near in {fastest - 1, fastest + 1} & {*range(1, first)}:
                self.plan(near, self._best)

    def _with_slack(self, least: Estimate) -> Estimate:
        """Return the plan with :data:`SLACK` times the Nm if that fits and is as fast, and if ``least`` keeps its
        slowest stage busy. Otherwise return ``least``."""
        if least.rate * least.bottleneck < ENOUGH or len(least.stages) == 1:
            return least
        takes = sum(stage.times.total for stage in least.stages) + self._problem.synchronise
        enough = self._problem.versions(math.ceil(SLACK * takes / least.bottleneck - 1e-9)).most_in_flight
        found = self.plan(enough, ENOUGH * least.rate) if enough > least.in_flight else None
        return found if found is not None and found.rate >= ENOUGH * least.rate else least

    @cached_property
    def _fastest(self) -> Division:
        """The fastest division without a limit of memory."""
        return min(self._unlimited(MANY), key=lambda each: each.bottleneck)

    def _unlimited(self, in_flight: int) -> list[Division]:
        return self._problem.divider.least(in_flight, self._problem.room(1, share=math.inf))

    def _at(self, in_flight: int) -> PlansAt:
        if in_flight not in self._searches:
            self._searches[in_flight] = PlansAt(self._problem, in_flight)
        return self._searches[in_flight]

    def _unfit(self, found: Estimate, asked: bool) -> Estimate:
        """Return ``found``, whose devices lack the least memory, with changes that would help."""
        in_flight = found.in_flight

        def advise() -> Help:
            again = None
            if not self._problem.recompute:
                other = self._with_recompute()
                if asked:
                    again = other.most(in_flight)
                elif (choice := other.choose()).fits:
                    again = choice.in_flight
            fewer = self.most(in_flight - 1)
            if fewer is None and self._problem.may_spread and spread_plan(self._problem).fits:
                fewer = 1
            return Help(fewer, again)

        reason = f"no plan was found that fits at Nm = {in_flight}; this one lacks the least memory"
        if found.spread:
            reason = "even with one minibatch in flight the model does not fit"
        return self._choice(found, [reason], advise)

    def _with_recompute(self) -> _Search:
        return _Search(replace(self._problem, recompute=True, spread=False))

    def _choice(self, found: Estimate, reasons: Sequence[str], advise: Callable[[], Help] | None = None) -> Estimate:
        used = {stage.slot for stage in found.stages}
        idle = tuple(slot for slot in self._problem.slots if slot not in used)
        return replace(found, idle=idle, reasons=tuple(reasons), advise=advise)


def slowest_stage(found: Estimate) -> str:
    """Describe the slowest stage, and the throughput that it allows."""
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
