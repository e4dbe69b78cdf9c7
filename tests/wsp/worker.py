"""One process of a launch of virtual workers: trains a task of the tests, and writes down what it saw.

Run as ``python -m tests.wsp.worker '{"task": "mlp", ...}' ...``, a fit for each; see :class:`tests.wsp.launch.Job`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_hetpipe import Cluster, HetPipeStrategy, Node, WSPCallback
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.planning.model.profile import Times
from lightning_hetpipe.run import preemption
from lightning_hetpipe.run.extensions.telemetry import Pace
from tests.exact.pipelines import Delays
from tests.exact.running import Recorder
from tests.hosts.elsewhere import away
from tests.oracle import State
from tests.split.longest_layer import with_longest
from tests.support.models import Learner
from tests.support.trainers import quiet_trainer
from tests.wsp import faults
from tests.wsp.pushed import Pushed
from tests.wsp.tasks import TASKS

SEED = 3
"""Seed of the run, on all virtual workers; their models and their data have others."""


class Validates(L.Callback):
    """Recorder of the weights that a validation in mid-epoch sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seen.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})


def task_of(name: str, worker: int) -> Learner:
    """The task, with other weights on each virtual worker: all are to start from those of the first one."""
    torch.manual_seed(7 + worker)
    return TASKS[name][0]()


def data_of(name: str, worker: int, batches: int, *, even: bool = False) -> DataLoader[Any]:
    """Return the data of virtual worker ``worker``. The last batch is smaller, unless batches are ``even``.

    A captured model needs a second graph for the smaller batch, which takes a process a second.
    """
    return TASKS[name][1](4 * batches - (not even), 4, seed=10 + worker)


def shared_data(name: str, batches: int) -> DataLoader[Any]:
    """``batches`` of data that all virtual workers share, in another order in every epoch."""
    return DataLoader(data_of(name, 0, batches).dataset, 4, shuffle=True)


class Acts(L.Callback):
    """Does something after a step.

    Args:
        acts: (virtual worker, minibatch from 1, what) of each.
        folder: for checkpoints.
    """

    def __init__(self, acts: Sequence[Sequence[Any]], folder: str) -> None:
        self.acts = acts
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        for worker, minibatch, what in self.acts:
            if worker in (trainer.global_rank, "all") and minibatch == trainer.global_step:
                if what == "stop":
                    trainer.should_stop = True
                elif what == "save":
                    trainer.save_checkpoint(f"{self.folder}/saved.ckpt")
                elif what == "SIGTERM":
                    os.kill(os.getpid(), signal.SIGTERM)
                elif what in ("fill", "fill most"):
                    fill(Path(self.folder), left=4096 * 4 * (what == "fill most"))
                elif what == "edit":  # as a callback moves a teacher, each by what it has seen
                    frozen = next(p for p in trainer.lightning_module.parameters() if not p.requires_grad)
                    frozen.data.add_(0.1 + trainer.global_rank)
                elif what == "meet":  # whoever is held there goes on when this is opened
                    open(f"{self.folder}/meeting", "w").close()


class Elsewhere(TorchCheckpointIO):
    """Writes checkpoints to other places than Lightning names."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, f"{path}.elsewhere", storage_options)


class Talks(L.Callback):
    """Asks all virtual workers for something when an epoch begins."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert trainer.strategy.broadcast(f"{trainer.global_rank} in {trainer.current_epoch}").startswith("0")


class Waits(L.Callback):
    """Has virtual worker 0 wait, in the last minibatch of an epoch, until others are ready to come back.

    Args:
        epochs: How many are to be ready, by epoch; "all": in each those that have come so far and do not take part, if
            they come in time.
        group: Gives the group.
        folder: Where "all" notes when it waited, in a file "waits".
    """

    def __init__(self, epochs: dict[str, int] | Literal["all"], group: Callable[[], Any], folder: str) -> None:
        self.epochs, self.group, self.path = epochs, group, Path(folder, "waits")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or batch_idx + 1 < trainer.num_training_batches:
            return
        group = self.group()
        if self.epochs != "all":
            number = self.epochs.get(str(trainer.current_epoch), 0)
            faults.until(lambda: len(group.seats.ready()) >= number, f"{number} virtual workers do not come back")
            return
        faults.do("continue")
        began = time.time()
        members = {member.vw for member in group.weights.member.commit_index.members}
        strategy = trainer.strategy
        assert isinstance(strategy, HetPipeStrategy)
        launched = set(range(strategy._workers.rank.started))

        def there() -> bool:
            here: set[int] = members | group.seats.ready().keys()
            return here >= launched | {each.vw for each in faults.joined if each.lives}

        with suppress(AssertionError):  # some may not come any more
            faults.until(there, "some are missing")
        with self.path.open("a") as file:
            print(json.dumps([began, time.time()]), file=file)


