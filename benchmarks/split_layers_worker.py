"""One process of the benchmark of divided layers: a fit of a layer, on a group of two or in one thread."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measurement, announce
from lightning_hetpipe import HetPipeStrategy
from tests.support.trainers import quiet_trainer

WARM_UP = 5
"""Minibatches before those that count: the first one is watched, and captured."""


@dataclass(frozen=True)
class Job:
    """Arguments of a measurement."""

    net: str
    divided: bool
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the operating system likes."""
    steps: int = 40

    def to_json(self) -> str:
        """The job as one command-line argument."""
        return json.dumps(asdict(self))


class Layers(L.LightningModule):
    """The net, with the mean of its squared outputs for a loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.ends: list[tuple[float, float, float]] = []
        self.loss = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((time.perf_counter(), time.process_time(), longest()))
        self.loss = float(outputs["loss"])


def longest() -> float:
    """CPU seconds so far of what cannot overlap: Lightning's thread, and the busiest one of a group's."""
    used = {thread.name: thread_seconds(thread) for thread in threading.enumerate() if thread.ident is not None}
    return used["MainThread"] + max((each for name, each in used.items() if "hetpipe-stage" in name), default=0.0)


def thread_seconds(thread: threading.Thread) -> float:
    """CPU seconds of a thread so far; 0 where the operating system does not tell."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def made(net: str) -> tuple[nn.Module, Tensor]:
    """The net of that name, and one minibatch for it."""
    torch.manual_seed(1)
    if net == "wide":
        return nn.Sequential(nn.Conv2d(64, 256, 3, padding=1)), torch.randn(8, 64, 56, 56)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)


def measured(job: Job) -> Measurement:
    """Trains, and times the minibatches after the first ones."""
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    torch.set_num_threads(1)
    net, batch = made(job.net)
    task, steps = Layers(net), WARM_UP + job.steps
    split: Any = {0: (1, 1)} if job.divided else False
    strategy = HetPipeStrategy(stages=1, in_flight=1, split=split)
    data = TensorDataset(torch.cat([batch]).expand(steps, *batch.shape))
    loader: Any = DataLoader(data, batch_size=None)
    quiet_trainer(strategy, max_steps=steps, log_every_n_steps=steps).fit(task, loader)
    (began, used, before), (ended, last, after) = task.ends[WARM_UP - 1], task.ends[-1]
    seconds, notes = ended - began, {"longest_s": (after - before) / job.steps}
    return Measurement(job.net, job.steps / seconds, (last - used) / seconds, torch.get_num_threads(), task.loss, notes)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    announce(measured(Job(**{**given, "cores": tuple(given["cores"])})))
