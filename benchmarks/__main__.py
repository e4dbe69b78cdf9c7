"""`python -m benchmarks`: runs the benchmarks, prints their tables and, where asked to, writes what they found."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path

from benchmarks import (
    capture_costs,
    cluster_simulation,
    compile,
    ed_local,
    engine_cost,
    faults,
    growth,
    host_cost,
    import_time,
    paper_cluster,
    placed,
    planning,
    recompute,
    results,
    schedule,
    several_nodes,
    split_layers,
    time_to_target,
    transport,
    two_stages,
    virtual_workers,
)
from benchmarks.harness import Options, Outcome
from benchmarks.prediction_costs import PREDICTION_COSTS
from benchmarks.stage_steps import STAGE_STEPS
from benchmarks.timeline_costs import TIMELINE_COSTS

BENCHMARKS: Mapping[str, Callable[[Options], Outcome]] = {
    import_time.NAME: import_time.run,
    engine_cost.NAME: engine_cost.run,
    host_cost.NAME: host_cost.run,
    schedule.NAME: schedule.run,
    planning.NAME: planning.run,
    paper_cluster.NAME: paper_cluster.run,
    **{name: partial(two_stages.run, name=name) for name in two_stages.TASKS},
    time_to_target.NAME: time_to_target.run,
    recompute.NAME: recompute.run,
    split_layers.NAME: split_layers.run,
    compile.NAME: compile.run,
    capture_costs.NAME: capture_costs.run,
    transport.NAME: transport.run,
    virtual_workers.NAME: virtual_workers.run,
    cluster_simulation.NAME: cluster_simulation.run,
    faults.NAME: faults.run,
    growth.NAME: growth.run,
    several_nodes.NAME: several_nodes.run,
    ed_local.NAME: ed_local.run,
    placed.NAME: placed.run,
    **{turns.name: turns.run for turns in (TIMELINE_COSTS, PREDICTION_COSTS, STAGE_STEPS)},
}


def positive(text: str) -> int:
    """Reads a whole number of at least 1; argparse turns the ValueError into its usual message."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen benchmarks; returns 1 if a variant could not be measured, else 0: a missed target is no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, for a first impression")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement of every round to FILE")
    parser.add_argument("--rounds", type=positive, metavar="N", help="rounds to measure (default 5, with --quick 1)")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.md", help="write the table of all figures to FILE.md and FILE.json"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="measure nothing: let README.md and docs/staleness.md cite the figures of results.json",
    )
    given = parser.parse_args(arguments)
    if given.readme:
        kept = results.read(results.RESULTS)
        results.cite(results.README, kept)
        time_to_target.cite(kept)
        return 0

    options = Options(quick=given.quick, rounds=given.rounds or (1 if given.quick else 5))
    outcomes = {name: run(options) for name, run in BENCHMARKS.items() if given.only in (None, name)}
    for outcome in outcomes.values():
        print(f"\n{outcome.text}")
    if given.json is not None:
        given.json.write_text(json.dumps({name: outcome.data for name, outcome in outcomes.items()}, indent=2) + "\n")
    if given.table is not None:
        results.write(given.table, outcomes, options, list(BENCHMARKS), date.today())
    return 0 if all(outcome.complete for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
