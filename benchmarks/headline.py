"""`python -m benchmarks.headline`: time to accuracy on emulated clusters, HetPipe against Lightning's DDP.

Learning rates are those that the search has found (`python -m benchmarks.headline_search`). Each run is kept in a file
as it ends, so that the command goes on where it was stopped. Settings, as `name=value`:

full=true       three seeds instead of one
labs=[paper]    some of the clusters
methods=[ddp]   some of the methods
folder=...      where runs, table and picture are kept; another folder, or an empty one, begins anew
slower=4        have emulated devices and links take four times as long, on a machine that is busy
replays=true    instead of runs, make replays of three seeds: training in the order of a simulated run, which waits for
                nothing; of D = 0 they have the weights of runs, to rounding, at the simulated seconds
write=true      put the table and the picture into the docs, too, and keep the runs beside the benchmarks

Needs root on Linux, and the programs ip, tc and ss.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.experiments import settings
from benchmarks.harness import ROOT, ProcessFailed, Spread
from benchmarks.headline_cluster import COMPARED, LABS, METHODS, pace
from benchmarks.headline_pictures import curves
from benchmarks.headline_runs import IN_A_ROW, TARGET, Found, Result, keep, read, run
from benchmarks.headline_search import KEPT as SEARCHED
from benchmarks.headline_search import best_rate, replay
from benchmarks.headline_worker import Job
from benchmarks.machine import describe_machine
from benchmarks.results import as_table, show_block

KEPT = ROOT / "benchmarks" / "headline.jsonl"
REPLAYS = ROOT / "benchmarks" / "headline_replays.jsonl"
PAGE = ROOT / "docs" / "virtual-workers.md"
PICTURE = "headline.svg"
BEGIN, END = "<!-- headline: make headline ARGS=write=true -->", "<!-- end of headline -->"
SEEDS, FULL = (0,), (0, 1, 2)

SEARCHED_AS = {"ddp_by_speed": "ddp"}
"""Methods whose learning rate is another one's: DDP's steps have the same samples, however they are divided."""

LIMIT = 900.0
"""Seconds of a run, after which it has not reached the target."""

PACE = 0.9
"""Least pace of a run that counts, as a share of the simulated one: else the machine was too busy for it."""


@dataclass
class Options:
    """Settings of the command."""

    full: bool = False
    labs: list[str] = field(default_factory=lambda: list(LABS))
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    folder: str = "outputs/headline"
    slower: float = 1.0
    replays: bool = False
    write: bool = False


def options(arguments: Sequence[str]) -> Options:
    """The settings that ``arguments`` give.

    Raises:
        ValueError: which names the setting.
    """
    given = settings(Options, arguments)
    for name, known in (("labs", LABS), ("methods", METHODS)):
        if unknown := [each for each in getattr(given, name) if each not in known]:
            raise ValueError(f"{name}={unknown} are unknown; there are {', '.join(known)}")
    return given


def jobs(given: Options, searched: Found) -> list[Job]:
    """The runs to make: seed by seed, so that what disturbs a shared machine for a while disturbs all methods."""
    found = []
    for seed in FULL if given.full or given.replays else SEEDS:
        for lab in given.labs:
            for method in COMPARED[lab]:
                if method not in given.methods:
                    continue
                rate = best_rate(searched, lab, SEARCHED_AS.get(method, method))
                if rate is None:
                    command = f"python -m benchmarks.headline_search {lab} {seed} {method}"
                    print(f"{method} on {lab} is left out, as it has no rate; {command} finds one", file=sys.stderr)
                    continue
                found.append(Job(lab, method, rate, seed, slower=given.slower))
    return found


def spread(found: Found, lab: str, method: str, over: str | None = None) -> Spread | None:
    """Seconds until the target, over seeds; with ``over``, that method's as a multiple of these, formed by seed.

    None where a run has not reached it.
    """
    mine, theirs = (_by_seed(found, lab, name) for name in (method, over or method))
    values = []
    for seed, result in mine.items():
        if over is not None and seed not in theirs:
            continue
        seconds, others = result.reached, theirs[seed].reached
        if seconds is None or others is None:
            return None
        values.append(seconds if over is None else others / seconds)
    return Spread.of(values) if values else None


def _by_seed(found: Found, lab: str, method: str) -> Mapping[int, Result]:
    return {job.seed: result for job, result in found.items() if (job.lab, job.method) == (lab, method)}


def table(found: Found, replays: Found) -> str:
    """All results, in Markdown."""
    rows: list[tuple[str, ...]] = [
        (
            "",
            "learning rate",
            "seconds to the target",
            "sooner than DDP",
            "minibatches per second",
            "simulated",
            "late",
            "seconds, replays",
            "sooner, replays",
        )
    ]
    for lab, methods in COMPARED.items():
        there = [method for method in methods if _by_seed(found, lab, method) or _by_seed(replays, lab, method)]
        if not there:
            continue
        rows.append((f"**{LABS[lab].title}**", *[""] * (len(rows[0]) - 1)))
        for method in there:
            results = _by_seed(found, lab, method)
            rate = next(job.rate for job in (*found, *replays) if (job.lab, job.method) == (lab, method))
            rows.append(
                (
                    METHODS[method].title,
                    f"{rate.lr:g}{f', momentum {rate.momentum:g}' if rate.momentum else ''}",
                    _cell(spread(found, lab, method), 0),
                    _cell(spread(found, lab, method, over="ddp"), 2),
                    _cell(Spread.of(sum(each.minibatches) for each in results.values()) if results else None, 1),
                    f"{pace(LABS[lab], METHODS[method]):.1f}",
                    f"{100 * max(each.late for each in results.values()):.1f} %" if results else "–",
                    _cell(spread(replays, lab, method), 0),
                    _cell(spread(replays, lab, method, over="ddp"), 2),
                )
            )
    return "\n".join(as_table(rows))


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "–"
    middle, low, high = (f"{each:.{digits}f}" for each in (spread.median, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} .. {high})"


def block(found: Found, replays: Found, says: str) -> str:
    """The picture and the table, with what was measured."""
    picture = f"![Accuracy over seconds, of HetPipe and DDP]({PICTURE})"
    return "\n\n".join([BEGIN, picture, table(found, replays), says, END])


def measured(found: Found) -> str:
    """Date, target, machine and versions of a measurement that ends now."""
    machine, seeds = describe_machine(()), len({job.seed for job in found})
    slower = " and ".join(f"{each:g}" for each in sorted({job.slower for job in found}))
    return (
        f"Measured {date.today().isoformat()}, {f'medians and ranges of {seeds} seeds' if seeds > 1 else 'one seed'},"
        f" on {machine['cpu']}, {machine['cpus']} CPUs, with the emulated clock {slower} times as slow. The target is"
        f" {100 * TARGET:.0f}% of the held-out images, as the median of {IN_A_ROW} copies of the weights in a row."
        " Replays are training in the simulated order, without waiting: medians and ranges of three seeds."
        f" Python {machine['python']}, torch {machine['torch']}, lightning {machine['lightning']}."
    )


def show(found: Found, replays: Found, says: str, folder: Path, page: Path | None) -> None:
    """Write table and picture to ``folder``, and into the page of the docs, if given."""
    show_block(block(found, replays, says), {PICTURE: curves(found)}, folder / "headline.md", page, BEGIN, END)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing, and shows all; returns 2 for settings that cannot be, 1 if a run failed."""
    try:
        given = options(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"{error}\n\n{__doc__}", file=sys.stderr)
        return 2
    folder = Path(given.folder)
    file = folder / "runs.jsonl"
    failed = 0
    if given.replays:
        torch.set_num_threads(1)
        for job in jobs(given, read(SEARCHED)):
            if job not in read(REPLAYS):
                print(f"replay of {job.lab}, {job.method}, seed {job.seed}", file=sys.stderr, flush=True)
                keep(REPLAYS, job, replay(job))
        return 0
    for job in jobs(given, read(SEARCHED)):
        if job in read(file):
            continue
        print(f"{job.lab}, {job.method}, seed {job.seed}, {job.rate}", file=sys.stderr, flush=True)
        try:
            result = run(job, LIMIT)
        except ProcessFailed as failure:
            print(failure, file=sys.stderr)
            failed = 1
            continue
        share = sum(result.minibatches) / pace(LABS[job.lab], METHODS[job.method])
        print(f"target after {result.reached} s, at {share:.0%} of the simulated pace", file=sys.stderr, flush=True)
        if share < PACE:
            print(f"less than {PACE:.0%}: the run is not kept; try slower=...\n{result}", file=sys.stderr)
            failed = 1
            continue
        keep(file, job, result)
    found = read(file)
    if given.write:
        shutil.copyfile(file, KEPT)
    show(found, read(REPLAYS), measured(found), folder, PAGE if given.write else None)
    print((folder / "headline.md").read_text())
    return failed


def _terminated(*_: object) -> NoReturn:
    """End as after Ctrl-C, so that the processes of a run end, too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