def fill(folder: Path, left: int = 0) -> None:
    """Leave no room but for ``left`` bytes on the file system of ``folder``."""
    with suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    os.truncate(folder / "filling", os.path.getsize(folder / "filling") - left)


class Notes(Logger):
    """Keeps the strategy's metrics."""

    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "hetpipe/clock" in metrics:
            self.logged.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Clock(Timer):
    """The time of virtual worker i is over when ``last[i]`` steps are done."""

    def __init__(self, last: Sequence[int]) -> None:
        super().__init__(duration={"hours": 1})
        self.last = last
        self.over = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.over = trainer.global_step >= self.last[trainer.global_rank]
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: RunningStage | str = RunningStage.TRAINING) -> float:
        return 3600.0 if self.over else 0.0


class WantsMemory:
    """Has a stage of a virtual worker want more memory than there is, as a GPU's allocator would say it.

    Args:
        worker: The virtual worker of this process.
        where: (virtual worker, stage, work, minibatch).
    """

    def __init__(self, worker: int, where: Sequence[Any]) -> None:
        self.here, *self.task = (worker == where[0], *where[1:])

    def __call__(self, *task: Any) -> None:
        if self.here and [*task] == self.task:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Estimating(L.Callback):
    """Has loaders made before virtual workers meet for a fit, as a schedule of learning rates over all steps has."""

    def __init__(self) -> None:
        self.steps: float = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        original = pl_module.configure_optimizers

        def estimating() -> Any:
            self.steps = trainer.estimated_stepping_batches
            return original()

        pl_module.configure_optimizers = estimating  # type: ignore[method-assign]


