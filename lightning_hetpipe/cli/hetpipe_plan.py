"""hetpipe-plan: plan which layers run on which device and how many minibatches are in flight, and simulate the plan.

With ``measure=links``, measure links instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from lightning_hetpipe.cli import config_checks, plan_inputs
from lightning_hetpipe.cli.cluster_plans import cluster_plans, drawn, remarks, unused
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.start_up import FAILED
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement.progress import on_terminal
from lightning_hetpipe.planning.allocation.allocator import Allocation
from lightning_hetpipe.planning.model.catalogue import known
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.stage_memory import planned_policies
from lightning_hetpipe.planning.model.units import digits, in_bytes
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.planning.search.choice import best_plan, check_stages
from lightning_hetpipe.planning.search.grouped_plans import plan_with_groups
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.reporting.plots import draw
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.versions import POLICIES, Versions, WeightPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_unfit: list[Estimate] = []
"""Plans of jobs for which no plan fits."""


def main() -> None:
    """Run the console script, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`. 1 if no plan fits."""
    _unfit.clear()
    enter(_application, plan_inputs.PROGRAM)
    if _unfit:
        sys.exit(FAILED)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="plan", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """Run one job of Hydra's. Return what :func:`run` returns, which sweepers may optimise."""
    if config.get("measure") is not None:
        job(measure, config, plan_inputs.PROGRAM)
        return None
    return job(run, config, plan_inputs.PROGRAM)


def measure(config: DictConfig) -> None:
    """Measure the links of this machine. Raise SettingError for a setting that only a plan needs."""
    config_checks.check(config, plan_inputs.PROGRAM)
    plan_inputs.check_targets(config, measured=False)
    for setting in ("profile", "devices", "cluster"):
        if config.get(setting) is not None:
            given = f"{setting}={config[setting]}" if setting != "cluster" else "a cluster"
            raise SettingError(
                f"measure=links measures this machine and makes no plan, so that {given} has no effect; leave one of"
                " both out."
            )
    from lightning_hetpipe.cli import measured_links  # with torch

    measured_links.run(config)


def run(config: DictConfig) -> float | None:
    """Make a plan, print it, and save ``plan.json`` and a picture in the run's folder.

    Return the simulated minibatches per second. If no plan fits, return None and save no ``plan.json``.

    Raises:
        SettingError: if a setting is unknown, missing or of the wrong kind.
    """
    plan_inputs.check(config)
    given, cluster = plan_inputs.given_profile(config), plan_inputs.cluster_of(config)
    plan_inputs.refuse_unknown(config, cluster, given)
    check_stages(plan_inputs.given_stages(config), len(cluster.slots))
    wsp, allocation = config_checks.synchronisation(config), plan_inputs.allocation_of(config, cluster)
    plan_inputs.check_targets(config, measured=given is None)
    measured, optimizer, policies = plan_inputs.profile_of(config, given)
    plan_inputs.refuse_unknown(config, cluster, measured)
    cluster, nominal = plan_inputs.with_memory(cluster, measured)
    devices = [slot.device for slot in cluster.slots]
    profile = measured.with_estimates(devices, str(config.precision))
    problem, in_flight = plan_inputs.problem_of(config, profile, cluster, optimizer)

    names = [layer.name for layer in profile.layers]
    guessed = {device.name for device in devices if profile.name_of(device) in profile.estimated}
    others: Callable[[], Sequence[str]] = tuple
    found: Estimate | Allocation
    if allocation is not None:
        found, compared = cluster_plans(allocation, wsp, replace(problem, spread=False), in_flight, policies)
        lacking = [found.choices[number] for number in found.unfit]
        lines, figure = remarks(found, compared, cluster), partial(drawn, cluster, compared)
    else:
        search = plan_with_groups if config.split else best_plan

        @cache
        def plan_for(policy: WeightPolicy) -> Estimate:
            with on_terminal(f"searching for a plan, weights='{policy.name}'", None) as tick:
                return search(replace(problem, weights=policy, progress=tick), in_flight)

        found = next((choice for choice in map(plan_for, policies) if choice.fits), None) or plan_for(policies[-1])
        lacking = [] if found.fits else [found]
        lines, figure = _remarks(found, problem), partial(_schedule, found)
        if config.split and not profile.widths:
            why = "the profile has no times of parts of layers; measure it with split=true"
            lines.append(f"- no devices are joined, as {why}")
        if len(devices) > 1 and in_flight != 1:  # else all policies are the same
            # Show the policies for this optimizer, and the policies for any optimizer.
            own = [*policies, *planned_policies(optimizer)]
            several = [each for each in POLICIES.values() if each in own or not each.predicts or each.keeps_change]
            others = partial(side_by_side, several, plan_for, in_flight, problem.every)

    plan = Plan.of(found, profile.model, names, cluster, guessed, clock_distance=wsp.clock_distance, nominal=nominal)
    lines += _estimates(profile)
    if plan_inputs.of_strategy(config, "compile"):
        lines.append("- strategy.compile is not in these times: layers are measured without compilation")
    print(plan, *lines, sep="\n", flush=True)
    print(*others(), "", sep="\n")  # after the plan, because this may take several times as long
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.profile is None:
        profile_file.save(measured, folder / "profile.json")
        print(f"profile  {folder / 'profile.json'}")
    if lacking:
        _advise(lacking[0])
        return None
    plan.save(folder / "plan.json")
    print(f"plan     {folder / 'plan.json'}\n{_picture(figure, plan, folder)}")
    return found.rate


def _advise(choice: Estimate) -> None:
    """Print what would make the plan fit, and note that no plan fits."""
    ways = [f"- {way}" for way in choice.ways_out(cli=True)]
    print(
        "No plan was found that fits into memory; this one lacks the least.",
        *(["It would fit with:"] if ways else []),
        *ways,
        sep="\n",
    )
    _unfit.append(choice)


def _remarks(choice: Estimate, problem: PlanningProblem) -> list[str]:
    """Return lines below the table: reasons, assumed links, unused devices."""
    links = problem.cluster.assumed([stage.slot for stage in choice.stages])
    why = "no layer is left for it" if choice.spread else "no plan with it is faster"
    why = why if problem.stages is None else "strategy.stages leaves it out"
    idle = unused(choice.idle if choice.fits else (), problem.cluster, why)
    return ["", *(f"- {reason}" for reason in (*choice.reasons, *links)), *idle]


def _estimates(profile: Profile) -> list[str]:
    """Return remarks on times that were not measured."""
    lines = []
    for base in dict.fromkeys(profile.estimated.values()):
        names = ", ".join(name for name, other in profile.estimated.items() if other == base)
        line = f"- the times of {names} are estimated from those of {base}, by peak FLOP/s and memory bandwidth"
        if profile.is_scaled(base):
            speed = f"{profile.speeds[base] / 1e12:.2g} TFLOP/s"
            line += f" (measured on {base}: {speed}): rough, most of all where layers are small"
        elif known(base) is None:
            line += f"; {base} stands for the fastest of them: only ratios mean something, and links look too fast"
        lines.append(line)
    return lines


def _picture(figure: Callable[[Plan], Figure], plan: Plan, folder: Path) -> str:
    """Save a figure of ``plan``. Return a line with the picture's path, or the reason why there is no picture."""
    try:
        made = figure(plan)
    except SettingError as error:  # without matplotlib
        return f"picture  none: {error}"
    made.savefig(folder / "plan.png")
    return f"picture  {folder / 'plan.png'}"


def _schedule(choice: Estimate, _: Plan) -> Figure:
    """Draw the simulated schedule of ``choice``."""
    times, slots = [stage.times for stage in choice.stages], [str(stage.slot) for stage in choice.stages]
    return draw(Timeline.simulated(choice.simulation, times, choice.in_flight, slots))


_HEADER = ["weights", "in flight", "minibatches per second", "memory of all stages", "steps stale"]


def side_by_side(
    policies: Sequence[WeightPolicy], plan: Callable[[WeightPolicy], Estimate], in_flight: int | None, every: int
) -> list[str]:
    """Lay out a table with a row for the plan under each of ``policies``.

    ``in_flight`` is Nm, or None if plans choose it. ``every`` is the number of minibatches of an optimizer step.
    """
    rows = []
    for policy in policies:
        if in_flight is None or Versions(policy, in_flight, every).is_possible:
            rows.append(_policy_row(policy, plan(policy)))
        else:
            needs = f"needs trainer.accumulate_grad_batches={policy.least_window(in_flight)}"
            rows.append([policy.name, "", "", "", needs])
    return ["", *aligned([_HEADER, *rows], left=(0, len(_HEADER) - 1))]


def _policy_row(policy: WeightPolicy, choice: Estimate) -> list[str]:
    steps = choice.versions.most_steps
    return [
        policy.name,
        str(choice.in_flight),
        digits(choice.rate) if choice.fits else "does not fit",
        in_bytes(sum(stage.memory.total for stage in choice.stages)),
        f"{steps}, predicted" if policy.predicts and steps else str(steps),
    ]


if __name__ == "__main__":
    main()
