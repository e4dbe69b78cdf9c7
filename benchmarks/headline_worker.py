"""A process of the headline benchmark: trains as its job says, on emulated devices, until somebody ends it.

The first virtual worker, or rank, leaves copies of its weights in the job's folder, with the seconds since the end of
the first minibatch, in which a strategy captures the model. All leave a record of their emulated devices there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.headline_cluster import (
    BUCKETS,
    LABS,
    METHODS,
    SECONDS,
    Lab,
    Method,
    backward_ends,
    batches,
    in_flight,
    stage_pads,
    waves,
    weights_bytes,
)
from benchmarks.headline_order import Rate
from benchmarks.headline_task import BATCH, epoch, network
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.emulation import OVERSLEEP, Pad, Padded
from tests.support.padding import padded

EVERY = 8 * SECONDS
"""Least seconds between two copies of the weights."""

PATIENCE = timedelta(minutes=15)
"""For processes that start side by side on few cores."""


@dataclass(frozen=True)
class Job:
    """One run, by names of :mod:`benchmarks.headline_cluster`.

    Attributes:
        folder: Where copies and records are left.
        slower: Devices and links take so many times as long, so that what is really computed fits into a busy machine;
            all seconds that are noted are divided by it.
    """

    lab: str
    method: str
    rate: Rate
    seed: int
    folder: str = field(default="", compare=False)
    slower: float = field(default=1.0, compare=False)

    def to_json(self) -> str:
        """The job as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """The job of which ``asdict`` made ``values``."""
        return cls(**{**values, "rate": Rate(**values["rate"])})


class EmulatedRank:
    """The device of one of DDP's ranks: layers take their part of a step's time, sleeping, one after the other.

    Gradients of a layer are there when the layer's part of the backward is over, so that all-reduces overlap with the
    rest of it. A forward begins when the step before has ended: what Lightning does between steps takes no time, as on
    a GPU whose queue is never empty.
    """

    def __init__(self, pad: Pad) -> None:
        self.record = Padded()
        self._pad = pad
        self._ends = backward_ends()
        self.began: float | None = None

    def forward(self, net: torch.nn.Sequential, images: Tensor) -> Tensor:
        began = time.monotonic() if self.began is None else self.began
        value, started = images, time.monotonic()
        outputs = []
        for layer in net:
            value = layer(value)
            outputs.append(value)
        self._until(began + self._pad.forward, started)
        for index, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(partial(self._backward, index, time.monotonic()))
        return value

    def _backward(self, layer: int, began: float, gradient: Tensor) -> None:
        """Sleep until the device would have the gradients of ``layer``, which are computed next."""
        self._until(began + self._pad.backward * self._ends[layer], began if layer == 0 else None)

    def _until(self, end: float, started: float | None) -> None:
        now = time.monotonic()
        if started is not None:
            self.record.passes += 1
            late = now - end
            if late > OVERSLEEP:
                self.record.overruns += 1
                self.record.longest = max(self.record.longest, late)
        if now < end:
            time.sleep(end - now)

    def step_ended(self) -> None:
        self.began = time.monotonic()


class Learner(L.LightningModule):
    """The net, and cross-entropy; ``emulated`` and ``factor`` are for DDP alone."""

    def __init__(self, job: Job, emulated: EmulatedRank | None, factor: float) -> None:
        super().__init__()
        self.job, self.emulated, self.factor = job, emulated, factor
        self.net = network(job.seed)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        output = self.net(images) if self.emulated is None else self.emulated.forward(self.net, images)
        return F.cross_entropy(output, labels) * self.factor

    def on_after_backward(self) -> None:
        if self.emulated is not None:
            self.emulated.step_ended()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.rate.optimizer(self.net)


