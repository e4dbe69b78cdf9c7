"""`python -m benchmarks.gpu`: the trial on one GPU, with what CPUs cannot show. It ends within `--seconds`.

Comparisons go first, several processes at once; then ratios over a plain Trainer, one process at a time, by turns. Each
part has a time limit of its own. Whatever is known is written at once: to `results.jsonl`, `cases.txt` and `log.txt` in
the folder `--out`, and as a line on stdout. The table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.harness import ROOT, Spread, table
from benchmarks.training_task import Task

WORKER = "benchmarks.gpu_worker"

GROUPS = {"plain": 2, "oracle": 2, "seeds": 1, "effects": 1, "effects sync": 2, "pipelines": 2, "effects stash": 2}
GROUPS |= {"flex": 1}
"""Groups of comparisons (benchmarks.gpu_worker), each with the number of processes that share it."""

GPU_TESTS = ("tests/hosts/test_gpus.py", "tests/pipeline/test_streams.py")

SMALL = Task("plain", model="words", width=256, batch=16, length=128, words=512, warmup=30, steps=100)
LARGE = Task(
    "plain", model="words", layers=12, width=768, batch=8, length=1024, words=50304, precision="bf16-mixed", warmup=8,
    steps=24, tail=6,
)  # fmt: skip
RESNET = Task("plain", model="resnet50", batch=32, length=224, warmup=8, steps=24, tail=6)
GPT2 = Task("plain", model="gpt2", layers=4, width=128, batch=8, words=512, warmup=5, steps=20, tail=5)
TITLES = {
    "GPT 8x256": SMALL,
    "HF GPT-2 4x128": GPT2,
    "GPT 12x768 bf16": LARGE,
    "ResNet-50": RESNET,
}


def variants(task: Task) -> dict[str, Task]:
    """The plain task, and the tasks that are compared with the plain task, by name."""
    one = replace(task, variant="strategy", stages=1, in_flight=1)
    two = replace(task, variant="strategy", stages=2, in_flight=3)
    found = {"plain": task, "k=1 Nm=1": one, "k=2 Nm=1": replace(one, stages=2)}
    if task.model != "resnet50":
        found |= {"k=2 Nm=3": two}
        if task.model == "words":
            found |= {"k=2 Nm=3 stash": replace(two, weights="stash")}
    return found


def tiny(task: Task) -> Task:
    """A size at which a CPU takes seconds."""
    small = replace(task, layers=2, width=32, batch=2, length=16, words=50, warmup=3, steps=4, tail=3)
    return replace(small, length=64, batch=1) if task.model == "resnet50" else small


@dataclass(frozen=True)
class Part:
    """One process to run.

    Attributes:
        name: For people.
        command: What it is.
        limit: Seconds after which it is ended.
        kind: What its stdout holds: lines of JSON, text, or pytest's report.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    kind: Literal["results", "turns", "text", "tests"]


