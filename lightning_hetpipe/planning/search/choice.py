"""Choice of the plan of one virtual worker: which layers run on which device, and how many minibatches are in flight.

For each Nm = 1, 2, ... the search goes like this:

1. Divide the layers with the least T_max under a memory bound (``divider``): split points by dynamic programming, the
   order of the devices by kind (``device_order``). At first the bound is what every pipeline holds, one minibatch.
2. Simulate that division. How many minibatches a stage holds, and so how much memory it takes, is known only now.
   Where it does not fit, raise the bound by what was seen, for each distance from the last stage, and divide anew.
3. Where memory (or who asks) keeps Nm so small that the slowest stage waits, less T_max is not more throughput. There,
   and where no division was found, search locally (``local_search``).

A spread run, which ``in_flight=1`` may ask for, is not searched (``spread``).

Of all Nm the smallest within 1% of the best throughput is chosen. So:

- a plan that is found fits as simulated (a last stage holds one minibatch, the others Nm at the most, whatever the
  timing);
- under its bounds no split points, subset or order of the devices have a smaller T_max, and if none had to be raised,
  none have at all;
- where a bound was raised, a division in which that stage holds less than the bound, and that lacks room for more, is
  not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.spread_memory import SpreadMemory
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.model.units import in_seconds
from lightning_hetpipe.planning.search.divider import LIGHTEST, Divider, Division
from lightning_hetpipe.planning.search.local_search import LocalSearch, is_better
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.spread_plan import spread_plan
from lightning_hetpipe.rules.versions import STASH, WeightPolicy

ENOUGH = 0.99
"""Choose the smallest Nm within 1% of the best throughput."""

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
        help: Changes that would make it fit; None where it does.
    """

    idle: tuple[DeviceSlot, ...]
    tried: tuple[Tried, ...]
    reasons: tuple[str, ...]
    help: Help | None = None


def best_plan(
    profile: Profile,
    cluster: Cluster,
    slots: Sequence[DeviceSlot] | None = None,
    *,
    optimizer: str | float = "adam",
    ordered: bool = False,
    in_flight: int | None = None,
    recompute: bool = False,
    synchronise: float = 0.0,
    stages: int | None = None,
    weights: WeightPolicy = STASH,
    every: int = 1,
    spread: bool = False,
) -> Choice:
    """The plan with the least T_max that fits, at the smallest Nm within 1% of the best throughput.

    Where memory, or ``in_flight``, lets none come near 1 / T_max, it is the one with the most throughput that is found.

    Args:
        profile: The model's.
        cluster: Whose links connect the devices.
        slots: The virtual worker's devices; by default all of the cluster.
        optimizer: A name in :data:`~lightning_hetpipe.planning.model.stage_memory.OPTIMIZERS`, or the bytes of state
            for each byte of the weights.
        ordered: Whether stages are to lie on the devices in their given order; some may be left out all the same.
        in_flight: Nm, where it is not to be chosen.
        recompute: Whether forwards are computed again for their backwards.
        synchronise: Seconds that a wave's end waits for the parameter servers.
        stages: k, where it is not to be chosen.
        weights: The weight policy.
        every: Minibatches of an optimizer step.
        spread: Whether ``in_flight=1`` asks for a spread run. It does in a fit, unless that compiles, has several
            virtual workers, or computes forwards of several stages again. One device alone asks for it, too.

    Raises:
        SettingError: where the profile has no times of a device, for more stages than there are devices or layers, or
            where ``every`` is too few for the weight policy at ``in_flight``.
    """
    slots = cluster.slots if slots is None else tuple(slots)
    most = min(len(slots), len(profile.layers))
    if stages is not None and not 1 <= stages <= most:
        raise SettingError(
            f"stages={stages} cannot be planned for {len(slots)} devices and {len(profile.layers)} layers: each stage"
            f" needs one of both; set at most {most}"
        )
    state, alone = optimizer_state(optimizer), (stages or len(slots)) == 1
    memory = SpreadMemory.of(optimizer) if spread and (alone or not recompute) else None
    problem = PlanningProblem(
        profile, cluster, slots, ordered, state, recompute, stages, synchronise, weights, every, memory
    )
    if in_flight is not None:
        problem.versions(in_flight).check()
    search = _Search(problem)
    if memory is not None and (in_flight == 1 or (in_flight is None and len(slots) == 1)):
        return search.spread(memory)
    return search.choose() if in_flight is None else search.at(in_flight)


