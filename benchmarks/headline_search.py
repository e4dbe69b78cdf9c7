"""`python -m benchmarks.headline_search LAB SEED METHOD...`: learning rates for the headline benchmark.

Runs are made in the emulated order, but wait for nothing. Each is kept in `benchmarks/headline_search.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

import torch

from benchmarks.harness import ROOT
from benchmarks.headline_cluster import LABS, METHODS
from benchmarks.headline_order import Rate, trained
from benchmarks.headline_runs import Found, Result, keep, read
from benchmarks.headline_task import accuracy, network
from benchmarks.headline_worker import EVERY, Job

KEPT = ROOT / "benchmarks" / "headline_search.jsonl"
"""Runs of the search."""

RATES: Sequence[float] = tuple(0.000125 * 2**power for power in range(11))
MOMENTUM = 0.9
FIRST: Mapping[bool, float] = {True: 0.016, False: 0.001}
"""Rates that the search begins with, by whether it is DDP's."""

MOST = 60_000
"""Samples of a run, at most."""


def replay(job: Job, limit: float = inf) -> Result:
    """Train in the emulated order until the target, for so many emulated seconds at most."""
    seconds: list[float] = []
    accuracies: list[float] = []
    shown = network(job.seed)
    for now, _, net in trained(LABS[job.lab], METHODS[job.method], job.rate, job.seed, MOST):
        if seconds and now < seconds[-1] + EVERY:
            continue
        shown.load_state_dict(net.state_dict())
        seconds.append(round(now, 3))
        accuracies.append(round(accuracy(shown, job.seed), 4))
        result = Result(seconds, accuracies)
        if result.reached is not None or now > limit:
            break
    return result


def search(lab: str, method: str, seed: int, file: Path) -> Iterator[tuple[Job, Result]]:
    """Climb from the first rate to the best one; both neighbours of the best are tried."""
    found = read(file)
    best = inf
    first = FIRST[METHODS[method].clock_distance is None]
    at = min(range(len(RATES)), key=lambda index: abs(RATES[index] - first))
    while True:
        times: dict[int, float] = {}
        for index in (at, at - 1, at + 1):
            if not 0 <= index < len(RATES):
                continue
            job = Job(lab, method, Rate(RATES[index], MOMENTUM), seed)
            if job not in found:
                found[job] = replay(job, 1.3 * best)
                keep(file, job, found[job])
                yield job, found[job]
            times[index] = _time(found[job])
            best = min(best, times[index])
        following = min(times, key=lambda index: (times[index], index != at))
        if following == at:
            break
        at = following


def _time(result: Result) -> float:
    """Seconds to the target; for runs that do not come there, less where they come nearer."""
    return result.reached if result.reached is not None else 1e6 * (2 - max(result.accuracies))


def best_rate(found: Found, lab: str, method: str) -> Rate | None:
    """The rate with which all seeds of a method reach the target soonest, on average."""
    by_rate: dict[Rate, list[float]] = {}
    for job, result in found.items():
        if (job.lab, job.method) == (lab, method):
            by_rate.setdefault(job.rate, []).append(_time(result))
    return min(by_rate, key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]), default=None)


def main(*arguments: str) -> None:
    """Search as ``LAB SEED METHOD...`` say; runs that are there are not made again."""
    torch.set_num_threads(1)
    lab, seed, *methods = arguments
    for method in methods:
        for job, result in search(lab, method, int(seed), KEPT):
            print(
                method,
                job.rate,
                result.reached,
                len(result.seconds),
                result.seconds[-1],
                max(result.accuracies),
                flush=True,
            )


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