@dataclass
class Trial:
    """Runs parts, and writes what comes of them into the folder ``out``."""

    out: Path
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, part: Part, deadline: float | None = None) -> None:
        """Run ``part`` within its limit and what time is left, until ``deadline`` or the trial's."""
        limit = min(part.limit, (deadline or self.deadline) - time.monotonic())
        if limit < 5:
            self._add({"part": part.name, "case": "-", "result": "left out", "detail": "no time was left"})
            return
        began, found = time.monotonic(), list[str]()
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                part.command,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=_environment(),
                start_new_session=True,
                text=True,
                errors="replace",
            )
            # It ends with the pipe, which a program that the process has left behind may hold.
            reader = threading.Thread(target=self._read, args=(part, child, found), name="gpu-reader", daemon=True)
            reader.start()
            try:
                code: int | str = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"ended after {limit:.0f} s"
            finally:
                _end(child)
            reader.join(5)
            errors.seek(0)
            wrong = errors.read().decode(errors="replace")
        seconds = time.monotonic() - began
        with self._lock, (self.out / "log.txt").open("a") as log:
            log.write(f"=== {part.name}: {code}, {seconds:.0f} s\n{wrong[-20_000:]}\n")
        if part.kind in ("text", "tests"):
            with self._lock, (self.out / "cases.txt").open("a") as texts:
                texts.write(f"=== {part.name}: {code}, {seconds:.0f} s\n{''.join(found)}\n")
            told = _last("".join(found), 1) if part.kind == "tests" else f"{len(found)} lines"
            self._add({"part": part.name, "case": "-", "result": "ran", "detail": told})
        if code != 0:
            told = f"{code}\n{_last(wrong)}"
            self._add({"part": part.name, "case": "the process", "result": "error", "detail": told})
        print(f"-- {part.name}: {code}, {seconds:.0f} s", flush=True)

    def _read(self, part: Part, child: subprocess.Popen[str], found: list[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if part.kind in ("text", "tests"):
                found.append(line)
            elif line.startswith("{") and line.endswith("}\n"):
                self._add({"part": part.name, **json.loads(line)})

    def _add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows.append(row)
            with (self.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if "failure" in row:
                print(f"{row['part']} | {row['task']} | {row['failure']}", flush=True)
            elif row.get("result", "equal") != "equal":
                print(f"{row['part']} | {row['case']} | {row['result']} | {str(row['detail'])[:400]}", flush=True)

    def summary(self) -> str:
        """Counts of results, and ratios over plain by turns."""
        lines: list[tuple[str, ...]] = [("comparisons", "equal", "refused", "differs", "error")]
        groups: dict[str, list[str]] = {}
        for row in self.rows:
            if "seconds" in row:
                groups.setdefault(re.sub(r" \d+$", "", row["part"]), []).append(row["result"])
        for name, own in groups.items():
            lines.append((name, *(str(own.count(each)) for each in lines[0][1:])))
        return f"{table(lines)}\n\n{table(ratios(self.rows))}"


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A table of what was measured by turns, over plain in the same turn: median and range."""
    found: list[tuple[str, ...]] = [
        ("by turns", "minibatches/s", "over plain", "range", "CPU ms", "CPU over plain", "range", "first step s", "GiB")
    ]
    measured = [row for row in rows if "rate" in row]
    for part, task in dict.fromkeys((row["part"], row["task"]) for row in measured):
        own = {row["turn"]: row for row in measured if (row["part"], row["task"]) == (part, task)}
        plain = {row["turn"]: row for row in measured if (row["part"], row["task"]) == (part, "plain")}
        both = [(each, plain[turn]) for turn, each in own.items() if turn in plain]
        rate = Spread.of(each["rate"] for each in own.values())
        cpu = Spread.of(_cpu(each) for each in own.values())
        first = own[min(own)]
        cells = [f"{part}: {task}", f"{rate.median:.2f}"]
        cells += _cells([each["rate"] / other["rate"] for each, other in both])
        cells += [f"{1e3 * cpu.median:.2f}", *_cells([_cpu(each) / _cpu(other) for each, other in both])]
        cells += [f"{first['first_step']:.2f}", f"{first['peak_bytes'] / 2**30:.2f}"]
        found.append((*cells,))
    return found


def _cpu(row: Mapping[str, Any]) -> float:
    """CPU seconds of a minibatch."""
    return float(row["cores"]) / float(row["rate"])


def _cells(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return "?", ""
    spread = Spread.of(values)
    return f"{spread.median:.3f}", f"{spread.low:.3f} .. {spread.high:.3f}"


def _environment() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _end(child: subprocess.Popen[str]) -> None:
    """End the process, if it still runs, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last(text: str, lines: int = 8) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def comparisons(accelerator: str) -> list[Part]:
    """A part for each process of each group."""
    return [
        Part(
            f"{group} {share}",
            (sys.executable, "-m", WORKER, group, accelerator, f"{share}/{of}"),
            150,
            "results",
        )
        for group, of in GROUPS.items()
        for share in range(1, of + 1)
    ]


def programs(folder: Path | None, accelerator: str, into: Path) -> list[Part]:
    """A part for each program in ``folder`` that trains on a CPU: a copy of it trains on ``accelerator``."""
    parts = []
    for file in sorted(folder.glob("*.py")) if folder is not None else ():
        text = file.read_text()
        if 'accelerator="cpu"' in text:
            copy = into / file.name
            copy.write_text(re.sub(r'\b(accelerator|device)="cpu"', rf'\1="{accelerator}"', text))
            parts.append(Part(f"case {file.stem[:24]}", (sys.executable, str(copy)), 150, "text"))
    return parts


def gpu_tests() -> Part:
    """The tests that need a GPU."""
    options = ("-q", "-n0", "-p", "no:cacheprovider", "--maxfail=20")
    return Part("tests", (sys.executable, "-m", "pytest", *options, *GPU_TESTS), 170, "tests")


def timings(accelerator: str, turns: int, *, small: bool) -> list[Part]:
    """A part for each model: its variants by turns in one process."""
    parts = []
    for (title, task), limit in zip(TITLES.items(), (110, 60, 170, 100), strict=True):
        own = replace(tiny(task) if small else task, accelerator=accelerator, optimizer="adamw")
        tasks = json.dumps({name: asdict(variant) for name, variant in variants(own).items()})
        times = 1 if task.model == "gpt2" else turns
        parts.append(Part(title, (sys.executable, "-m", WORKER, "turns", tasks, str(times)), limit, "turns"))
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial; return 1 without a GPU, and if nothing could be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder of results")
    parser.add_argument("--cases", type=Path, help="folder of programs that print a plain and our result")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal, in small sizes")
    parser.add_argument("--seconds", type=float, default=520, help="after which it ends")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each variant")
    parser.add_argument("--processes", type=int, default=12, help="comparisons at once")
    parser.add_argument("--only", choices=["comparisons", "timings"], help="one half")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("python -m benchmarks.gpu needs a CUDA device; set --device cpu for a rehearsal in small sizes")
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    trial = Trial(given.out, time.monotonic() + given.seconds)
    if given.only != "timings":
        deadline = None if given.only else time.monotonic() + 0.45 * given.seconds
        with tempfile.TemporaryDirectory() as copies, ThreadPoolExecutor(given.processes) as pool:
            parts = [*comparisons(given.device), gpu_tests(), *programs(given.cases, given.device, Path(copies))]
            list(pool.map(partial(trial.run, deadline=deadline), parts))
    if given.only != "comparisons":
        for part in timings(given.device, given.turns, small=given.device == "cpu"):
            trial.run(part)
    text = trial.summary()
    (given.out / "table.txt").write_text(text + "\n")
    print(f"\n{text}")
    return 0 if any("seconds" in row or "rate" in row for row in trial.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
