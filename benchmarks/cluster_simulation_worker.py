"""One virtual worker of the benchmark of simulated clusters: trains on emulated stages and announces what it saw.

It starts the other virtual workers itself, each of which announces its own.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measurement, announce
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.emulation import Pad
from tests.support.padding import padded

WIDTH, BATCH = 256, 4


@dataclass(frozen=True)
class Task:
    """Training of several virtual workers on emulated stages.

    Attributes:
        pads: For each virtual worker, seconds of the forward and the backward of each stage; of none, a plain Trainer.
        lengths: W_v of each.
        waves: Waves of each.
        in_flight: Nm.
        clock_distance: D.
        width: Width of the model, which has a Linear for each stage.
        cores: CPU cores to stay on; empty: wherever the operating system likes.
    """

    pads: tuple[tuple[tuple[float, float], ...], ...]
    lengths: tuple[int, ...]
    waves: int
    in_flight: int = 6
    clock_distance: int = 0
    width: int = WIDTH
    cores: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """k, of each virtual worker."""
        return len(self.pads[0]) if self.pads else 4

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model's weights."""
        return self.stages * self.width * (self.width + 1) * 4

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        pads = tuple(tuple((forward, backward) for forward, backward in own) for own in values.pop("pads"))
        lengths, cores = tuple(values.pop("lengths")), tuple(values.pop("cores"))
        return cls(pads=pads, lengths=lengths, cores=cores, **values)


class Dense(L.LightningModule):
    """A Linear for each stage: next to nothing to compute."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(task.width, task.width) for _ in range(task.stages)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clocks(L.Callback):
    """Times of published versions, and the waves of each virtual worker that the weights of each wave's end have.

    The next batch starts when the version before it is published.

    Args:
        wave: W_v, of this virtual worker.
        size: Number of virtual workers.
    """

    def __init__(self, wave: int, size: int) -> None:
        self._wave, self._size = wave, size
        self.published: list[float] = []
        self.cpu: list[float] = []
        self.included: list[int] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx:
            self._note()
        if batch_idx % self._wave or not batch_idx or self._size == 1:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, HetPipeStrategy)
        group = strategy._workers.group
        assert group is not None
        pulled = group.weights.member.commit_index
        assert pulled is not None
        waves = {update.vw: update.clock + 1 for update in pulled.included}
        self.included += [waves.get(vw, 0) for vw in range(self._size)]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note()

    def _note(self) -> None:
        self.published.append(time.monotonic())
        self.cpu.append(time.process_time())


class Waits(Logger):
    """Keeps the seconds of each synchronisation, by the number of the minibatch before it."""

    name, version = "waits", 0

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "hetpipe/sync_wait_seconds" in metrics:
            self.seconds.append(metrics["hetpipe/sync_wait_seconds"])

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Nothing to keep."""


def train(task: Task, vw: int) -> Measurement:
    """Train as virtual worker ``vw``."""
    size, wave = len(task.lengths), task.lengths[vw]
    strategy: str | HetPipeStrategy = "auto"
    emulation: Any = nullcontext()
    if task.pads:
        unequal = len(set(task.lengths)) > 1
        wsp = WSPCallback(
            clock_distance=task.clock_distance,
            aggregate="mean",
            **({"shares": list(task.lengths)} if unequal else {"wave": wave}),
        )
        strategy = HetPipeStrategy(
            stages=task.stages, in_flight=task.in_flight, virtual_workers=size, wsp=wsp, weights="stash"
        )
        emulation = padded(strategy, [Pad(*pad) for pad in task.pads[vw]])
    clocks, waits = Clocks(wave, size if task.pads else 1), Waits()
    torch.manual_seed(0)
    # A wave is divided by the lengths of waves, which are equal where there are no shares.
    data = TensorDataset(torch.randn(BATCH * task.waves * sum(task.lengths), task.width))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[clocks],
        logger=waits,
        log_every_n_steps=wave,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with emulation as pads:
        trainer.fit(Dense(task), DataLoader(data, batch_size=BATCH))
    seconds, cpu = clocks.published[-1] - clocks.published[0], clocks.cpu[-1] - clocks.cpu[0]
    stages: Sequence[Any] = pads.stages if task.pads else []
    notes = {
        "vw": vw,
        "published": clocks.published,
        "cpu": clocks.cpu,
        "included": clocks.included,
        "waits": waits.seconds,
        "passes": sum(stage.passes for stage in stages),
        "late": sum(stage.late for stage in stages),
    }
    return Measurement(
        "strategy", len(clocks.published) / seconds, cpu / seconds, torch.get_num_threads(), loss=None, notes=notes
    )


def main(task: Task) -> None:
    """Train, and announce."""
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    announce(train(task, int(os.environ.get("LOCAL_RANK", "0"))))


if __name__ == "__main__":
    main(Task.from_json(sys.argv[1]))
