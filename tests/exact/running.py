"""Runs of Lightning's Trainer, recorded in the oracle's terms, and the oracle's own run of the same task."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_hetpipe.pipeline.user.user_section import ProcessState
from tests import oracle
from tests.oracle import Batch, Outputs, Run, State
from tests.support.equality import assert_same
from tests.support.models import Learner
from tests.support.trainers import quiet_trainer


@dataclass(repr=False)
class Record(Run):
    """A run of the Trainer, as its callbacks saw it; ``end`` is what was left when ``fit`` returned."""

    batches: list[list[Batch]] = field(default_factory=list)
    end: State | None = None
    trainer: L.Trainer | None = None


class Recorder(L.Callback):
    """Writes down what an outsider can see at each step. Put it last among the callbacks."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.states.append(State.of(pl_module, trainer.optimizers[0]))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.batches.append([])

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self.record.gradients[len(self.record.states)] = oracle.gradients(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(outputs, dict)
        if not self.record.batches:  # an epoch that is resumed in the middle does not start
            self.record.batches.append([])
        self.record.batches[-1].append(batch)
        self.record.outputs.append({name: value.detach().clone() for name, value in outputs.items()})
        self.record.states.append(State.of(pl_module, trainer.optimizers[0]))


def fit(
    task: L.LightningModule,
    loader: Iterable[Batch],
    callbacks: Sequence[L.Callback] = (),
    *,
    val_loader: Iterable[Batch] | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Record:
    """Fits for two epochs with a quiet Trainer, unless its ``settings`` say otherwise, and records it."""
    recorder = Recorder()
    trainer = quiet_trainer(callbacks=[*callbacks, recorder], **{"max_epochs": 2, **settings})
    trainer.fit(task, loader, val_loader, ckpt_path=ckpt_path)
    return finish(recorder, trainer, task)


def finish(recorder: Recorder, trainer: L.Trainer, task: L.LightningModule) -> Record:
    record = recorder.record
    record.end = State.of(task, trainer.optimizers[0])
    record.trainer = trainer
    return record


def expect(
    task: Learner,
    epochs: DataLoader[Any] | Sequence[Sequence[Batch]],
    in_flight: int | Sequence[int],
    *,
    max_epochs: int = 2,
    draws: bool = False,
    stages: int | None = None,
    **options: Any,
) -> Run:
    """The oracle's run of ``task``: over given epochs, or ``max_epochs`` times over an unshuffled loader.

    Where ``training_step`` itself ``draws``, each minibatch has random numbers of its own. If ``stages`` are given, the
    fit that follows finds the default generator as the oracle did. A single stage with one minibatch in flight draws
    from it (law L7).
    """
    if stages is not None:
        options["plain"] = torch.initial_seed() if stages == in_flight == 1 else None
    if isinstance(epochs, DataLoader):
        epochs = [list(epochs)] * max_epochs

    numbers, seed, initial = itertools.count(1), oracle.run_seed(), torch.initial_seed()

    def step(model: Learner, batch: Batch) -> Outputs:
        if draws:
            ProcessState.seeded(seed, 0, next(numbers)).restore()
        return model.compute(batch)

    expected = oracle.train(task, step, epochs, task.recipe, in_flight, **options)
    if stages is not None:
        torch.manual_seed(initial)
    return expected


def after(run: Run, p: int) -> Run:
    """Rest of a run from version ``p`` on, as a run that was resumed there sees it."""
    kept = {minibatch - p: gradients for minibatch, gradients in run.gradients.items() if minibatch > p}
    return Run(run.outputs[p:], run.states[p:], kept)


def assert_equal(expected: Run, record: Record) -> None:
    """Every minibatch, every version and the end are equal, bit for bit; the message names the first difference."""
    assert len(record.outputs) == len(expected.outputs), (
        f"{len(record.outputs)} minibatches instead of {len(expected.outputs)}"
    )
    assert_same(expected.states[0], record.states[0], "start")
    for p, (outputs, state) in enumerate(zip(expected.outputs, expected.states[1:], strict=True), start=1):
        assert_same(outputs, record.outputs[p - 1], f"minibatch {p}")
        assert_same(expected.gradients.get(p), record.gradients.get(p), f"gradients {p}")
        assert_same(state, record.states[p], f"version {p}")
    assert_same(expected.states[-1], record.end, "end")


def assert_same_run(one: Record, other: Record) -> None:
    for part in ("outputs", "gradients", "states", "end"):
        assert_same(getattr(one, part), getattr(other, part), part)