class _Search:
    """The search for the plan of ``problem``."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._divider = Divider(problem)
        self._found: dict[int, Estimate] = {}
        self._seen: dict[int, list[Division]] = {}
        self._searched: set[int] = set()

    def choose(self) -> Choice:
        """Choose Nm too."""
        tried, best, better = [], 0.0, 1
        short = False  # of memory
        for in_flight in range(1, 4 * len(self._problem.slots) + 5):
            found = self.plan(in_flight)
            tried.append(in_flight)
            if not found.fits:
                break
            short |= len(self._seen[in_flight]) > 1
            if found.rate > best * (1 + NEGLIGIBLE):
                better = in_flight
            best = max(best, found.rate)
            if not self._problem.versions(in_flight + 1).is_possible:
                break
            if len(found.stages) == 1:
                break  # nothing else computes meanwhile: more in flight would make weights staler for nothing
            # Nothing is faster than 1 / T_max; and what has not helped for as many as there are stages will not.
            if best * self._unlimited.bottleneck >= 1 - NEGLIGIBLE or in_flight >= better + len(found.stages) + 1:
                break
        if not self._found[1].fits:
            return self._unfit(1, asked=False)
        unfit = None if found.fits else tried[-1]
        fitting = tried if unfit is None else tried[:-1]
        if (short or unfit) and best * self._unlimited.bottleneck < ENOUGH:
            # From the largest on, as it is the fastest as often as not, and what is slower needs no look.
            for in_flight in reversed(fitting):
                best = max(best, self._locally(in_flight, ENOUGH * best).rate)
        plans = [self._found[in_flight] for in_flight in fitting]
        chosen = next(plan for plan in plans if plan.rate >= ENOUGH * best)
        if len(chosen.stages) == 1 < chosen.in_flight:  # as above
            chosen = plans[0] = self._found[1] = self._problem.estimate([chosen.stages[0].slot], [0], 1)
        reasons = _why(chosen, plans, tried[-1], unfit)
        if unfit is not None and not self._problem.recompute:
            # As many as keep all stages busy; to choose among fewer would take as long as to choose this plan.
            other = self._with_recompute()
            most = other.most(max(unfit, len(self._unlimited.slots) + 1), chosen.in_flight)
            if most is not None and most != chosen.in_flight:
                again = other.plan(most).rate / chosen.rate
                if again > 2 - ENOUGH:
                    reasons.append(f"recompute=True would be {again:.2f} times as fast, as Nm = {most} fits then")
        return self._choice(chosen, tried, reasons)

    def at(self, in_flight: int) -> Choice:
        """Plan for a given Nm."""
        found = self.plan(in_flight)
        if not found.fits:
            return self._unfit(in_flight, asked=True)
        if found.rate * found.bottleneck < ENOUGH or len(self._seen[in_flight]) > 1:
            found = self._locally(in_flight)
        return self._choice(found, [in_flight], [_slowest(found)])

    def spread(self, memory: SpreadMemory) -> Choice:
        """Plan a spread run, whose devices hold what ``memory`` says."""
        found = self._found[1] = spread_plan(replace(self._problem, recompute=False), memory)
        if found.fits:
            return self._choice(found, [1], [_one_after_another(found)])
        again = None if self._problem.recompute else self._with_recompute().most(1)
        reasons = ["even with one minibatch in flight the model does not fit"]
        return self._choice(found, [1], reasons, Help(None, again, _lacking(found)))

    def plan(self, in_flight: int) -> Estimate:
        """Plan with the least T_max that fits; where none was found, the best of a local search, which may not fit."""
        if in_flight not in self._found:
            self._found[in_flight] = self._divided(in_flight)
            if not self._found[in_flight].fits:
                self._locally(in_flight)
        return self._found[in_flight]

    def most(self, in_flight: int, fits: int = 0) -> int | None:
        """Largest Nm up to ``in_flight`` at which a plan fits; None if none does. More take more memory.

        ``fits`` is known to fit, if it is not 0.
        """
        if not fits and (in_flight < 1 or not self.plan(1).fits):
            return None
        fits, unfit, step = max(1, fits), in_flight + 1, 1
        while unfit - fits > 1:
            middle = min(fits + step, (fits + unfit) // 2)
            if self.plan(middle).fits:
                fits, step = middle, 2 * step
            else:
                unfit = middle
        return fits

    def _divided(self, in_flight: int) -> Estimate:
        """Raise the bounds until the division with the least T_max fits; the last one seen where none does."""
        loads = [set(LIGHTEST) for _ in self._problem.slots]
        division: Division | None = self._unlimited
        seen = self._seen[in_flight] = []
        while division is not None:
            seen.append(division)
            found = self._problem.estimate(division.slots, division.splits, in_flight)
            if found.fits:
                break
            for distance, stage in enumerate(reversed(found.stages)) if len(seen) > 1 else ():
                if stage.overflow:
                    assert stage.load not in loads[distance], "what is within its bounds fits"
                    loads[distance].add(stage.load)
            division = self._divider.divide(in_flight, loads, at_least=division.ticks)
        return found

    def _locally(self, in_flight: int, floor: float = 0.0, limited: bool = True) -> Estimate:
        """Plan that a local search finds, if that is faster or lacks less; see ``LocalSearch.best``.

        It begins with the best of each order, under the lightest bound or, if not ``limited``, under none.
        """
        if in_flight not in self._searched or not limited:
            search = LocalSearch(self._problem, self._divider.costs, in_flight)
            orders = self._divider.in_each_order(in_flight, (LIGHTEST,), limited)
            found = search.best(chain(reversed(self._seen[in_flight]), orders), floor)
            if found is not None and is_better(found, self._found[in_flight], 1 + NEGLIGIBLE):
                self._found[in_flight] = found
            if not floor:
                self._searched.add(in_flight)
        return self._found[in_flight]

    @cached_property
    def _unlimited(self) -> Division:
        """Fastest division if memory were no limit."""
        found = self._divider.divide(limited=False)
        assert found is not None
        return found

    def _unfit(self, in_flight: int, asked: bool) -> Choice:
        """The plan whose devices lack the least, and what would help."""
        found = self._locally(in_flight, limited=False)
        if found.fits:
            return self.at(in_flight) if asked else self.choose()
        again = None
        if not self._problem.recompute:
            other = self._with_recompute()
            if asked:
                again = other.most(in_flight)
            elif (choice := other.choose()).fits:
                again = choice.in_flight
        reasons = [f"no plan was found that fits at Nm = {in_flight}; this one lacks the least memory"]
        fewer, memory = self.most(in_flight - 1), self._problem.spread
        if fewer is None and memory is not None and spread_plan(self._problem, memory).fits:
            fewer = 1
        return self._choice(found, [in_flight], reasons, Help(fewer, again, _lacking(found)))

    def _with_recompute(self) -> _Search:
        return _Search(replace(self._problem, recompute=True, spread=None))

    def _choice(
        self, found: Estimate, tried: Sequence[int], reasons: Sequence[str], help_: Help | None = None
    ) -> Choice:
        used = {stage.slot for stage in found.stages}
        if not self._divider.exact:
            reasons = [*reasons, "there are too many kinds of devices to search all of their orders"]
        return Choice(
            found.stages,
            found.versions,
            found.recompute,
            found.rate,
            found.simulation,
            found.spread,
            idle=tuple(slot for slot in self._problem.slots if slot not in used),
            tried=tuple(self._tried(in_flight) for in_flight in tried),
            reasons=tuple(reasons),
            help=help_,
        )

    def _tried(self, in_flight: int) -> Tried:
        found = self._found[in_flight]
        return Tried(in_flight, found.rate, found.bottleneck) if found.fits else Tried(in_flight, None, None)


def _lacking(found: Estimate) -> dict[int, int]:
    return {index: stage.overflow for index, stage in enumerate(found.stages) if stage.overflow}


def _one_after_another(found: Estimate) -> str:
    took = in_seconds(sum(stage.times.total for stage in found.stages))
    if len(found.stages) == 1:
        return f"all layers on {found.stages[0].slot.device.name} take {took} for each minibatch"
    return f"devices compute one after another, {took} for each minibatch, as one is in flight"


def _slowest(found: Estimate) -> str:
    number = max(range(len(found.stages)), key=lambda index: found.stages[index].times.total)
    stage = found.stages[number]
    if len(found.stages) == 1:
        return f"all layers on {stage.slot.device.name} take {in_seconds(found.bottleneck)} for each minibatch"
    share = 100 * found.rate * found.bottleneck
    return (
        f"stage {number} on {stage.slot.device.name} is the slowest, with {in_seconds(found.bottleneck)} for each"
        f" minibatch; Nm = {found.in_flight} reaches {share:.0f}% of what that allows"
    )


def _why(chosen: Estimate, plans: Sequence[Estimate], last: int, unfit: int | None) -> list[str]:
    best = max(plans, key=lambda plan: plan.rate)
    reasons = [_slowest(chosen)]
    if best.in_flight != chosen.in_flight:
        reasons.append(
            f"Nm = {chosen.in_flight} is the smallest within 1% of the best, {best.rate:.3g} minibatches per second at"
            f" Nm = {best.in_flight}"
        )
    elif len(chosen.stages) == 1:
        reasons.append("with a single stage, a second minibatch in flight has nothing to overlap with")
    elif len(plans) > 1:
        looked = f"of Nm = 1 to {last if unfit is None else unfit - 1}"
        reasons.append(f"{looked} none is faster than {chosen.in_flight}; each smaller one is slower by more than 1%")
    if unfit is not None:
        reasons.append(f"no plan was found that fits at Nm = {unfit}")
    return reasons
