"""Common parts of all benchmarks: fresh processes that report measurements, interleaved rounds, medians and ranges."""

import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TypeVar

ROOT = Path(__file__).resolve().parents[1]
# Only lines with this mark are ours: libraries print to stdout too.
MARK = "@benchmark "
READY = "ready"
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class ProcessFailed(Exception):
    """A benchmark's process ended without success; the message holds the end of what it wrote to stderr."""


@dataclass(frozen=True)
class Options:
    """Options of the command line; `rounds` is at least 1."""

    quick: bool
    rounds: int


@dataclass(frozen=True)
class Measurement:
    """One process's measurement of its window of minibatches."""

    name: str
    rate: float
    """Minibatches per second."""
    cores: float
    """CPU seconds that the process used per second of wall time."""
    threads: int
    """torch's intra-operator thread count."""
    loss: float | None
    """Training loss of the window's last minibatch (None where it is not known): shows whether the variant trains."""
    notes: Mapping[str, object] = field(default_factory=dict)
    first_step: float | None = None
    """Seconds from the call of ``fit`` to the end of the first minibatch (None where it is not known)."""

    def numbers(self, note: str) -> list[float]:
        """The figures that ``note`` holds."""
        found = self.notes[note]
        assert isinstance(found, Sequence)
        return [float(each) for each in found]


@dataclass(frozen=True)
class Spread:
    """Median and range of one quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Summarises at least one value; raises `statistics.StatisticsError` for none."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))

    @classmethod
    def of_ratios(
        cls, rounds: Iterable[Mapping[K, V]], over: K, under: K, value: Callable[[V], float]
    ) -> "Spread | None":
        """Summarises a ratio of values that is formed within each round; None if no round has both sides."""
        both = [each for each in rounds if over in each and under in each]
        return cls.of(value(each[over]) / value(each[under]) for each in both) if both else None


@dataclass(frozen=True)
class Figure:
    """One number that a benchmark is run for: a row of the table of all benchmarks."""

    name: str
    spread: Spread | None
    """None where it could not be measured."""
    unit: str = ""
    """Empty for ratios."""
    target: float | None = None
    at_most: bool = False
    """True if `target` is an upper bound, else it is a lower one."""
    digits: int = 2
    """After the decimal point."""

    @property
    def verdict(self) -> str:
        """ "met" or "missed"; empty without a target or a measurement."""
        if self.spread is None or self.target is None:
            return ""
        met = self.spread.median <= self.target if self.at_most else self.spread.median >= self.target
        return "met" if met else "missed"

    def cells(self) -> tuple[str, str, str, str]:
        """Median, range, target and verdict, as tables have them."""
        target = "" if self.target is None else f"{self.target:.{min(self.digits, 2)}f}"
        if self.spread is None:
            return "?", "", target, ""
        median, low, high = (f"{x:.{self.digits}f}" for x in (self.spread.median, self.spread.low, self.spread.high))
        return median, f"{low} .. {high}", target, self.verdict


@dataclass(frozen=True)
class Outcome:
    """A finished benchmark: a table to read, data to keep, and whether every variant could be measured."""

    text: str
    data: Mapping[str, object]
    complete: bool
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Process:
    """A Python module to run as a process of its own; `threads` None leaves torch at its default thread count.

    `prefix` is a command that runs it, such as `ip netns exec NAME`; `codes` are exit codes with which it has not
    failed.
    """

    module: str
    arguments: tuple[str, ...]
    threads: int | None = 1
    prefix: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)

    def start(self, errors: IO[bytes]) -> "subprocess.Popen[str]":
        """Starts it in the repository's root, with `errors` as its stderr."""
        environment = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
        if self.threads is not None:
            environment |= dict.fromkeys(THREAD_SETTINGS, str(self.threads))
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", self.module, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env=environment,
            text=True,
        )


def announce(measurement: Measurement) -> None:
    """Hands a measurement to the process that started this one."""
    _say(json.dumps(asdict(measurement)))