class Recorder(L.Callback):
    """Leaves copies of the weights, and records of emulated devices.

    Args:
        job: With the folder.
        every: Minibatches at whose multiples weights may be copied: a wave, after which they are those of all.
        records: Of this process's devices, once there are any.
    """

    def __init__(self, job: Job, every: int, records: Any) -> None:
        self._folder, self._slower, self._every, self._records = Path(job.folder), job.slower, every, records
        self._zero = self._copied = 0.0
        self._copies = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if not batch_idx or batch_idx % self._every or now < self._copied + EVERY * self._slower:
            return
        self._copied = now
        self._copies += 1
        devices = [asdict(each) for each in self._records()]
        record = {"seconds": (now - self._zero) / self._slower, "minibatches": batch_idx, "devices": devices}
        self._leave(f"record-{trainer.global_rank}.json", lambda file: file.write_text(json.dumps(record)))
        if trainer.is_global_zero:
            weights = {name: value.detach().clone() for name, value in module.net.named_parameters()}  # type: ignore[union-attr]
            copy = {**record, "weights": weights}
            self._leave(f"copy-{self._copies:05}.pt", lambda file: torch.save(copy, file))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self._zero = time.monotonic()

    def _leave(self, name: str, write: Any) -> None:
        """Write a file that is there as a whole, or not at all."""
        part = self._folder / f".{name}.{os.getpid()}"
        write(part)
        part.rename(self._folder / name)


def own_batches(sizes: Sequence[int], rank: int, samples: int) -> Iterator[range]:
    """The samples of each of a rank's batches, where each step takes the next ones of all."""
    for step in range(samples // sum(sizes)):
        first = step * sum(sizes) + sum(sizes[:rank])
        yield range(first, first + sizes[rank])


def train_with_ddp(job: Job, lab: Lab, method: Method) -> None:
    """This process is one of a machine's ranks, and has Lightning start the other one."""
    rank = lab.devices * int(os.environ["NODE_RANK"]) + int(os.environ.get("LOCAL_RANK", 0))
    sizes = batches(lab, method)
    seconds = sizes[rank] / BATCH / lab.ranks[rank] * SECONDS * job.slower
    emulated = EmulatedRank(Pad(seconds / 3, seconds * 2 / 3))
    data = TensorDataset(*epoch(job.seed))
    loader = DataLoader(data, batch_sampler=[[*each] for each in own_batches(sizes, rank, len(data))])
    fit(
        Learner(job, emulated, sizes[rank] * len(sizes) / sum(sizes)),
        loader,
        Recorder(job, 1, lambda: [emulated.record]),
        strategy=DDPStrategy(
            process_group_backend="gloo", bucket_cap_mb=weights_bytes() / BUCKETS / 2**20, timeout=PATIENCE
        ),
        devices=lab.devices,
        num_nodes=len(lab.speeds),
        use_distributed_sampler=False,
    )


def train_with_hetpipe(job: Job, lab: Lab, method: Method) -> None:
    """This process is a virtual worker, with a server beside it."""
    worker = int(os.environ["NODE_RANK"])
    lengths = waves(lab, method)
    wsp = WSPCallback(
        clock_distance=method.clock_distance or 0,
        shares=lengths if method.by_speed else None,
        security={"insecure": True},
        lease=PATIENCE,
    )
    strategy = HetPipeStrategy(
        stages=len(lab.workers[worker]), in_flight=in_flight(lab), weights="stash", wsp=wsp, timeout=PATIENCE
    )
    loader = DataLoader(TensorDataset(*epoch(job.seed)), batch_size=BATCH)
    pads = [Pad(job.slower * pad.forward, job.slower * pad.backward) for pad in stage_pads(lab, worker)]
    with padded(strategy, pads) as emulation:
        recorder = Recorder(job, lengths[worker], lambda: emulation.stages)
        fit(Learner(job, None, 1.0), loader, recorder, strategy=strategy, devices=1, num_nodes=len(lab.workers))


def fit(module: Learner, loader: DataLoader[Any], recorder: Recorder, **settings: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, loader)


def main(argument: str) -> None:
    """Do the job."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    job = Job.of(json.loads(argument))
    lab, method = LABS[job.lab], METHODS[job.method]
    (train_with_ddp if method.clock_distance is None else train_with_hetpipe)(job, lab, method)


if __name__ == "__main__":
    main(sys.argv[1])
