"""One virtual worker of the benchmark of faults: trains on emulated stages, and lets faults strike it.

It starts the other virtual workers itself. The coordinator's decisions go to a file, and marks of faults say when they
struck; see ``tests.wsp.lost_time``.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import cluster_simulation_worker
from benchmarks.cluster_simulation_worker import BATCH, Dense
from benchmarks.harness import Measurement, announce
from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.emulation import Pad
from tests.support.padding import padded
from tests.wsp.faults import processes, record_decisions, strike

WORKER = "benchmarks.faults_worker"


@dataclass(frozen=True)
class Task(cluster_simulation_worker.Task):
    """Training that faults strike.

    Attributes:
        folder: For the file "decisions" of the coordinator, and marks of faults.
        epochs: Of as many waves each.
        lease: Seconds.
        restarts: Of each virtual worker's process.
        faults: "what" strikes the virtual worker "vw" in its minibatch "batch" of "epoch", and makes "mark".
    """

    folder: str = ""
    epochs: int = 1
    lease: float = 3.0
    restarts: int = 0
    faults: Sequence[Mapping[str, Any]] = ()

    @property
    def log(self) -> Path:
        """The file of the coordinator's decisions."""
        return Path(self.folder, "decisions")


class Strikes(L.Callback):
    """Lets faults strike; one that is stopped goes on once the others have gone on without it."""

    def __init__(self, task: Task, vw: int) -> None:
        self._faults = [fault for fault in task.faults if fault["vw"] == vw]
        # With D = 0 virtual worker 0 comes so far no sooner.
        later = 3 * task.lengths[vw]
        self._goes_on = {(each["epoch"], each["batch"] + later) for each in task.faults if each["what"] == "stop"}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = trainer.current_epoch, batch_idx
        for fault in self._faults:
            if now == (fault["epoch"], fault["batch"]) and not Path(fault["mark"]).exists():
                strike(fault)
        if trainer.is_global_zero and now in self._goes_on:
            for pid, command in processes(os.getpid()):
                if WORKER in command:
                    os.kill(pid, signal.SIGCONT)


def train(task: Task, vw: int) -> Measurement:
    """Train as virtual worker ``vw``."""
    record_decisions(str(task.log))
    unequal = len(set(task.lengths)) > 1
    wsp = WSPCallback(
        clock_distance=task.clock_distance,
        aggregate="mean",
        lease=task.lease,
        restarts=task.restarts,
        **({"shares": list(task.lengths)} if unequal else {"wave": task.lengths[vw]}),
    )
    size = len(task.lengths)
    strategy = HetPipeStrategy(
        stages=task.stages, in_flight=task.in_flight, virtual_workers=size, wsp=wsp, weights="stash"
    )
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * task.waves * sum(task.lengths), task.width))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=task.epochs,
        callbacks=[Strikes(task, vw)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with padded(strategy, [Pad(*pad) for pad in task.pads[vw]]) as emulation:
        trainer.fit(Dense(task), DataLoader(data, batch_size=BATCH))
    notes = {
        "passes": sum(stage.passes for stage in emulation.stages),
        "late": sum(stage.late for stage in emulation.stages),
    }
    return Measurement("strategy", 0.0, 0.0, torch.get_num_threads(), loss=None, notes=notes)


def main(task: Task) -> None:
    """Train; virtual worker 0 announces that it has come to the end."""
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    vw = int(os.environ.get("LOCAL_RANK", "0"))
    found = train(task, vw)
    if vw == 0:
        announce(found)


if __name__ == "__main__":
    main(Task.from_json(sys.argv[1]))
