"""One virtual worker of the benchmark of growth: trains for long, and looks at all processes of the launch meanwhile.

It starts the other virtual workers itself; the first one announces what all processes took.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measurement, announce
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from tests.support.process_use import Use
from tests.wsp.faults import processes

WORKER = "benchmarks.growth_worker"
WIDTH, BATCH = 16, 4
LEASE = 3.0
"""Seconds; a third of it after the start is the first heartbeat, for which each virtual worker opens a connection."""


@dataclass(frozen=True)
class Task:
    """Long training of small virtual workers of two stages.

    Attributes:
        steps: Of each virtual worker.
        epochs: With as many validations and checkpoints.
        workers: Virtual workers.
        samples: How often all processes are looked at, about.
        leaks: The virtual worker that keeps memory and a file of each step, for tests; -1 for none.
    """

    steps: int
    epochs: int
    workers: int = 2
    samples: int = 200
    leaks: int = -1
    cores: tuple[int, ...] = ()

    @property
    def every(self) -> int:
        """Steps between two looks at the processes."""
        return max(1, self.steps // self.samples)

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Reads what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "cores": tuple(values["cores"])})


class Small(L.LightningModule):
    """Small, with buffers, random numbers, logs and optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Watches(L.Callback):
    """Notes what each process of the launch takes, now and then."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.seen: dict[str, list[Use]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % self._every == 0:
            for name, pid in launched():
                with suppress(OSError):  # it has just ended
                    self.seen.setdefault(name, []).append(Use.of(pid))


def launched() -> Iterator[tuple[str, int]]:
    """The processes of this launch, of which this is the first one."""
    yield "virtual worker 0", os.getpid()
    workers = 0
    for pid, command in sorted(processes(os.getpid())):
        if WORKER in command:
            workers += 1
            yield f"virtual worker {workers}", pid
        elif "hetpipe-server" in command:
            yield "server", pid


class Leaks(L.Callback):
    """Keeps something of each step: a test that this is noticed."""

    def __init__(self) -> None:
        self.kept: list[tuple[bytearray, int]] = []

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.kept.append((bytearray(b"x" * (1 << 18)), os.open(os.devnull, os.O_RDONLY)))


def main(task: Task) -> None:
    """Train; virtual worker 0 announces what all processes took."""
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    vw = int(os.environ.get("LOCAL_RANK", "0"))
    watches = Watches(task.every)
    callbacks: list[L.Callback] = [watches, *([Leaks()] if vw == task.leaks else [])]
    wsp = WSPCallback(aggregate="mean", lease=LEASE)
    strategy = HetPipeStrategy(stages=2, in_flight=4, virtual_workers=task.workers, wsp=wsp, weights="stash")
    torch.manual_seed(0)
    each_epoch = task.steps // task.epochs
    data = TensorDataset(torch.randn(BATCH * each_epoch * task.workers, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=task.epochs,
            callbacks=[*callbacks, ModelCheckpoint(Path(folder, "checkpoints"), monitor="validation loss")],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        held_out = TensorDataset(torch.randn(4 * BATCH * task.workers, WIDTH))
        trainer.fit(Small(), DataLoader(data, BATCH, shuffle=True), DataLoader(held_out, BATCH))
    if vw == 0:
        seen = {name: [[*each] for each in uses] for name, uses in watches.seen.items()}
        notes = {"steps": trainer.global_step, "seen": seen}
        announce(Measurement("strategy", 0.0, 0.0, torch.get_num_threads(), loss=None, notes=notes))


if __name__ == "__main__":
    main(Task.from_json(sys.argv[1]))
