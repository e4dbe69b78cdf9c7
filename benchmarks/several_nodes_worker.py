"""One machine's part of the benchmark over several machines: trains as its argument says, and announces its figures."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measurement, announce
from lightning_hetpipe import HetPipeStrategy, WSPCallback

Variant = Literal["ddp", "hetpipe"]
STATISTICS = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class Task:
    """One measurement: `layers` times Linear(width, width), `steps` minibatches after `warmup` and before `tail`.

    All three are whole numbers of waves, so that the window holds as many synchronisations as it should.
    """

    variant: Variant
    update_dtype: str | None = None
    """For "hetpipe"."""
    in_flight: int = 4
    """For "hetpipe": Nm, and W."""
    layers: int = 2
    width: int = 2048
    batch: int = 64
    warmup: int = 8
    steps: int = 16
    tail: int = 4

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))


class Dense(L.LightningModule):
    """Large dense layers: much to synchronise for little to compute."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Steps(Protocol):
    """Numbers of minibatches: ``steps`` are measured after ``warmup``."""

    @property
    def warmup(self) -> int: ...

    @property
    def steps(self) -> int: ...


class Window(L.Callback):
    """Seconds and bytes on the wire from the end of the warm-up to the end of the steps."""

    def __init__(self, task: Steps) -> None:
        self.task = task
        self.seconds = 0.0
        self.cpu = 0.0
        self.bytes = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        done = args[2]
        assert isinstance(done, int)
        sign = {self.task.warmup - 1: -1, self.task.warmup + self.task.steps - 1: 1}.get(done, 0)
        if sign:
            self.seconds += sign * time.perf_counter()
            self.cpu += sign * time.process_time()
            self.bytes += sign * sum(int((STATISTICS / f"{way}_bytes").read_text()) for way in ("rx", "tx"))

    def announce(self, name: str, loss: torch.Tensor, **notes: object) -> None:
        """Announces minibatches per second as variant ``name``, with the ``loss`` of the last one."""
        rate, cores = self.task.steps / self.seconds, self.cpu / self.seconds
        announce(Measurement(name, rate, cores, torch.get_num_threads(), loss.item(), notes))


def trainer_of(strategy: HetPipeStrategy | str, nodes: int, window: Window) -> L.Trainer:
    """A Trainer for one epoch on CPUs that shows and saves nothing."""
    return L.Trainer(
        strategy=strategy,
        num_nodes=nodes,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[window],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(task: Task) -> None:
    """Trains, and announces minibatches per second of this machine, with bytes on its wire per minibatch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(task.layers) for layer in (nn.Linear(task.width, task.width), nn.ReLU())]
    module, window = Dense(layers), Window(task)
    strategy: HetPipeStrategy | str = "ddp"
    if task.variant == "hetpipe":
        wsp = WSPCallback(update_dtype=task.update_dtype, aggregate="mean", security={"insecure": True})
        strategy = HetPipeStrategy(stages=1, in_flight=task.in_flight, wsp=wsp)
    data = TensorDataset(torch.randn(2 * task.batch * (task.warmup + task.steps + task.tail), task.width))
    trainer_of(strategy, 2, window).fit(module, DataLoader(data, batch_size=task.batch))
    window.announce(task.variant, module.last, bytes=window.bytes / task.steps)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
