"""A training process of a benchmark: trains the variant that its argument names and announces its throughput.

Where a variant has several workers, this process starts the others, each of which announces its own. Given several
tasks, it takes turns with them: what the machine gives changes within minutes, and from process to process, by more
than a few percent.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.folder_profile import FolderProfile
from benchmarks.harness import Measurement, announce, wait_for_others
from benchmarks.training_models import MODELS, Pair, build, optimizer_of
from benchmarks.training_task import WORKER, Task, Variant

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy


class Synthetic(Dataset[Pair]):
    """As many samples as the task needs, taken again and again from a few minibatches in memory."""

    def __init__(self, task: Task) -> None:
        # Of all workers together: with as many samples in a step, they see the same ones as one worker alone.
        self.pool = 4 * task.batch * task.workers
        generator = torch.Generator().manual_seed(1)
        self.inputs, self.targets = MODELS[task.model].samples(task, self.pool, generator)
        self.length = task.total * task.batch * task.workers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index % self.pool], self.targets[index % self.pool]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        """A whole minibatch at once, so that fetching costs next to nothing."""
        rows = torch.tensor(indices) % self.pool
        return self.inputs[rows], self.targets[rows]


def as_it_is(pair: Any) -> Any:
    """Collates nothing: the dataset hands out whole minibatches."""
    return pair


def build_loader(task: Task, worker: int = 0) -> "DataLoader[Pair]":
    """The same loader for every variant; of several workers, each takes its share of the samples of one step."""
    data = Synthetic(task)
    # Lightning's own sampler would shuffle, and so train on other minibatches than one worker alone does.
    share: DistributedSampler[Pair] | None = None
    if task.workers > 1:
        share = DistributedSampler(data, task.workers, worker, shuffle=False)
    return DataLoader(data, batch_size=task.batch, sampler=share, collate_fn=as_it_is, num_workers=0)


@dataclass
class Window:
    """A stopwatch over the task's window of minibatches."""

    task: Task
    finished: int = 0
    clock: list[tuple[float, float]] = field(default_factory=list)
    loss: float | None = None
    cpu_seconds: Callable[[], float] = time.process_time
    """CPU seconds of this process and of those that work for it alone."""
    began: float = 0.0
    first_step: float | None = None
    profile: FolderProfile | None = None
    """CPU time by folder, if the task asks for it."""
    folders: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    """Totals of the profile at the window's beginning and end."""

    def __post_init__(self) -> None:
        if self.task.profile:
            self.profile = FolderProfile()

    def minibatch_done(self, loss: Tensor | None) -> None:
        """To be called after each minibatch, its optimizer step included."""
        self.finished += 1
        if self.finished == 1:
            self._computed()
            self.first_step = time.perf_counter() - self.began
        if self.finished == self.task.warmup:
            if self.task.together:
                wait_for_others()
            self._computed()
            self._note()
            self.clock.append((time.perf_counter(), self.cpu_seconds()))
        elif self.finished == self.task.warmup + self.task.steps:
            cpu_seconds = self.cpu_seconds()  # first: to wait for a device takes CPU time
            self._computed()
            self.clock.append((time.perf_counter(), cpu_seconds))
            self._note()
            if loss is not None:
                self.loss = loss.item()

    def _computed(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.task.accelerator != "cpu":
            torch.accelerator.synchronize()

    def _note(self) -> None:
        if self.profile is not None:
            self.folders.append(self.profile.totals())

    def of_folders(self) -> dict[str, tuple[float, float]]:
        """Calls and microseconds of CPU time of a minibatch of the window, by folder."""
        before, after = self.folders
        return {
            folder: (
                (calls - before.get(folder, (0, 0))[0]) / self.task.steps,
                1e6 * (seconds - before.get(folder, (0, 0))[1]) / self.task.steps,
            )
            for folder, (calls, seconds) in after.items()
        }

    @property
    def seconds(self) -> float:
        """Seconds of the window."""
        return self.clock[1][0] - self.clock[0][0]

    def measurement(self, name: str, notes: Mapping[str, object] | None = None) -> Measurement:
        """The measurement of the window."""
        return Measurement(
            name=name,
            rate=self.task.steps / self.seconds,
            cores=(self.clock[1][1] - self.clock[0][1]) / self.seconds,
            threads=torch.get_num_threads(),
            loss=self.loss,
            notes={**(notes or {}), **({"folders": self.of_folders()} if self.folders else {})},
            first_step=self.first_step,
        )


def run(task: Task, strategy: "str | Strategy", window: Window, logger: "Logger | None" = None) -> Window:
    """Runs one Trainer with one LightningModule, whatever the strategy; returns the window."""
    profile = nullcontext() if window.profile is None else window.profile.watching()
    with tempfile.TemporaryDirectory() as folder, profile:
        return run_in(folder, task, strategy, window, logger)


def run_in(
    folder: str, task: Task, strategy: "str | Strategy", window: Window, logger: "Logger | None" = None
) -> Window:
    """The same, with what it writes in ``folder``."""
    import lightning as L

    model = MODELS[task.model]

    class Learner(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(task)

        def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return model.loss(self.net(inputs), targets)

        def test_step(self, batch: Pair, batch_idx: int) -> Tensor:
            return self.training_step(batch, batch_idx)

        def train_dataloader(self) -> "DataLoader[Pair]":
            return build_loader(task, self.trainer.global_rank)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(task, self.net.parameters())

    class Stopwatch(L.Callback):
        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            window.minibatch_done(loss if isinstance(loss, Tensor) else None)

        def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any, **index: Any) -> None:
            window.minibatch_done(outputs)

    trainer = L.Trainer(
        strategy=strategy,
        accelerator=task.accelerator,
        precision=task.precision,
        devices=task.workers if task.variant == "ddp" else 1,
        max_epochs=1,
        callbacks=[Stopwatch()],
        logger=logger or False,
        log_every_n_steps=task.log_every,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    learner = Learner()
    window.began = time.perf_counter()
    if task.loop == "fit":
        trainer.fit(learner)
    else:
        trainer.test(learner, build_loader(task), verbose=False)
    return window


def train_plainly(task: Task) -> Iterator[Measurement]:
    """Variant "plain": Lightning's own way."""
    yield run(task, "auto", Window(task)).measurement(task.variant)


def train_with_ddp(task: Task) -> Iterator[Measurement]:
    """Variant "ddp": Lightning's data parallel strategy, over gloo."""
    yield run(task, "ddp", Window(task)).measurement(task.variant)


def train_with_strategy(task: Task) -> Iterator[Measurement]:
    """Variant "strategy": the same with a HetPipeStrategy."""
    from lightning_hetpipe import HetPipeStrategy, WSPCallback
    from lightning_hetpipe.emulation import Pad
    from lightning_hetpipe.run.stage_steps import StageSteps
    from tests.support.padding import padded

    # The mean, as DDP's: with the sum, the learning rate of this variant would be another one.
    wsp = WSPCallback(clock_distance=task.clock_distance, wave=task.wave or "auto", aggregate="mean")
    policy: dict[str, Any] = {} if task.weights is None else {"weights": task.weights}
    strategy = HetPipeStrategy(
        stages=task.stages,
        in_flight=task.in_flight or "auto",
        virtual_workers=task.workers,
        wsp=wsp,
        recompute=task.recompute,
        compile=task.compile,
        timeline=task.timeline,
        **policy,
    )
    metrics = collected_metrics() if task.workers > 1 else None
    divides = StageSteps.divides if task.stage_steps is None else lambda _: task.stage_steps
    pads = padded(strategy, [Pad(*pad) for pad in task.pads]) if task.pads else nullcontext()
    with patch.object(StageSteps, "divides", divides), pads as emulation:
        watch = Window(task, cpu_seconds=with_helpers if task.workers > 1 else time.process_time)
        window = run(task, strategy, watch, metrics)
    report = strategy.last_run
    notes: dict[str, object] = {}
    if report is not None:
        if report.timeline is not None:
            notes["spans"] = len(report.timeline.spans)
        notes["in_flight"] = report.in_flight
        notes["layers"] = [stage.layer_types.count("Linear") for stage in report.stages]
        notes["times"] = [stage.time_s for stage in report.stages]
        notes["activations_bytes"] = [stage.activations_bytes for stage in report.stages]
        notes["compile_s"] = [round(stage.compile_s, 3) for stage in report.stages]
        notes["busy"] = [round(stage.busy or 0.0, 3) for stage in report.stages]
    if emulation is not None:
        notes["overruns"] = sum(stage.overruns for stage in emulation.stages)
        notes["passes"] = sum(stage.passes for stage in emulation.stages)
    if metrics is not None:
        inside = [each for step, each in metrics.logged if task.warmup <= step < task.warmup + task.steps]
        notes["waited"] = sum(each["hetpipe/sync_wait_seconds"] for each in inside) / window.seconds
    yield window.measurement(task.variant, notes)


def with_helpers() -> float:
    """CPU seconds of this process and of those that it has started: its server, but no other worker. Needs /proc."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and WORKER not in (folder / "cmdline").read_text():
                ticks += int(fields[11]) + int(fields[12])
        except OSError:  # it has ended meanwhile
            continue
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def collected_metrics() -> Any:
    """A logger that keeps what it is told as (step, metrics) in `logged`."""
    from lightning.pytorch.loggers import Logger

    class Collected(Logger):
        name, version = "collected", 0

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged.append((step or 0, metrics))

        def log_hyperparams(self, *args: object, **kwargs: object) -> None:
            """Nothing to keep."""

    return Collected()


def train_with_schedule_1f1b(task: Task) -> Iterator[Measurement]:
    """Variant "schedule_1f1b": torch's synchronous pipeline in a plain loop; this process is one of its two stages."""
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo", init_method=f"file://{task.rendezvous}", rank=task.rank, world_size=2)
    kind = MODELS[task.model]
    assert kind.halves is not None, task.model
    for microbatches in task.microbatches:
        part = kind.halves(build(task))[task.rank]
        optimizer = optimizer_of(task, part.parameters())
        stage = PipelineStage(part, stage_index=task.rank, num_stages=2, device=torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=kind.loss)
        window = Window(task)
        for inputs, targets in build_loader(task):
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if task.rank == 0:
                schedule.step(inputs, return_outputs=False)
            else:
                schedule.step(target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            window.minibatch_done(torch.stack(losses).mean() if losses else None)
        yield window.measurement(str(microbatches))
    distributed.destroy_process_group()


TRAINING: Mapping[Variant, Callable[[Task], Iterator[Measurement]]] = {
    "plain": train_plainly,
    "strategy": train_with_strategy,
    "ddp": train_with_ddp,
    "schedule_1f1b": train_with_schedule_1f1b,
}


def in_turn(tasks: Sequence[Task]) -> Iterator[Measurement]:
    """One measurement for each task, over all its turns; every other time they go in the opposite order."""
    found: list[list[Measurement]] = [[] for _ in tasks]
    for turn in range(max(task.turns for task in tasks)):
        pairs = [*zip(tasks, found, strict=True)]
        for task, own in pairs[:: -1 if turn % 2 else 1]:
            own += TRAINING[task.variant](task)
    yield from map(of_all_turns, found)


def of_all_turns(turns: Sequence[Measurement]) -> Measurement:
    """One measurement over windows of equally many minibatches."""
    seconds = sum(1 / turn.rate for turn in turns)
    cpu_seconds = sum(turn.cores / turn.rate for turn in turns)
    return replace(turns[-1], rate=len(turns) / seconds, cores=cpu_seconds / seconds)


def main(*arguments: str) -> None:
    """Does the tasks that `arguments` hold as JSON, on the first one's cores."""
    tasks = [Task.from_json(argument) for argument in arguments]
    if tasks[0].cores:
        os.sched_setaffinity(0, tasks[0].cores)
    for measurement in in_turn(tasks) if len(tasks) > 1 else TRAINING[tasks[0].variant](tasks[0]):
        announce(measurement)


if __name__ == "__main__":
    main(*sys.argv[1:])
