"""One process of the engine's benchmark: next to empty stages without Lightning, and a loop of the same modules."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Measurement, announce
from benchmarks.line import Line
from lightning_hetpipe.emulation import Emulation, Pad
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.pipeline.user.minibatch import Step

PARTS = ("resumed", "user code", "loss", "backward")
"""Parts of the hand-over, each named after what ends it: from the last stage's output to its backward."""

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Job:
    """Arguments of a measurement."""

    stages: int
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the operating system likes."""
    warmup: int = 100
    steps: int = 500
    slept_steps: int = 150
    slept: tuple[float, float] = (0.001, 0.002)
    """Seconds of a stage's forward and backward, for the hand-over between stages that do not want the CPU."""

    @property
    def in_flight(self) -> int:
        return self.stages + 2

    def to_json(self) -> str:
        """The job as one command-line argument."""
        return json.dumps(asdict(self))


class Little(nn.Module):
    """As little as a layer can do that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def modules(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Little() for _ in range(stages)))


def loss_of(output: Tensor) -> Tensor:
    loss: Tensor = output.square().mean()
    return loss


def update(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=1e-4)


def bare(job: Job) -> Iterator[None]:
    """Trains the modules one after the other in this thread; yields after each minibatch."""
    net = modules(job.stages)
    parameters = list(net.parameters())
    while True:
        update(parameters, torch.autograd.grad(loss_of(net(X)), parameters))
        yield


class Stamps:
    """When the last stage had its output, when user code ran on, and so on, minibatch by minibatch.

    Stages call it as ``StageSettings.before_pass``, and the step's user code calls :meth:`user`.
    """

    def __init__(self, last: int, inner: BeforePass | None = None) -> None:
        self.at: dict[int, list[float]] = defaultdict(list)
        self._last = last
        self._inner = inner

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None] | None:
        if stage == self._last and work in ("loss", "backward"):
            self._stamp(minibatch)
        after = self._inner(stage, work, minibatch) if self._inner is not None else None
        if stage != self._last or work == "backward":
            return after

        def both() -> None:
            if after is not None:
                after()
            self._stamp(minibatch)

        return both

    def user(self, minibatch: int) -> None:
        """User code runs on, with the output."""
        self._stamp(minibatch)

    def _stamp(self, minibatch: int) -> None:
        self.at[minibatch].append(time.perf_counter())

    def parts(self, skip: int) -> dict[str, float]:
        """The median microseconds of each of ``PARTS``, without the first ``skip`` minibatches."""
        runs = [times for minibatch, times in sorted(self.at.items())][skip:]
        steps = [[1e6 * (b - a) for a, b in pairwise(run)] for run in runs]
        return {part: statistics.median(each) for part, each in zip(PARTS, zip(*steps, strict=True), strict=True)}


def piped(job: Job, minibatches: int, stamps: Stamps | None = None) -> Iterator[None]:
    """Trains the modules as a pipeline of one stage each; yields after each minibatch."""
    line = Line(modules(job.stages), cuts=range(job.stages), in_flight=job.in_flight, before_pass=stamps)
    parameters = list(line.pieces[0].parameters())

    def step(number: int) -> Step:
        def run() -> Tensor:
            output: Any = line.call(X)
            if stamps is not None:
                stamps.user(number)
            return loss_of(output)

        return line.step(run)

    with line.running():
        for minibatch in line.train(minibatches, step):
            update(parameters, (minibatch.gradients[parameter] for parameter in parameters))
            yield


def microseconds(job: Job, run: Iterator[None]) -> tuple[float, float]:
    """Wall and CPU time of this process, for each minibatch of the window and each stage."""
    for _ in range(job.warmup):
        next(run)
    started = time.perf_counter(), time.process_time()
    for _ in range(job.steps):
        next(run)
    each = 1e6 / (job.steps * job.stages)
    return (time.perf_counter() - started[0]) * each, (time.process_time() - started[1]) * each


def hand_over(job: Job, slept: bool) -> dict[str, float]:
    """Durations of the parts of the hand-over between the last stage and user code, while all stages work."""
    pads = Emulation([Pad(*job.slept)] * job.stages) if slept else None
    minibatches = job.slept_steps if slept else job.warmup + job.steps
    stamps = Stamps(job.stages - 1, pads)
    for _ in piped(job, minibatches, stamps):
        pass
    return stamps.parts(skip=minibatches // 5)


def main(job: Job) -> None:
    """Does the job in one torch thread, and announces it."""
    torch.set_num_threads(1)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    bare_wall, bare_cpu = microseconds(job, bare(job))
    wall, cpu = microseconds(job, piped(job, job.warmup + job.steps))
    announce(
        Measurement(
            str(job.stages),
            rate=1e6 / (wall * job.stages),
            cores=cpu / wall,
            threads=1,
            loss=None,
            notes={
                "in_flight": job.in_flight,
                "wall_us": wall,
                "cpu_us": cpu,
                "bare_wall_us": bare_wall,
                "bare_cpu_us": bare_cpu,
                "busy": hand_over(job, slept=False),
                "slept": hand_over(job, slept=True),
            },
        )
    )


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
