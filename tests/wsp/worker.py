"""One process of a launch of virtual workers: trains a task of the tests, and writes down what it saw.

Run as ``python -m tests.wsp.worker '{"task": "mlp", ...}'``, see :class:`tests.wsp.launch.Job`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from tests import models
from tests.exact.pipelines import Delays
from tests.exact.running import Recorder, make_trainer
from tests.models import Learner
from tests.wsp import faults

TASKS: dict[str, tuple[Callable[[], Learner], Callable[..., DataLoader[Any]]]] = {
    "mlp": (lambda: models.mlp(models.ADAMW), models.vectors),
    "resnet": (models.resnet, models.images),
    "transformer": (models.transformer, models.sentences),
}


class Validates(L.Callback):
    """What a validation in mid-epoch sees of the weights."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seen.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})


def task_of(name: str, worker: int) -> Learner:
    """The task, with other weights on each virtual worker: all are to start from those of the first one."""
    torch.manual_seed(7 + worker)
    return TASKS[name][0]()


def data_of(name: str, worker: int, batches: int) -> DataLoader[Any]:
    """The data of virtual worker ``worker``; the last batch is smaller."""
    return TASKS[name][1](4 * batches - 1, 4, seed=10 + worker)


class Evaluated(Learner):
    """Validates, if there is something to validate with; fails where it is told to.

    Args:
        task: What is trained.
        fault: (virtual worker, batch, what happens there).
        folder: Where it meets the test, if it is told to pause.
    """

    def __init__(self, task: Learner, fault: Sequence[Any] = (), folder: str = "") -> None:
        super().__init__(task.recipe)
        self.task = task
        self.fault = fault
        self.folder = folder
        self.mean = MeanMetric()
        self.all = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fault and (self.global_rank, batch_idx) == tuple(self.fault[:2]):
            what = self.fault[2]
            if what == "raise":
                raise ValueError("a bad batch")
            if what == "nan":
                outputs = self.compute(batch)
                return {**outputs, "loss": outputs["loss"] * float("nan")}
            if what == "pause":
                Path(self.folder, "paused").write_text("")  # pipes: each waits until the test is there
                Path(self.folder, "go on").read_text()
            elif what == "server":
                faults.kill_server()
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[what])
        return super().training_step(batch, batch_idx)

    def compute(self, batch: Any) -> Any:
        return self.task.compute(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.compute(batch)["loss"]
        self.log("loss", loss, sync_dist=True)
        self.mean(loss)
        self.all.update(loss)
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.log("count", float(len(self.all.compute())), sync_dist=True)
        self.all.reset()


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    lengths: Sequence[int] = job["lengths"]
    wsp = WSPCallback(**job.get("wsp", {}))
    strategy = HetPipeStrategy(
        virtual_workers=job.get("virtual_workers", len(lengths)),
        stages=job["stages"],
        in_flight=job["in_flight"],
        wsp=wsp,
        timeout=job.get("timeout", 60),
    )
    trainer_settings = {"strategy": strategy, "use_distributed_sampler": False, **job.get("trainer", {})}
    recorder, validates = Recorder(), Validates()
    trainer = make_trainer([validates, recorder], **trainer_settings)
    worker = strategy.global_rank
    faults.install(worker, job.get("faults", ()))
    if "delays" in job:
        strategy._before_pass = Delays(job["delays"] + worker)
    module = Evaluated(task_of(job["task"], worker), job.get("fault", ()), job["folder"])
    torch.manual_seed(3)
    loader = data_of(job["task"], worker, lengths[worker])
    trainer.fit(module, loader, data_of(job["task"], 8 + worker, 3) if job.get("validate") else None)
    record = recorder.record
    torch.save(
        {
            "outputs": record.outputs,
            "states": [vars(state) for state in record.states],
            "validated": validates.seen,
            "end": module.state_dict(),
            "metrics": dict(trainer.callback_metrics),
        },
        Path(job["folder"]) / f"{worker}.pt",
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
