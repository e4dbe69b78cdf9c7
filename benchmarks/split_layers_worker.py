"""Processes of the benchmark of split layers: one profiles a model, others train it on a plan."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measurement, announce
from benchmarks.several_nodes_worker import Window, trainer_of
from lightning_hetpipe import HetPipeStrategy, Plan
from lightning_hetpipe.pipeline.split.member_pool import MemberPool
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy, profile

WORKER = "benchmarks.split_layers_worker"

Net = Literal["vgg", "wide", "narrow"]


@dataclass(frozen=True)
class Task:
    """One measurement: ``steps`` minibatches after ``warmup`` and before ``tail``."""

    net: Net
    folder: str
    """Path of the folder with the profiles and the plans."""
    plan: str = ""
    """Name of a plan there; empty: the model is profiled, or, with ``plain``, trained by Lightning alone."""
    plain: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)
    """By a device's name, how many times longer everything takes there; empty for as long as it does."""
    batch: int = 32
    warmup: int = 6
    steps: int = 24
    tail: int = 6

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))


def vgg() -> nn.Sequential:
    """One convolution takes most of the time; its channels are seven blocks of those that a CPU computes at once."""
    return nn.Sequential(
        nn.Conv2d(3, 112, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(112, 112, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(112, 224, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(896, 112),
        nn.ReLU(),
        nn.Linear(112, 10),
    )


def wide() -> nn.Sequential:
    """One convolution takes nearly all of the time."""
    return nn.Sequential(
        nn.Conv2d(64, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(32), nn.Flatten(), nn.Linear(256, 10)
    )


def narrow() -> nn.Sequential:
    """Many small layers."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), *layers, nn.Linear(64, 10))


NETS: Mapping[Net, tuple[Callable[[], nn.Sequential], int]] = {
    "vgg": (vgg, 3),
    "wide": (wide, 64),
    "narrow": (narrow, 3),
}
"""Each with the channels of its images."""


class Images(L.LightningModule):
    """Classifies random images."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net
        self.last = torch.tensor(0.0)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["loss"].detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class SlowedDevices:
    """Has the devices of a plan take so many times as long as this machine's CPU, by the CPU seconds of each thread.

    Args:
        factors: By a device's name.
        stages: The device of each stage.
    """

    def __init__(self, factors: Mapping[str, float], stages: Sequence[str]) -> None:
        self._factors, self._stages = factors, stages
        self._thread = threading.local()
        self._run = MemberPool.run

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None]:
        """A pass begins; the returned call ends it."""
        return partial(self._slow, self._factors[self._stages[stage]], time.thread_time(), self._slowed())

    def run(self, pool: MemberPool, jobs: Sequence[Callable[[], Any] | None], *rest: Any) -> list[Any]:
        """In the place of ``MemberPool.run``."""
        slowed = [
            None if job is None else partial(self._job, self._factors[str(name)], job)
            for name, job in zip(pool.group.names, jobs, strict=True)
        ]
        return self._run(pool, slowed, *rest)

    def _job(self, factor: float, job: Callable[[], Any]) -> Any:
        began, before = time.thread_time(), self._slowed()
        result = job()
        self._slow(factor, began, before)
        return result

    def _slow(self, factor: float, began: float, before: float) -> None:
        used = time.thread_time() - began - (self._slowed() - before)  # without what was slowed within
        self._thread.seconds = self._slowed() + used
        time.sleep((factor - 1) * used)

    def _slowed(self) -> float:
        """CPU seconds of this thread that were slowed already."""
        seconds: float = getattr(self._thread, "seconds", 0.0)
        return seconds


def main(task: Task) -> None:
    """Profiles, or trains and announces minibatches per second."""
    torch.manual_seed(0)
    make, channels = NETS[task.net]
    module = Images(make())
    samples = task.batch * (task.warmup + task.steps + task.tail)
    data = TensorDataset(torch.randn(samples, channels, 32, 32), torch.randint(10, (samples,)))
    loader, folder = DataLoader(data, task.batch), Path(task.folder)
    if not task.plan and not task.plain:
        strategy = ProfilingStrategy(widths=True)
        found = profile(trainer_of(strategy, 1, Window(task)), module, train_dataloaders=loader)
        profile_file.save(found.profile, folder / f"{task.net}.json")
        announce(Measurement("profile", 0.0, 0.0, torch.get_num_threads(), None))
        return
    window = Window(task)
    used: HetPipeStrategy | str = "auto"
    if task.plan:
        plan = Plan.load(folder / task.plan)
        used = HetPipeStrategy(plan=plan, weights="stash")
        if task.factors:
            slowed = SlowedDevices(task.factors, [stage.place for stage in plan.virtual_workers[0].stages])
            used._before_pass = slowed
            MemberPool.run = lambda pool, *rest: slowed.run(pool, *rest)  # type: ignore[method-assign]
    trainer_of(used, 1, window).fit(module, loader)
    window.announce(task.plan or "plain", module.last)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