class Evaluated(Learner):
    """Validates, if there is something to validate with; fails where it is told to.

    Args:
        task: What is trained.
        fault: (virtual worker or "all", batch, what happens there): a signal's name, or what `training_step` knows;
            "validation" is a batch as well.
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
        if self.fault and self.fault[0] in (self.global_rank, "all") and self.fault[1] == batch_idx:
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
            elif what == "hold":
                open(self.fault[3]).close()  # until the other end is opened
            elif what == "save":
                self.trainer.save_checkpoint(self.fault[3])
            elif what == "SIGTERM of all":
                faults.tell_all()
            else:
                os.kill(os.getpid(), getattr(signal, what))
        return super().training_step(batch, batch_idx)

    def compute(self, batch: Any) -> Any:
        return self.task.compute(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fault and tuple(self.fault[:2]) == (self.global_rank, "validation"):
            os.kill(os.getpid(), getattr(signal, self.fault[2]))
        loss = self.compute(batch)["loss"]
        self.log("loss", loss, sync_dist=True)
        self.mean(loss)
        self.all.update(loss)
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.log("count", float(len(self.all.compute())), sync_dist=True)
        self.all.reset()


def outlast(folder: Path, worker: int, who: int) -> None:
    """Code of a user's after the training; that of virtual worker ``who`` lasts.

    Of 1 it lasts until somebody ends it. That of 0 lasts until 1 has come to its end, and a while in which it may have
    ended.
    """
    if who == worker == 1:
        Path(folder, "never").read_text()
    (folder / f"{worker}-{os.getpid()}.ended").touch()
    if who == worker == 0:
        faults.until(lambda: any(folder.glob("1-*.ended")), "virtual worker 1 does not end")
        other = Path("/proc", next(folder.glob("1-*.ended")).stem.partition("-")[2])
        for _ in range(60):
            if other.exists():
                threading.Event().wait(0.05)
        (folder / "lasted").touch()


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    lengths: Sequence[int] = job["lengths"]
    wsp = WSPCallback(**job.get("wsp", {}))
    cluster = Cluster([Node(name, devices) for name, devices in job["cluster"].items()]) if "cluster" in job else None
    strategy = HetPipeStrategy(
        virtual_workers=job.get("virtual_workers", 1 if "plan" in job else len(lengths)),
        plan=job.get("plan"),
        cluster=cluster,
        stages=job["stages"],
        in_flight=job["in_flight"],
        wsp=wsp,
        timeout=job.get("timeout", 60),
        weights=job.get("weights", "stash"),
        lr_correction=job.get("lr_correction", "auto"),
        split=job.get("split", False),
    )
    if "hosts" in job:
        away(strategy, job["hosts"])
    if "longest" in job:
        vars(measuring)["profiled"] = with_longest(measuring.profiled, job["longest"], longest=Times(0.04, 0.08))
    recorder, validates, notes = Recorder(), Validates(), Notes()
    callbacks: list[L.Callback] = [validates, recorder, Acts(job.get("acts", ()), job["folder"])]
    if "awaits" in job:
        callbacks.append(Waits(job["awaits"], lambda: strategy._workers.group, job["folder"]))
    estimating = Estimating()
    if "estimates" in job:
        callbacks.append(estimating)
    if "clocks" in job:
        callbacks.append(Clock(job["clocks"]))
    if "averages" in job:
        callbacks.append(EMAWeightAveraging(decay=job["averages"]))
    if "talks" in job:
        callbacks.append(Talks())
    if "finds_rate" in job:
        callbacks.append(LearningRateFinder(1e-5, 0.1, num_training_steps=job["finds_rate"], update_attr=False))
    if "saves_on_exception" in job:
        callbacks.append(OnExceptionCheckpoint(job["folder"]))
    if "saves" in job:
        saves = job["saves"]
        if "train_time_interval" in saves:
            saves["train_time_interval"] = timedelta(seconds=saves["train_time_interval"])
        callbacks.append(ModelCheckpoint(job["folder"], "{step}", save_top_k=-1, **saves))
    defaults: dict[str, Any] = {
        "strategy": strategy,
        "max_epochs": 2,
        "devices": 1,
        "use_distributed_sampler": "shares" in job,
    }
    defaults |= {"enable_checkpointing": "saves" in job or "saves_on_exception" in job}
    defaults |= {"logger": notes, "log_every_n_steps": 1}
    if "saves_elsewhere" in job:
        defaults["plugins"] = [Elsewhere()]
    if job.get("saves_later"):
        defaults["plugins"] = [AsyncCheckpointIO()]
    trainer = quiet_trainer(callbacks=callbacks, **{**defaults, **job.get("trainer", {})})
    worker = strategy.global_rank
    if "late" in job and Path(job["late"]).exists():  # a process that was started again
        faults.until(Path(job["folder"], "meeting").exists, "nobody comes to meet it")
    faults.install(worker, job.get("faults", ()))
    if "log" in job:
        faults.record_decisions(job["log"])
    pushed = Pushed() if "pushed" in job else None
    if "paces" in job:  # of each virtual worker, epoch after epoch
        paces = iter([epoch[worker] for epoch in job["paces"]])
        Pace.rate = property(lambda self: next(paces))  # type: ignore[assignment, method-assign]
    if "delays" in job:
        strategy._before_pass = Delays(job["delays"] + worker)
    if "wants_memory" in job:
        strategy._before_pass = WantsMemory(worker, job["wants_memory"])
    module = Evaluated(task_of(job["task"], worker), job.get("fault", ()), job["folder"])
    if job.get("on_meta"):
        module.task.to("meta")
    torch.manual_seed(SEED)
    shares = job.get("shares")
    even = job.get("even", False)
    loader = shared_data(job["task"], shares) if shares else data_of(job["task"], worker, lengths[worker], even=even)
    validation = data_of(job["task"], 8 + worker, 3, even=even) if job.get("validate") else None
    preemption.TOGETHER = job.get("together", preemption.TOGETHER)
    ended: BaseException | None = None
    try:
        trainer.fit(module, loader, validation, ckpt_path=job.get("resume"))
    except SIGTERMException as error:
        if not job.get("is_preempted"):
            raise
        ended = error
    if "validates_after" in job:
        trainer.validate(module, shared_data(job["task"], job["validates_after"]), verbose=False)
    record = recorder.record
    torch.save(
        {
            "outputs": record.outputs,
            "states": record.states,
            "validated": validates.seen,
            "end": State.of(module, trainer.optimizers[0]),
            "metrics": dict(trainer.callback_metrics),
            "logged": notes.logged,
            "estimated": estimating.steps,
            "pushed": pushed,
            "stages": [stage.layers for stage in strategy.last_run.stages],
            "devices": [str(stage.device) for stage in strategy.last_run.stages],
            "in_flight": strategy.last_run.in_flight,
        },
        Path(job["folder"]) / f"{worker}.pt",
    )
    for joined in faults.joined:
        print(f"virtual worker {joined.vw}, which has joined, ended with {joined.end()}", file=sys.stderr)
    if ended is not None:
        raise ended
    if "lasts" in job:
        outlast(Path(job["folder"]), worker, job["lasts"])


if __name__ == "__main__":
    for job in sys.argv[1:]:
        main(json.loads(job))
