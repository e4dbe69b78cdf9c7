"""Virtual workers of the benchmark of placed layers: they train, and announce their figures."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.several_nodes_worker import Window, trainer_of
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from tests.support.padding import padded

NODES = 4
LAYERS = ("net.0", "net.1", "net.2", "net.3", "net.4", "net.5", "net.6")
CLASSIFIER = 2
"""The first layer of the classifier."""


@dataclass(frozen=True)
class Task:
    """One measurement, at a small scale of everything.

    The convolutions of the model are two dense layers with as many bytes of weights, inputs and outputs, and as much
    time; the classifier's layers are its own, of a part of the width. ``steps`` minibatches of each virtual worker are
    measured after ``warmup`` and before ``tail``; all three are whole numbers of waves.
    """

    allocation: Literal["np", "placed", "one machine"]
    image: int
    """Values of an image."""
    rank: int
    """Values between the two dense layers, which say how many weights these have."""
    widths: Sequence[int]
    """Inputs of the classifier, and outputs of each of its layers."""
    seconds: Sequence[float]
    """Time of a minibatch in the convolutions, and in the classifier; 0 emulates nothing."""
    names: Sequence[str] = ()
    """The machines' network namespaces, whose bytes are counted."""
    in_flight: int = 4
    batch: int = 8
    warmup: int = 4
    steps: int = 16
    tail: int = 4

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))

    @property
    def classifier_bytes(self) -> int:
        """Bytes of the classifier's weights."""
        return 4 * sum((before + 1) * after for before, after in zip(self.widths, self.widths[1:], strict=False))

    @property
    def other_bytes(self) -> int:
        """Bytes of the other weights."""
        return 4 * (self.rank * (self.image + 1) + (self.rank + 1) * self.widths[0])

    @property
    def activation_bytes(self) -> int:
        """Bytes of a minibatch between the convolutions and the classifier."""
        return 4 * self.batch * self.widths[0]

    @property
    def image_bytes(self) -> int:
        """Bytes of a minibatch's images."""
        return 4 * self.batch * self.image


class Classifier(L.LightningModule):
    """The model."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        first, second, third, classes = task.widths
        dense = [nn.Linear(task.image, task.rank), nn.Linear(task.rank, first)]
        rest = [nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third), nn.ReLU(), nn.Linear(third, classes)]
        self.net = nn.Sequential(*dense, *rest)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Wires(Window):
    """Counts what all machines send, in the process of virtual worker 0."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.names = task.names
        self.sent = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        done = args[2]
        if trainer.is_global_zero and done in (self.task.warmup - 1, self.task.warmup + self.task.steps - 1):
            sign = -1 if done == self.task.warmup - 1 else 1
            self.sent += sign * sum(map(_sent, self.names))


def _sent(name: str) -> int:
    command = ["ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plan(task: Task) -> Plan:
    """The classifiers of all virtual workers are on the first machine, which is one of them."""

    def stage(node: int, device: int, first: int, last: int) -> PlannedStage:
        where = node if task.allocation == "placed" else 0
        return PlannedStage(f"node{where}", f"cpu:{device}", first, last, 0.001, 1000, None)

    workers = []
    for node in (*range(1, NODES), 0):
        head = stage(0, 0, CLASSIFIER if node else 0, len(LAYERS) - 1)
        device = 0 if task.allocation == "placed" else node
        before = (stage(node, device, 0, CLASSIFIER - 1),) if node else ()
        workers.append(PlannedWorker(1.0, (*before, head)))
    return Plan("Classifier", task.in_flight, task.in_flight, 0, 0.001, 1.0, tuple(workers), LAYERS)


def strategy_of(task: Task) -> HetPipeStrategy:
    """The strategy of one virtual worker."""
    placement = "size" if task.allocation == "np" else "local"
    insecure = {"insecure": True}
    wsp = WSPCallback(aggregate="mean", placement=placement, security=insecure)
    if task.allocation == "np":
        return HetPipeStrategy(stages=1, in_flight=task.in_flight, weights="stash", wsp=wsp)
    return HetPipeStrategy(plan=plan(task), weights="stash", wsp=wsp)


def pads(task: Task) -> list[Pad]:
    """Pads of this virtual worker's stages."""
    before, behind = task.seconds
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    alone = task.allocation == "np" or rank == NODES - 1
    return [Pad(each / 3, 2 * each / 3) for each in ([before + behind] if alone else [before, behind])]


def main(task: Task) -> None:
    """Trains, and announces minibatches per second of this virtual worker, with all machines' bytes for each."""
    torch.manual_seed(0)
    module, window = Classifier(task), Wires(task)
    samples = NODES * task.batch * (task.warmup + task.steps + task.tail)
    images, labels = torch.randn(samples, task.image), torch.randint(task.widths[-1], (samples,))
    data = DataLoader(TensorDataset(images, labels), batch_size=task.batch)
    strategy = strategy_of(task)
    trainer = trainer_of(strategy, 1 if task.allocation == "one machine" else NODES, window)
    with padded(strategy, pads(task)):
        trainer.fit(module, data)
    weight = math.fsum(float(each.double().sum()) for each in module.parameters())
    window.announce(task.allocation, module.last, bytes=window.sent / task.steps / NODES, weight=weight.hex())


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