def wait_for_others() -> None:
    """Returns once every process that was started together with this one has called it too."""
    _say(READY)
    if not sys.stdin.readline():
        raise EOFError("the process that started this one is gone")


def _say(text: str) -> None:
    # In one piece, its end included, as processes that this one has started may write to the same pipe.
    sys.stdout.write(f"{MARK}{text}\n")
    sys.stdout.flush()


def run_alone(process: Process, timeout: float) -> Measurement:
    """`run_together` for one process that announces one measurement."""
    ((announced,),) = run_together([process], timeout)
    return announced


def run_together(processes: Sequence[Process], timeout: float) -> list[list[Measurement]]:
    """Runs processes side by side until all have ended and returns what each announced, in their order.

    `timeout` is in seconds, for all of it. The first process that fails ends the others and raises `ProcessFailed`.
    """
    deadline = time.monotonic() + timeout
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        logs: list[IO[bytes]] = []
        running: list[subprocess.Popen[str]] = []
        for index, process in enumerate(processes):
            logs.append(stack.enter_context(tempfile.TemporaryFile()))
            child = stack.enter_context(process.start(logs[-1]))
            stack.callback(child.kill)
            running.append(child)
            threading.Thread(
                target=_read, args=(index, child, lines), name=f"benchmark-reader-{index}", daemon=True
            ).start()
        try:
            return _collect(processes, running, logs, lines, deadline)
        except queue.Empty:
            raise ProcessFailed(f"not done after {timeout:.0f} s") from None


def _read(index: int, child: "subprocess.Popen[str]", lines: "queue.Queue[tuple[int, str | None]]") -> None:
    # A None says that the process writes nothing more; also where its end closes the pipe under this very read.
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(MARK):
                lines.put((index, line.removeprefix(MARK).strip()))
    except ValueError:
        pass
    finally:
        lines.put((index, None))


def _collect(
    processes: Sequence[Process],
    running: Sequence["subprocess.Popen[str]"],
    logs: Sequence[IO[bytes]],
    lines: "queue.Queue[tuple[int, str | None]]",
    deadline: float,
) -> list[list[Measurement]]:
    announced: list[list[Measurement]] = [[] for _ in running]
    ready = 0
    ended = 0
    while ended < len(running):
        index, line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        if line is None:
            ended += 1
            if running[index].wait() not in processes[index].codes:
                raise ProcessFailed(_tail(logs[index]) or f"exit status {running[index].returncode}")
        elif line == READY:
            ready += 1
            if ready == len(running):
                ready = 0
                for child in running:
                    assert child.stdin is not None
                    with contextlib.suppress(BrokenPipeError):  # It has ended: its reader says so next.
                        child.stdin.write("go\n")
                        child.stdin.flush()
        else:
            announced[index].append(Measurement(**json.loads(line)))
    return announced


def _tail(log: IO[bytes], count: int = 5) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").rstrip().splitlines()[-count:])


def in_rounds(jobs: Mapping[str, Callable[[], T]], rounds: int) -> tuple[list[dict[str, T]], dict[str, str]]:
    """Runs every job once per round, so that what disturbs a shared machine for a while disturbs all of them.

    Returns one dictionary per round, and the reason for each job that failed (it is left out from then on).
    """
    results: list[dict[str, T]] = []
    failures: dict[str, str] = {}
    for number in range(1, rounds + 1):
        results.append({})
        for name, job in jobs.items():
            if name in failures:
                continue
            print(f"round {number} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                results[-1][name] = job()
            except ProcessFailed as failure:
                failures[name] = str(failure)
    return results, failures


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lays rows out in columns: the first one left aligned, the others right aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )


def figures_table(figures: Sequence[Figure], header: str = "ratio") -> str:
    """Lays figures out, a row each."""
    return table([(header, "median", "range", "target", ""), *((each.name, *each.cells()) for each in figures)])
