"""Virtual workers of the benchmark of allocations over a network: they train, and announce their figures."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.several_nodes_worker import Dense, Window, trainer_of
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from tests.support.padding import padded

SPEEDS = (1.0, 0.8, 0.5, 0.3)
"""Speeds of the devices of each node, of which the first has the fastest."""


@dataclass(frozen=True)
class Task:
    """One measurement: a stage of two dense layers for each node, on emulated devices.

    ``steps`` minibatches of each virtual worker are measured after ``warmup`` and before ``tail``; all three are whole
    numbers of waves.
    """

    allocation: Literal["np", "ed", "one machine"]
    seconds: float = 1.6
    """Time of a minibatch on a device of speed 1, forward and backward; 0 emulates nothing."""
    in_flight: int = 4
    width: int = 8192
    narrow: int = 64
    batch: int = 8
    warmup: int = 8
    steps: int = 24
    tail: int = 4

    def to_json(self) -> str:
        """The task as one command-line argument."""
        return json.dumps(asdict(self))

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model's weights."""
        return 4 * len(SPEEDS) * (2 * self.width * self.narrow + self.width + self.narrow)

    def pads(self, node: int) -> list[Pad]:
        """Pads of the stages of a virtual worker, each of which has as much work as its device is fast."""
        speeds = [SPEEDS[node]] * len(SPEEDS) if self.allocation == "np" else SPEEDS
        each = self.seconds / sum(speeds)
        return [Pad(each / 3, 2 * each / 3)] * len(SPEEDS)


def plan(task: Task) -> Plan:
    """Each virtual worker has a stage on each node."""
    count = len(SPEEDS)

    def stage(worker: int, number: int) -> PlannedStage:
        where = f"node{number}" if task.allocation == "ed" else "node3"
        return PlannedStage(where, f"cpu:{worker * count + number}", 2 * number, 2 * number + 1, 0.001, 1000, None)

    workers = [PlannedWorker(1.0, tuple(stage(worker, number) for number in range(count))) for worker in range(count)]
    names = tuple(f"net.{number}" for number in range(2 * count))
    return Plan("Dense", task.in_flight, task.in_flight, 0, 0.001, 1.0, tuple(workers), names)


def strategy_of(task: Task) -> HetPipeStrategy:
    """The strategy of one virtual worker."""
    placement = "size" if task.allocation == "np" else "local"
    insecure = {"insecure": True}
    wsp = WSPCallback(aggregate="mean", placement=placement, security=insecure)
    if task.allocation == "np":
        return HetPipeStrategy(stages=len(SPEEDS), in_flight=task.in_flight, weights="stash", wsp=wsp)
    return HetPipeStrategy(plan=plan(task), weights="stash", wsp=wsp)


def main(task: Task) -> None:
    """Trains, and announces minibatches per second of this virtual worker, with the machine's bytes for each."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(task.narrow, task.width), nn.Linear(task.width, task.narrow)) for _ in SPEEDS]
    module, window = Dense(layer for pair in pairs for layer in pair), Window(task)
    node = int(os.environ.get("NODE_RANK", "0"))
    strategy, samples = strategy_of(task), len(SPEEDS) * task.batch * (task.warmup + task.steps + task.tail)
    nodes = 1 if task.allocation == "one machine" else len(SPEEDS)
    data = DataLoader(TensorDataset(torch.randn(samples, task.narrow)), batch_size=task.batch)
    with padded(strategy, task.pads(node)) if task.seconds else nullcontext():
        trainer_of(strategy, nodes, window).fit(module, data)
    weight = float(next(module.parameters()).double().sum())
    window.announce(task.allocation, module.last, bytes=window.bytes / task.steps, weight=weight.hex())


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
